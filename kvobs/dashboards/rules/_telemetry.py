"""Alerts about what cannot be seen: processes, engines, kvobs itself."""

from __future__ import annotations

from kvobs.dashboards.rules._alert import Alert
from kvobs.dashboards.rules._promql import by, grown, increase, metric, total

JOB = "kvobs"
# Moves at each tick of the drain thread (4 times a second), whatever the process does.
HEART = metric("kvobs.self.drain.duration")
KNOWN = "6h"
_PROCESS = "{{ $labels.instance }} ({{ $labels.job }})"


def _unreachable() -> str:
    """Targets of the usual job, and those of any other that have been kvobs's."""
    return f'up{{job="{JOB}"}} == 0\nor up == 0 and on {by()} last_over_time({HEART}[{KNOWN}])'


def _job_absent() -> str:
    return (f"group by (job) (last_over_time({HEART}[{KNOWN}]))\nunless group by (job) ({HEART})\n"
            f"or absent(last_over_time({HEART}[{KNOWN}]))")


ALERTS = (
    Alert(name="KvobsUnreachable", severity="page", board="telemetry", wait="3m", expression=_unreachable(),
          summary=f"{_PROCESS} does not answer.",
          description="Its scrapes have failed for 3 minutes: the process is gone, hangs, or cannot be reached. No "
                      "other alert about it can be believed."),
    Alert(name="KvobsJobAbsent", severity="ticket", board="telemetry", wait="5m", expression=_job_absent(),
          summary="No process of job {{ with $labels.job }}{{ . }}{{ else }}kvobs{{ end }} says anything.",
          description="Prometheus has no sample of kvobs from this job; where there was one within 6 hours the job is "
                      "named."),
    Alert(name="KvobsTelemetryStale", severity="ticket", board="telemetry", wait="1m",
          expression=f"{total(increase(HEART, 180))} == 0\nunless on {by()} up == 0",
          summary=f"{_PROCESS} answers, but kvobs stands still in it.",
          description="The thread that keeps the metrics has used no time for 3 minutes, so all its values are old."),
    Alert(name="KvobsTelemetryDropped", severity="ticket", board="telemetry", wait="5m",
          expression=total(increase(metric("kvobs.self.events.dropped"), 300), "stage") + " > 0",
          summary=f"{_PROCESS} loses telemetry at its {{{{ $labels.stage }}}}.",
          description="{{ $value | humanize }} events were dropped within 5 minutes; counters of events are too low."),
    Alert(name="KvobsObservationPaused", severity="info", board="telemetry", wait="10m",
          expression=f"max by {by()} ({metric('kvobs.self.throttle')}) >= 2",
          summary=f"{_PROCESS} passes everything through unobserved.",
          description="kvobs cost more than its overhead allows and has stopped looking for 10 minutes."),
    Alert(name="KvobsHookDetached", severity="ticket", board="telemetry", wait="1m",
          expression=total(metric("kvobs.self.hook.failures"), "source") + " > 0",
          summary=f"A hook of {{{{ $labels.source }}}} in {_PROCESS} failed.",
          description="{{ $value }} hooks raised and were detached since the process began; what they saw is absent."),
    Alert(name="KvobsLabelOverflow", severity="ticket", board="telemetry",
          expression=grown(metric("kvobs.self.series.overflow"), 900, "metric") + " > 0",
          summary=f"{{{{ $labels.metric }}}} of {_PROCESS} has more series than are kept.",
          description="{{ $value | humanize }} points went to the series named other within 15 minutes."),
    Alert(name="KvobsEngineUnreachable", severity="ticket", board="telemetry", wait="5m",
          expression=f"max by {by('target')} ({metric('kvobs.engine.up')}) == 0",
          summary=f"The engine at {{{{ $labels.target }}}} does not answer {_PROCESS}.",
          description="The bridge's scrapes have failed for 5 minutes; the engine's own values are absent."),
)
