"""All scripted incidents, played at once before one Prometheus: ``python -m tests.dashboards.incidents --out DIR``.

What is left in the directory: ``tsdb`` (Prometheus's data), ``incidents.json`` (which scenario was on when, and its
labels) and the logs of the processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvobs.discovery import DIRECTORY
from tests.dashboards.engines import DOWN, Clients, bridged, vllm
from tests.dashboards.harness import OBJECTIVES, RULES, Played, Process, Server, processes, prometheus, wait
from tests.support import wait_until
from tests.vllm_engine import interpreters
from tests.vllm_server import receiving

CALM_S, INCIDENT_S, AFTER_S = 24.0, 30.0, 16.0
VLLM_PROCESSES = 3  # API server, engine core and worker
SETTLE_S = 5.0  # scrapes before the beginning, so that rates have something to look back at

# By instance: the program that plays it, and settings of kvobs.
LIVE: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "calm": ("calm", {"virtual_gpu": "256MiB", "deep": "on", "otlp": "on"}),
    "fragmentation": ("fragmentation", {"virtual_gpu": "240MiB", "breaker": "observe"}),
    "capacity": ("capacity", {"virtual_gpu": "208MiB", "breaker": "observe"}),
    "migration": ("migration", {"virtual_gpu": "256MiB,256MiB"}),
    "preemption": ("preemption", {"breaker": "observe"}),
    "latency": ("latency", {"virtual_gpu": "256MiB", "virtual_latency": "l40s"}),
    "telemetry": ("telemetry", {"virtual_gpu": "256MiB", "queue_events": "64", "max_series": "24"}),
    "unreachable": ("calm", {"virtual_gpu": "256MiB"}),
    "pressure": ("pressure", {"virtual_gpu": "140MiB", "breaker": "act", "store": "auto"}),
    "throttled": ("throttled", {"virtual_gpu": "64MiB", "overhead_percent": "0.1"}),
}
HAPPENS = {
    "calm": "Two sessions chat, and nothing happens.",
    "fragmentation": "Six of ten sessions end, and one that wants buffers of 24 MiB cannot begin although 96 MiB are "
                     "free: the other four pin every segment.",
    "capacity": "Three sessions hold nearly all of the device, and a fourth cannot begin.",
    "migration": "A session rests in host memory between turns, and has each turn on the other device.",
    "preemption": "Five requests at a time want a paged pool that has room for three: they preempt each other.",
    "latency": "Sessions begin and end with all of their memory, and every new one waits longer than 12 ms for it.",
    "telemetry": "A cache is cut faster than so short a queue is read: events are dropped. Afterwards a hook fails.",
    "pressure": "More sessions than fit: the breaker acts, moves those that rest to host memory and refuses some.",
    "throttled": "Observation may take a thousandth of the time, which it cannot keep: all passes through unobserved.",
    "bridge": "The page of an engine that a bridge reads answers 503.",
    "vllm": "Twelve requests at a time want a pool that has room for three: vLLM preempts some, and others wait.",
    "unreachable": "The process is stopped by a signal: it answers no scrape until it is continued.",
}


@contextlib.contextmanager
def played(directory: Path) -> Iterator[tuple[Server, dict[str, Played]]]:
    """Everything that happened, before a Prometheus that has seen it and goes on answering."""
    directory.mkdir(parents=True, exist_ok=True)
    objectives = directory / "kvobs.toml"
    objectives.write_text(OBJECTIVES)
    store = directory / "vllm-store"
    with prometheus(directory, rules=RULES, discovered=store / DIRECTORY) as server:
        found = _programs(server, directory, objectives)
        if interpreters():
            found["vllm"] = _vllm(server, directory, objectives, store)
        (directory / "incidents.json").write_text(json.dumps(
            {"scrape_interval_s": 1, "scenarios": [one._asdict() for one in found.values()]}, indent=1) + "\n")
        yield server, found


def _programs(server: Server, directory: Path, objectives: Path) -> dict[str, Played]:
    began = time.monotonic()
    specifications = [
        (program, instance, {**settings, "config": str(objectives)} | (
            {"store": str(directory / f"{instance}-store")} if "store" in settings else {}))
        for instance, (program, settings) in LIVE.items()]
    with receiving() as (traces, spans), bridged(directory) as (page, port), processes(
            specifications, directory, traces) as live:
        print(f"{len(live)} processes serve after {time.monotonic() - began:.0f} s.", file=sys.stderr)
        server.targets({"bridge": f"127.0.0.1:{port}"} | {one.instance: f"127.0.0.1:{one.port}" for one in live})
        wait_until(lambda: len(server.instant("up == 1", time.time())) == len(live) + 1, 60,
                   "Prometheus scrapes all of them")
        begin = wait(SETTLE_S)
        incident = wait(CALM_S)
        healthy = page.answer
        page.answer = DOWN
        _order(live, "incident", signal.SIGSTOP)
        over = wait(INCIDENT_S)
        page.answer = healthy
        _order(live, "after", signal.SIGCONT)
        end = wait(AFTER_S)
        for one in live:
            assert one.ready()
    print(f"Played after {time.monotonic() - began:.0f} s.", file=sys.stderr)
    return {name: Played(name, begin, incident, over, end, (name,), HAPPENS[name], traces=tuple(
        sorted({span.trace for span in spans})) if LIVE.get(name, ("", {}))[1].get("otlp") == "on" else ())
        for name in (*LIVE, "bridge")}


def _order(live: list[Process], phase: str, to_the_stopped: signal.Signals) -> None:
    for one in live:
        one.order(phase)
        if one.instance == "unreachable":
            one.signalled(to_the_stopped)


def _vllm(server: Server, directory: Path, objectives: Path, store: Path) -> Played:
    began = time.monotonic()
    with vllm(directory, objectives, store) as engine:
        clients = Clients(engine)
        clients.ask(1, 24)
        wait_until(lambda: len(server.instant('up{instance=~"vllm-.+"} == 1', time.time())) >= VLLM_PROCESSES, 60,
                   "Prometheus scrapes vLLM's processes")
        print(f"vLLM serves after {time.monotonic() - began:.0f} s.", file=sys.stderr)
        begin = wait(SETTLE_S)
        incident = wait(CALM_S)
        clients.ask(12, 150)
        over = wait(INCIDENT_S)
        clients.ask(1, 24)
        end = wait(AFTER_S)
        clients.end()
        assert not clients.failures, clients.failures
        instances = sorted(series["metric"]["instance"] for series in server.instant('up{instance=~"vllm-.+"}', end))
    print(f"vLLM's incident was played after {time.monotonic() - began:.0f} s.", file=sys.stderr)
    return Played("vllm", begin, incident, over, end, tuple(instances), HAPPENS["vllm"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dashboards.incidents", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="an empty directory, or a new one")
    directory = parser.parse_args().out.resolve()
    if directory.exists() and any(directory.iterdir()):
        print(f"{directory} is not empty.", file=sys.stderr)
        return 2
    with played(directory):
        pass
    print(directory / "incidents.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
