"""One Prometheus, and observed processes that play their incidents before it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.peers import Prometheus, http_get, listening, running
from tests.support import ROOT, child_environment, free_port, program, wait_until

JOB = "kvobs"
SCRAPE_S = 1
RULES = tuple(path for path in (ROOT / "dashboards" / "rules" / f"kvobs-{kind}.yaml"
                                for kind in ("recording", "alerts")) if path.is_file())
READY_S = 240.0  # two cores import torch for all of them, and the first compiles the virtual GPU

# Windows of 10 s, so that an incident of half a minute has some.
OBJECTIVES = """
[[slo]]
name = "allocation-latency"
signal = "allocation_latency"
target = "99.5%"
at_most = "12ms"
quantile = "95%"
window = "10s"
[[slo]]
name = "first-token"
signal = "time_to_first_token"
target = "99%"
at_most = "2500ms"
[[slo]]
name = "preemptions"
signal = "preemptions"
target = "99%"
at_most = 0
window = "10s"
[[slo]]
name = "out-of-memory"
signal = "out_of_memory"
target = "99.9%"
window = "10s"
"""
COMMON = {"store": "off", "otlp": "off", "overhead_percent": "100"}


class Played(NamedTuple):
    """When a scenario was on, in Unix seconds, and by which labels Prometheus knows its processes.

    ``traces`` are the ids of all that a receiver of spans got from them, where they send any.
    """

    name: str
    begin: float
    incident_begin: float
    incident_end: float
    end: float
    instances: tuple[str, ...]
    happens: str
    job: str = JOB
    traces: tuple[str, ...] = ()

    def matcher(self) -> str:
        """Its processes, as a matcher of the label ``instance``."""
        return "|".join(self.instances)


class Process:
    """An observed program of ``tests.dashboards.programs``; ``instance`` is its label."""

    def __init__(self, name: str, instance: str, directory: Path, settings: Mapping[str, str], traces: str) -> None:
        self.name, self.instance, self.port = name, instance, free_port()
        self.log = directory / f"{instance}.log"
        environ = child_environment(PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                                    KVOBS_PROMETHEUS=f"127.0.0.1:{self.port}", OTEL_SERVICE_NAME=instance,
                                    OTEL_EXPORTER_OTLP_ENDPOINT=traces, OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
                                    **{f"KVOBS_{key.upper()}": value for key, value in {**COMMON, **settings}.items()})
        with self.log.open("wb") as output:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "kvobs", "run", "--", sys.executable, "-m", "tests.dashboards.programs", name],
                cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, text=True,
                start_new_session=True)

    def ready(self) -> bool:
        """Whether it serves; fails with what it said when it has ended."""
        assert self.child.poll() is None, f"{self.instance} ended:\n{self.log.read_text()[-3000:]}"
        return "ready" in self.log.read_text().splitlines() and listening(self.port)

    def order(self, phase: str) -> None:
        """Let it play this from now on."""
        assert self.child.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.child.stdin.write(f"{phase}\n")
            self.child.stdin.flush()

    def signalled(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.child.send_signal(number)

    def end(self) -> None:
        """Let it end in order, or make it."""
        with contextlib.suppress(ProcessLookupError):
            self.signalled(signal.SIGCONT)
        with contextlib.suppress(OSError, ValueError):
            if self.child.stdin is not None:
                self.child.stdin.close()
        try:
            self.child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait(timeout=20)


@contextlib.contextmanager
def processes(specifications: Sequence[tuple[str, str, Mapping[str, str]]], directory: Path,
              traces: str) -> Iterator[list[Process]]:
    """Programs by (name, instance, settings), all of them serving; spans go to ``traces`` where the settings say so."""
    started: list[Process] = []
    try:
        for name, instance, settings in specifications:
            started.append(Process(name, instance, directory, settings, traces))
        for one in started:
            wait_until(one.ready, READY_S, f"{one.instance} serves")
        yield started
    finally:
        for one in started:
            with contextlib.suppress(OSError, ValueError):
                if one.child.stdin is not None:
                    one.child.stdin.close()
        for one in started:
            one.end()


class Server(Prometheus):
    """A Prometheus with its data directory. Targets are a file that may be written while it runs."""

    def __init__(self, port: int, directory: Path) -> None:
        super().__init__(port)
        self.directory = directory

    def targets(self, found: Mapping[str, str]) -> None:
        """Scrape these addresses, by the instances' names."""
        path = self.directory / "targets.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps([{"targets": [address], "labels": {"instance": instance}}
                                   for instance, address in found.items()]))
        os.replace(new, path)

    def cpu_s(self) -> float:
        """CPU seconds that the server itself has taken."""
        body = http_get(f"{self.url}/metrics")[2].decode()
        return float(body.partition("\nprocess_cpu_seconds_total ")[2].split()[0])

    def range(self, expression: str, begin: float, end: float, step: float = SCRAPE_S) -> list[Any]:
        """The series of a range query: ``metric`` and ``values`` each."""
        found: list[Any] = self.api("query_range", query=expression, start=f"{begin:.3f}", end=f"{end:.3f}",
                                    step=f"{step:g}")["result"]
        return found

    def instant(self, expression: str, at: float) -> list[Any]:
        """The series of an instant query."""
        found: list[Any] = self.api("query", query=expression, time=f"{at:.3f}")["result"]
        return found


def _engine(discovered: Path) -> dict[str, Any]:
    """How the processes of an engine are found; their own labels stay out of the series, for one set of all jobs."""
    discovered.mkdir(parents=True, exist_ok=True)
    return {"job_name": f"{JOB}-engine",
            "file_sd_configs": [{"files": [str(discovered / "*.json")], "refresh_interval": "1s"}],
            "relabel_configs": [
                {"source_labels": ["kvobs_role"], "regex": ".+", "action": "keep"},
                {"source_labels": ["kvobs_engine", "kvobs_role"], "separator": "-", "target_label": "instance"},
                {"target_label": "job", "replacement": JOB},
                {"regex": "kvobs_.+", "action": "labeldrop"}]}


@contextlib.contextmanager
def prometheus(directory: Path, rules: Sequence[Path] = (), discovered: Path | None = None) -> Iterator[Server]:
    """Debian's Prometheus with data in ``directory``/tsdb, scraping once a second what ``targets`` is told.

    ``discovered`` is where the processes of an engine tell their addresses; each has its role as its instance.
    """
    path, port = program("prometheus", "prometheus"), free_port()
    config, targets = directory / "prometheus.yml", directory / "targets.json"
    if not targets.exists():
        targets.write_text("[]")
    config.write_text(json.dumps({
        "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": "1s"},
        "rule_files": [str(rule) for rule in rules],
        "storage": {"exemplars": {"max_exemplars": 10_000}},
        "scrape_configs": [
            {"job_name": JOB, "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]},
            *([_engine(discovered)] if discovered is not None else [])]}))
    command = [path, f"--config.file={config}", f"--storage.tsdb.path={directory / 'tsdb'}",
               f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=warn",
               "--storage.tsdb.retention.time=10y"]
    with running(command, directory / "prometheus.txt"):
        server = Server(port, directory)
        wait_until(lambda: listening(port) and http_get(f"{server.url}/-/ready")[0] == 200, what="Prometheus is ready")
        yield server


def wait(seconds: float) -> float:
    """Let an incident last; the Unix time afterwards."""
    threading.Event().wait(seconds)
    return time.time()
