"""Alerts about objectives and the breaker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvobs.config import Objective
from kvobs.dashboards.rules._alert import Alert, links
from kvobs.dashboards.rules._promql import by, grown, increase, metric
from kvobs.slo import alert_rules

BURN = "KvobsErrorBudgetBurn"
_PROCESS = "{{ $labels.job }}, {{ $labels.instance }}"
_ACTUATOR = "{{ $labels.kind }} by {{ $labels.actuator }} ({{ $labels.instance }})"


def burn_rules(objectives: Iterable[Objective], runbooks: str, dashboards: str) -> list[dict[str, Any]]:
    """An alert for each pair of windows that can fire for an objective; its value is the short window's burn rate."""
    return [{**rule, "annotations": {
        **rule["annotations"],
        "description": f"{rule['annotations']['description']} At the rate of the last minutes the budget burns "
                       "{{ $value | humanize }} times as fast as it may, in {{ $labels.instance }} (windows "
                       "{{ $labels.windows }}).",
        **links(BURN, "slo-breaker", runbooks, dashboards)}} for rule in alert_rules(objectives)]


def _exhausted() -> str:
    """Silent until the budget is one event at least: 1 bad event of 3 says nothing about a target of 99.5 %."""
    budget, target = (f"min by {by('objective')} ({metric(name)})" for name in ("kvobs.slo.budget", "kvobs.slo.target"))
    events = f"sum by {by('objective')} ({increase(metric('kvobs.slo.events'), 259_200)})"
    return f"{budget} <= 0\nand {events}\n* (1 - {target}) >= 1"


def _refused() -> str:
    who = ("actuator", "kind")
    refused = grown(metric("kvobs.breaker.actions", outcome="refused"), 900, *who)
    done = grown(metric("kvobs.breaker.actions", outcome="done"), 900, *who)
    return f"{refused} >= 3\nunless\n{refused} <= {done}"


def _held() -> str:
    """The machine lifts an open level after 5 minutes at the latest to try; without a transition somebody holds it."""
    level = f"max by {by('scope')} ({metric('kvobs.breaker.level', mode='act')})"
    moved = f"sum by {by('scope')} ({increase(metric('kvobs.breaker.transitions', mode='act'), 600)})"
    return f"{level} >= 1\nunless {moved} > 0"


def _opened() -> str:
    return grown(metric("kvobs.breaker.transitions", phase="open"), 1_800, "scope", "mode", "level")


ALERTS = (
    Alert(name="KvobsErrorBudgetExhausted", severity="ticket", board="slo-breaker", wait="5m", expression=_exhausted(),
          summary=f"The error budget of {{{{ $labels.objective }}}} is spent ({_PROCESS}).",
          description="{{ $value | humanizePercentage }} of it is left, of the events of the last 3 days or since the "
                      "process began."),
    Alert(name="KvobsBreakerFlapping", severity="ticket", board="slo-breaker",
          expression=_opened() + " >= 6",
          summary="Level {{ $labels.level }} of the breaker of {{ $labels.scope }} ({{ $labels.instance }}) opens "
                  "again and again.",
          description="It opened {{ $value | humanize }} times within 30 minutes (mode {{ $labels.mode }})."),
    Alert(name="KvobsBreakerHeld", severity="info", board="slo-breaker", wait="20m", expression=_held(),
          summary="The breaker of {{ $labels.scope }} ({{ $labels.instance }}) has been held at level {{ $value }}.",
          description="No level changed its phase for 30 minutes; left alone the breaker would have tried to close."),
    Alert(name="KvobsBreakerActionsRefused", severity="ticket", board="slo-breaker", expression=_refused(),
          summary=f"The breaker's orders are refused: {_ACTUATOR}.",
          description="{{ $value | humanize }} orders were refused within 15 minutes, more than were done."),
    Alert(name="KvobsBreakerActionsLate", severity="ticket", board="slo-breaker",
          expression=grown(metric("kvobs.breaker.late"), 900, "actuator", "kind") + " >= 3",
          summary=f"The breaker's orders are carried out too late: {_ACTUATOR}.",
          description="{{ $value | humanize }} orders within 15 minutes ended after their time limit (0.2 s, 1.2 s or "
                      "3 s)."),
)
