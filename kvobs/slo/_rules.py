"""The same objectives as Prometheus rules, over the counters that every process exports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvobs.catalog import BY_NAME, prometheus_name
from kvobs.config import Objective
from kvobs.slo._burn import ALERTS, Alert, refusal, window_text

GOOD, EVENTS = (prometheus_name(BY_NAME[name]) for name in ("kvobs.slo.good", "kvobs.slo.events"))
BY = "job, instance"


def burn_expression(objective: Objective, seconds: int) -> str:
    """The burn rate over a window as PromQL; no sample where there were no events."""
    good, events = (f'sum by ({BY}) (increase({name}{{objective="{objective.name}"}}[{window_text(seconds)}]))'
                    for name in (GOOD, EVENTS))
    return f"(1 - {good} / ({events} > 0)) / {_allowed(objective)}"


def _allowed(objective: Objective) -> str:
    return f"{round(1 - objective.target, 12):.12f}".rstrip("0")


def alert_expression(objective: Objective, alert: Alert) -> str:
    """What is there while an alert fires, as PromQL."""
    return "\nand\n".join(f"{burn_expression(objective, seconds)} > {alert.factor:g}"
                          for seconds in (alert.short_s, alert.long_s))


def alert_rules(objectives: Iterable[Objective]) -> list[dict[str, Any]]:
    """The alerting rules of a rule group; those that cannot fire are left out."""
    return [{"alert": "KvobsErrorBudgetBurn", "expr": alert_expression(objective, alert),
             "labels": {"severity": alert.severity, "objective": objective.name, "windows": alert.windows},
             "annotations": {"summary": f"The error budget of {objective.name} burns more than {alert.factor:g} times "
                                        "as fast as it may.",
                             "description": objective.sentence}}
            for objective in objectives for alert in ALERTS if not refusal(objective, alert)]
