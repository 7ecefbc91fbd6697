"""The parts behind the hooks, one by one: queue, windows, metrics, store."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvobs import model
from kvobs.bus import Bus
from kvobs.metrics import Metrics
from kvobs.store import StoreWriter
from kvobs.windows import SlidingWindow
from tests.bench._rows import Plan, Progress, Row, repeated
from tests.bench._synthetic import life

GROUP = "parts, per event"
WINDOW_NS = 64_000_000
_COMMIT_EVENTS = 250  # an engine of 1,000 steps/s, drained four times a second
Round = Callable[[list[model.Event]], None]


def _publish(events: list[model.Event]) -> None:
    bus = Bus(len(events))
    publish = bus.publish
    for event in events:
        publish(event)


def _dropped(events: list[model.Event]) -> None:
    bus = Bus(0)
    publish = bus.publish
    for event in events:
        publish(event)


def _window(events: list[model.Event]) -> None:
    window = SlidingWindow(WINDOW_NS)
    for number, _ in enumerate(events):
        window.push(number * 1_000_000, number * 7_919 % 1_000)
        window.stats()


def _fold(events: list[model.Event]) -> None:
    Metrics().fold(events)


def _cpu_ns(call: Round, events: list[model.Event]) -> float:
    began = time.thread_time_ns()
    call(events)
    return (time.thread_time_ns() - began) / len(events)


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    rounds, size = plan.rounds(30, 8), plan.rounds(20_000, 5_000)
    events = list(itertools.islice(life(), size))
    parts: dict[str, Round] = {"Bus.publish": _publish, "Bus.publish of a full queue": _dropped,
                               "window, push and read": _window, "Metrics.fold": _fold}
    took: dict[str, list[float]] = {name: [] for name in (*parts, "store, write and commit")}
    done = progress(rounds)
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory:
        store = StoreWriter(Path(directory), 64 * 1024**2, "0" * 32, endpoint=None)

        def keep(batch: list[model.Event]) -> None:
            for start in range(0, len(batch), _COMMIT_EVENTS):
                store.write(batch[start : start + _COMMIT_EVENTS])
                store.commit()

        parts["store, write and commit"] = keep
        for _ in range(rounds):
            for name, call in parts.items():
                took[name].append(_cpu_ns(call, events))
            done()
        store.close()
    for name, values in took.items():
        yield repeated(GROUP, f"{name}, CPU", values, "µs", scale=1e-3)
    through = [1e9 / (fold + store_ns) for fold, store_ns in
               zip(took["Metrics.fold"], took["store, write and commit"], strict=True)]
    yield repeated(GROUP, "drain throughput, fold and store", through, "events/s")
