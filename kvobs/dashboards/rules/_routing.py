"""Who is told what: Alertmanager's routes and inhibitions."""

from __future__ import annotations

from typing import Any

COMMENTS = (
    "Alerts of kvobs by severity. The three receivers name nobody and deliver nothing until you add an integration to",
    "each, such as webhook_configs; see https://prometheus.io/docs/alerting/latest/configuration/.",
)
# A label that neither alert has counts as equal.
SAME = ("alertname", "job", "instance", "objective", "model", "device", "cache", "scope")


def configuration() -> dict[str, Any]:
    """The configuration of Alertmanager 0.22 or newer."""
    return {
        "route": {
            "receiver": "kvobs-ticket", "group_by": ["alertname", "job", "objective"],
            "group_wait": "30s", "group_interval": "5m", "repeat_interval": "12h",
            "routes": [
                {"matchers": ['severity="page"'], "receiver": "kvobs-page", "group_wait": "10s",
                 "repeat_interval": "1h"},
                {"matchers": ['severity="info"'], "receiver": "kvobs-info", "repeat_interval": "24h"}]},
        "inhibit_rules": [
            _inhibit(['severity="page"'], ['severity=~"ticket|info"'], SAME),
            _inhibit(['severity="ticket"'], ['severity="info"'], SAME),
            _inhibit(['alertname="KvobsUnreachable"'],
                     ['alertname=~"Kvobs.+"', 'alertname!="KvobsUnreachable"'], ("job", "instance")),
            _inhibit(['alertname="KvobsUnreachable"'], ['alertname="KvobsJobAbsent"'], ("job",))],
        "receivers": [{"name": f"kvobs-{severity}"} for severity in ("page", "ticket", "info")]}


def _inhibit(source: list[str], target: list[str], equal: tuple[str, ...]) -> dict[str, Any]:
    return {"source_matchers": source, "target_matchers": target, "equal": list(equal)}
