"""Everything for Prometheus and Alertmanager, made from the catalog and the objectives. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvobs.config import Objective
from kvobs.dashboards.rules import _memory, _recording, _routing, _service, _telemetry
from kvobs.dashboards.rules._alert import Alert
from kvobs.dashboards.rules._blind import blind
from kvobs.dashboards.rules._yaml import document

# True wherever the files are: a path below dashboards/, and one of the Grafana that draws the link.
RUNBOOKS = "runbooks"
DASHBOARDS = ""
INTERVAL = "30s"
ALERTS: tuple[Alert, ...] = (*_memory.ALERTS, *_service.ALERTS, *_telemetry.ALERTS)
NAMES = (_service.BURN, *(alert.name for alert in ALERTS))


def recording_groups(objectives: Sequence[Objective]) -> list[dict[str, Any]]:
    """The groups of recording rules.

    Raises:
        ValueError: a rule could never have a value; one sentence.
    """
    return _seen([{"name": "kvobs-recording", "interval": INTERVAL, "rules": _recording.rules(objectives)}], objectives)


def alert_groups(objectives: Sequence[Objective], runbooks: str, dashboards: str) -> list[dict[str, Any]]:
    """The groups of alerting rules.

    Raises:
        ValueError: an alert could never fire; one sentence.
    """
    parts = (("memory", _memory.ALERTS), ("service", _service.ALERTS), ("telemetry", _telemetry.ALERTS))
    groups = [{"name": f"kvobs-{name}", "interval": INTERVAL,
               "rules": [alert.rule(runbooks, dashboards) for alert in alerts]} for name, alerts in parts]
    burn = _service.burn_rules(objectives, runbooks, dashboards)
    if burn:
        groups.append({"name": "kvobs-slo", "interval": INTERVAL, "rules": burn})
    return _seen(groups, objectives)


def files(objectives: Sequence[Objective], runbooks: str, dashboards: str) -> dict[str, str]:
    """Relative path -> text: recording rules, alerts, both as a PrometheusRule, and Alertmanager's configuration.

    ``runbooks`` and ``dashboards`` are the bases of the links: ``<runbooks>/<alert>.md`` and
    ``<dashboards>/d/kvobs-<board>``.

    Raises:
        ValueError: a rule could never fire; one sentence.
    """
    recording, alerts = recording_groups(objectives), alert_groups(objectives, runbooks, dashboards)
    resource = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
                "metadata": {"name": "kvobs", "labels": {"app.kubernetes.io/name": "kvobs"}},
                "spec": {"groups": [*recording, *alerts]}}
    made = ("Generated; change kvobs/dashboards/rules and run make docs.",)
    return {"rules/kvobs-recording.yaml": document({"groups": recording}, made),
            "rules/kvobs-alerts.yaml": document({"groups": alerts}, made),
            "rules/kvobs-prometheusrule.yaml": document(resource, made),
            "alertmanager/alertmanager.yaml": document(_routing.configuration(), (*made, *_routing.COMMENTS))}


def _seen(groups: list[dict[str, Any]], objectives: Sequence[Objective]) -> list[dict[str, Any]]:
    for group in groups:
        for reason in blind(group["rules"], objectives):
            raise ValueError(reason)
    return groups


__all__ = ["ALERTS", "DASHBOARDS", "NAMES", "RUNBOOKS", "Alert", "alert_groups", "blind", "files", "recording_groups"]
