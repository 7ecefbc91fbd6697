"""The generated rules in a real Prometheus, against two series of every metric of the catalog from two processes."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvobs.catalog import ROWS
from kvobs.config import ARTICLE
from kvobs.dashboards.rules import files
from tests.peers import Prometheus, http_get, listening, running
from tests.rules_promql import exported
from tests.support import free_port, program, wait_until

pytestmark = pytest.mark.peer
# Values that the rules ask for, beside one that none of them does.
KNOWN = {"state": "free", "part": "torch", "phase": "open", "outcome": "refused", "mode": "act",
         "objective": "allocation-latency"}


def page() -> str:
    """Two series of every metric, as an exposition."""
    lines = []
    for name, labels in sorted(exported().items()):
        for index in range(2):
            told = {label: "b" if index else KNOWN.get(label, "a") for label in labels - {"job", "instance"}}
            if "le" in told:
                told["le"] = "+Inf"
            if name != "up" and (index == 0 or set(told) - {"le"}):
                lines.append(name + "{" + ",".join(f'{key}="{value}"' for key, value in told.items()) + "} 1")
    return "\n".join(lines) + "\n"


class Page(http.server.BaseHTTPRequestHandler):
    """Says the same at each scrape."""

    def do_GET(self) -> None:
        body = page().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def targets() -> Iterator[list[str]]:
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) for _ in range(2)]
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    yield [f"127.0.0.1:{server.server_address[1]}" for server in servers]
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join(5)


@pytest.fixture
def prometheus(tmp_path: Path, targets: list[str]) -> Iterator[Prometheus]:
    """Evaluates the rules each second, and sees each process twice, by two further labels."""
    for path, text in files((ARTICLE,), "r", "d").items():
        if path in ("rules/kvobs-recording.yaml", "rules/kvobs-alerts.yaml"):
            (tmp_path / Path(path).name).write_text(text.replace('interval: "30s"', 'interval: "1s"'))
    groups = "".join(f"      - targets: {targets}\n        labels: {{pod: '{pod}'}}\n" for pod in ("p", "q"))
    (tmp_path / "prometheus.yml").write_text(
        "rule_files: ['kvobs-*.yaml']\nscrape_configs:\n  - job_name: kvobs\n    scrape_interval: 500ms\n"
        f"    scrape_timeout: 500ms\n    static_configs:\n{groups}")
    port = free_port()
    command = [program("prometheus", "prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}",
               f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with running(command, tmp_path / "prometheus.txt"):
        server = Prometheus(port)
        wait_until(lambda: listening(port) and http_get(f"{server.url}/-/ready")[0] == 200, what="Prometheus is ready")
        yield server


def test_no_rule_fails(prometheus: Prometheus) -> None:
    """Every rule is evaluated without an error, however many series there are to match with each other."""
    assert len(page().splitlines()) > len(ROWS)

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: (prometheus.value("count(kvobs_slo_events_total)") or 0) >= 8, what="all targets are scraped")
    before = {rule["lastEvaluation"] for rule in rules()}
    wait_until(lambda: not before & {rule["lastEvaluation"] for rule in rules()}, what="every rule saw the scrapes")
    assert {rule["name"]: rule["lastError"] for rule in rules() if rule["health"] != "ok"} == {}
    assert prometheus.value("count(kvobs:kv_pool_headroom:ratio)") is not None
    assert prometheus.value('count(ALERTS{alertname="KvobsHookDetached"})') == 4  # two sources of two processes
