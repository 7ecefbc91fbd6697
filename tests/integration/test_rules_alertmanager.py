"""The generated routing in a real Alertmanager: which alerts silence which."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvobs.config import ARTICLE
from kvobs.dashboards.rules import files
from tests.peers import http_get, listening, running
from tests.support import free_port, program, wait_until

pytestmark = pytest.mark.peer
KEY = ("alertname", "severity", "objective", "instance", "job")
WHERE = {"job": "kvobs", "instance": "a:1"}


def alert(name: str, severity: str, **labels: str) -> dict[str, str]:
    return {"alertname": name, "severity": severity} | WHERE | labels


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    path, port = program("prometheus-alertmanager", "prometheus-alertmanager"), free_port()
    config = tmp_path / "alertmanager.yaml"
    config.write_text(files((ARTICLE,), "r", "d")["alertmanager/alertmanager.yaml"])
    command = [path, f"--config.file={config}", f"--storage.path={tmp_path / 'data'}", "--cluster.listen-address=",
               f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with running(command, tmp_path / "alertmanager.txt"):
        base = f"http://127.0.0.1:{port}"
        wait_until(lambda: listening(port) and http_get(f"{base}/-/ready")[0] == 200, what="Alertmanager is ready")
        yield base


def states(url: str, alerts: list[dict[str, str]]) -> dict[tuple[str, ...], str]:
    """What Alertmanager makes of alerts that come together, once every one has its state."""
    body = json.dumps([{"labels": labels} for labels in alerts]).encode()
    request = urllib.request.Request(f"{url}/api/v2/alerts", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200

    def told() -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = json.loads(http_get(f"{url}/api/v2/alerts")[2])
        settled = [one for one in found if one["status"]["state"] != "unprocessed"]
        return settled if len(settled) == len(alerts) else []

    wait_until(told, what="Alertmanager has judged every alert", timeout=60)
    return {tuple(one["labels"].get(key, "") for key in KEY): one["status"]["state"] for one in told()}


def test_a_page_silences_the_ticket_about_the_same(url: str) -> None:
    """Of an objective's burn at one process only the page is told; other objectives, processes and alerts stay."""
    burn = "KvobsErrorBudgetBurn"
    told = states(url, [alert(burn, "page", objective="o"), alert(burn, "ticket", objective="o"),
                        alert(burn, "ticket", objective="p"), alert(burn, "ticket", objective="o", instance="b:1"),
                        alert("KvobsPreemptionStorm", "ticket", model="m")])
    assert told == {(burn, "page", "o", "a:1", "kvobs"): "active", (burn, "ticket", "o", "a:1", "kvobs"): "suppressed",
                    (burn, "ticket", "p", "a:1", "kvobs"): "active", (burn, "ticket", "o", "b:1", "kvobs"): "active",
                    ("KvobsPreemptionStorm", "ticket", "", "a:1", "kvobs"): "active"}


def test_what_does_not_answer_silences_what_is_said_about_it(url: str) -> None:
    """While a process is unreachable all other alerts about it, and that its job is absent, are not told."""
    told = states(url, [alert("KvobsUnreachable", "page"), alert("KvobsOutOfMemory", "page", model="m"),
                        alert("KvobsTelemetryStale", "ticket"), alert("KvobsOutOfMemory", "page", instance="b:1"),
                        alert("KvobsUnreachable", "page", instance="c:1"), alert("NodeDown", "page"),
                        {"alertname": "KvobsJobAbsent", "severity": "ticket", "job": "kvobs"},
                        {"alertname": "KvobsJobAbsent", "severity": "ticket", "job": "batch"}])
    assert len(told) == 8
    assert {(key[0], key[3], key[4]) for key, state in told.items() if state == "suppressed"} == {
        ("KvobsOutOfMemory", "a:1", "kvobs"), ("KvobsTelemetryStale", "a:1", "kvobs"), ("KvobsJobAbsent", "", "kvobs")}
