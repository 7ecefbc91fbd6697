"""Debian's Prometheus finds every process of a server by the files that the processes keep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers import Prometheus, http_get, listening, running
from tests.support import ROOT, child_environment, free_port, program, wait_until

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (extra prometheus).")
pytestmark = pytest.mark.peer
# A process as kvobs observes it, with a role; it lives until the end of its input.
PROCESS = """
import sys, time
import kvobs
from kvobs.model import ProcessRole
with kvobs.instrument() as observed:
    observed.runtime.bus.publish(ProcessRole(time.monotonic_ns(), "vllm", sys.argv[1], (("dp", 0),)))
    print(observed.endpoint, flush=True)
    sys.stdin.read()
"""


def start(role: str, store: Path, port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, role], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
        env=child_environment(KVOBS_STORE=str(store), KVOBS_PROMETHEUS=f"127.0.0.1:{port}", KVOBS_NATIVE="off"))


def test_every_process_is_scraped_with_its_role(tmp_path: Path) -> None:
    """Two processes that are given the same port are two targets with roles; one that was killed is one no more."""
    store, port, prometheus_port = tmp_path / "store", free_port(), free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text("scrape_configs:\n  - job_name: kvobs\n    scrape_interval: 500ms\n    scrape_timeout: 500ms\n"
                      f"    file_sd_configs:\n      - files: ['{store}/prometheus-targets/*.json']\n")
    processes = [start(role, store, port) for role in ("api_server", "engine_core")]
    command = [program("prometheus", "prometheus"), f"--config.file={config}",
               f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address=127.0.0.1:{prometheus_port}",
               "--log.level=warn"]
    try:
        endpoints = {process.stdout.readline().strip() for process in processes if process.stdout is not None}
        assert len(endpoints) == 2
        assert any(f":{port}/" in endpoint for endpoint in endpoints)
        with running(command, tmp_path / "prometheus.txt"):
            server = Prometheus(prometheus_port)
            wait_until(lambda: listening(prometheus_port) and http_get(f"{server.url}/-/ready")[0] == 200,
                       what="Prometheus is ready")
            for role, process in zip(("api_server", "engine_core"), processes, strict=True):
                labels = f'kvobs_role="{role}", kvobs_ranks="dp=0", kvobs_pid="{process.pid}"'
                wait_until(lambda labels=labels: server.value(f"up{{{labels}}}") == 1, what=f"{labels} is scraped")
                assert server.value(f'kvobs_process_role{{{labels}, role="{role}"}}') == 1
            assert {target["scrapeUrl"] for target in server.api("targets")["activeTargets"]} == endpoints
            processes[1].kill()
            wait_until(lambda: len(server.api("targets")["activeTargets"]) == 1, what="the dead one is no target")
            processes[0].communicate("", timeout=30)
            wait_until(lambda: not server.api("targets")["activeTargets"], what="the ended one is no target")
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=10)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
