"""The sliding window of 64 ms as a frame: what its events and its reading cost, and how steady that is (S10)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from kvobs import model
from kvobs.metrics._alive import Windows
from kvobs.metrics._points import PointTable
from tests.bench._rows import Plan, Progress, Row, repeated

GROUP = "a 64 ms window: fold and read"
FRAME_NS = 64_000_000
EVENTS = 8  # an engine of 125 steps per second, an allocation each
ARTICLE = "the article: 1.8 ms, deviation 0.92 ms by launches; 0.33 ms, deviation 0.07 ms as a CUDA graph (on its GPU)"


def frames(number: int) -> list[float]:
    """CPU nanoseconds of each of ``number`` frames: steps, allocations, one allocator state, then all values read."""
    windows, table, took = Windows(FRAME_NS, 256), PointTable(64, time.time), []
    for frame in range(number):
        start = frame * FRAME_NS
        state = model.AllocatorState(start, "cuda:0", 2**30, 2**29 + frame, 2**28)
        began = time.thread_time_ns()
        for event in range(EVENTS):
            t_ns = start + event * FRAME_NS // EVENTS
            windows.push("step", ("m", "cuda:0"), t_ns, 4_000_000 + event, table)
            windows.push("allocation", ("cuda:0",), t_ns, 300_000 + event, table)
        windows.push_state(state, table)
        windows.refresh(table, start + FRAME_NS)
        took.append(float(time.thread_time_ns() - began))
    return took


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    rounds = plan.rounds(20, 5)
    done, means, deviations = progress(rounds), [], []
    frames(200)
    for _ in range(rounds):
        took = sorted(frames(500))[:495]  # the scheduler's interruptions of a shared machine are not the window's
        means.append(statistics.fmean(took))
        deviations.append(statistics.pstdev(took))
        done()
    what = f"{EVENTS} steps and allocations, CPU"
    yield repeated(GROUP, what, means, "µs", scale=1e-3, budget=50, note=ARTICLE)
    yield repeated(GROUP, f"{what}, deviation", deviations, "µs", scale=1e-3, budget=10,
                   note="standard deviation, without the slowest 1 %")
