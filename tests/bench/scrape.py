"""Real scrapes of a real endpoint that carries the series of eight busy devices, in both formats."""

from __future__ import annotations

import http.client
import time
import urllib.parse
from collections.abc import Iterator

from kvobs import model
from kvobs.exporters import PrometheusExporter
from kvobs.metrics import Metrics
from tests.bench._rows import Plan, Progress, Row, repeated, skipped
from tests.bench._statistics import percentile
from tests.bench._synthetic import STEP_NS, origin, step, turn

GROUP = "/metrics with 8 devices"
BUDGET_MS = 20.0
DEVICES = tuple(f"cuda:{number}" for number in range(8))
MODELS = ("SmolLM2-135M-Instruct", "llama-3.1-8b")
ACCEPT = {"OpenMetrics": "application/openmetrics-text; version=1.0.0", "text": "text/plain; version=0.0.4"}


def busy() -> Metrics:
    """Two models on eight devices: steps, turns with exemplars, moves between all devices, allocators."""
    metrics, events = Metrics(), list[model.Event]()
    t_ns = 1_000_000_000
    for name in MODELS:
        for number, device in enumerate(DEVICES):
            who, cache = origin(device, name), 1 + number + 100 * MODELS.index(name)
            for position in range(20):
                events.append(step(position, who, cache, t_ns + position * STEP_NS))
            events.append(turn(cache, who, cache, t_ns + 20 * STEP_NS, sampled=True))
    last = t_ns + 20 * STEP_NS
    for number, device in enumerate(DEVICES):
        events += [model.Allocation(last, device, 2**21, 10 ** (3 + position)) for position in range(6)]
        events.append(model.AllocatorState(last, device, 80 * 2**30, 60 * 2**30, 2**30))
        events.append(model.Blocks(last, origin(device, MODELS[1]), 1000 + number, 2**21, 3_000, 200, 800, 9_000, 3, 1))
        events += [model.Migration(last, origin(device), 1, device, other, 2, 2**20, 300_000)
                   for other in (*DEVICES, "cpu") if other != device]
    events.append(model.Availability("nvml", False, "The library libnvidia-ml.so.1 is not installed."))
    metrics.fold(events)
    metrics.refresh(last)
    return metrics


def scrape(url: str, accept: str) -> tuple[float, bytes]:
    """One GET on a new connection, as a scraper's first: (milliseconds, body)."""
    where = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
    began = time.perf_counter_ns()
    connection.request("GET", where.path, headers={"Accept": accept})
    answer = connection.getresponse()
    body = answer.read()
    took = (time.perf_counter_ns() - began) / 1e6
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{url} answered {answer.status}.")
    return took, body


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    rounds = plan.rounds(200, 30)
    exporter, fact = PrometheusExporter.start(busy(), "127.0.0.1", 0)
    if exporter is None:
        yield skipped(GROUP, "one scrape", fact.reason, unit="ms", budget=BUDGET_MS)
        return
    done = progress(rounds)
    wall: dict[str, list[float]] = {kind: [] for kind in ACCEPT}
    cpu: dict[str, list[float]] = {kind: [] for kind in ACCEPT}
    sizes: dict[str, bytes] = {}
    try:
        for _ in range(rounds):
            for kind, accept in ACCEPT.items():
                spent = time.process_time_ns()
                ms, sizes[kind] = scrape(exporter.url, accept)
                cpu[kind].append((time.process_time_ns() - spent) / 1e6)
                wall[kind].append(ms)
            done()
    finally:
        exporter.stop()
    for kind, values in wall.items():
        samples = sum(not line.startswith(b"#") for line in sizes[kind].splitlines())
        yield repeated(GROUP, f"{kind}, CPU of server and client", cpu[kind], "ms", budget=BUDGET_MS)
        yield repeated(GROUP, f"{kind}, wall", values, "ms", budget=BUDGET_MS,
                       note=f"{samples} samples, {len(sizes[kind]) / 1024:.0f} KiB; 95 % of scrapes took at most "
                            f"{percentile(values, 0.95):.1f} ms")
