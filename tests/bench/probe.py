"""Decode steps with and without the CPU allocation probe, compared with their neighbours in the same call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from kvobs.allocator._build import BuildError
from kvobs.sources._cpu_alloc import SAMPLED_EVERY
from kvobs.sources._cpu_alloc_native import Probe, load
from tests.bench._engines import MISSING, SMOLLM2, TINY, Engine, engines
from tests.bench._rows import Plan, Progress, Row, compared, repeated, skipped
from tests.bench._statistics import ratios

GROUP = "the CPU allocation probe, main-thread CPU per token against no probe"
BUDGETS = {TINY: 2.0, SMOLLM2: 1.0}
_EVERY = {"every allocation timed": 1, f"one of {SAMPLED_EVERY} timed": SAMPLED_EVERY}
_SAMPLED = f"one of {SAMPLED_EVERY} timed"
_AGAIN = "no probe"


def _rows(name: str, engine: Engine, probe: Probe, plan: Plan, progress: Progress) -> Iterator[Row]:
    """Pairs of neighbouring steps, one without and one with the probe (or both without), in random order."""
    calls, pairs, draw = plan.rounds(20, 4), 24, random.Random(5)
    found: dict[str, tuple[list[float], list[float]]] = {key: ([], []) for key in (*_EVERY, _AGAIN)}
    counted: list[float] = []
    done = progress(calls)
    engine.decode(4)

    def arm(key: str | None) -> Callable[[], object]:
        return probe.remove if key not in _EVERY else lambda: probe.install(_EVERY[key])

    for _ in range(calls):
        plans = [draw.sample((None, key), 2) for key in draw.choices(tuple(found), k=pairs)]
        before = probe.read().allocations
        try:
            cpu = engine.steps_cpu_ns([arm(key) for pair in plans for key in pair])
        finally:
            probe.remove()
        on = sum(key in _EVERY for pair in plans for key in pair)
        counted.append((probe.read().allocations - before) / max(on, 1))
        for number, pair in enumerate(plans):
            for key, took in zip(pair, cpu[2 * number:2 * number + 2], strict=True):
                tested, baseline = found[next(one for one in pair if one is not None)]
                (baseline if key is None else tested).append(float(took))
        done()
    shares = {key: [100 * (ratio - 1) for ratio in ratios(*pairs)] for key, pairs in found.items()}
    for key in _EVERY:
        yield compared(GROUP, f"{name}: {key}", shares[key], shares[_AGAIN], "%",
                       budget=BUDGETS[name] if key == _SAMPLED else None)
    yield repeated(GROUP, f"{name}: allocations per token", counted, "")


def _pair_ns(torch: object, number: int) -> float:
    empty, size = torch.empty, 256  # type: ignore[attr-defined]
    began = time.thread_time_ns()
    for _ in range(number):
        empty(size)
    return (time.thread_time_ns() - began) / number


def _calls(torch: object, probe: Probe, plan: Plan, progress: Progress) -> Iterator[Row]:
    """What one allocation and its free take longer, and what one reading takes."""
    rounds = plan.rounds(400, 60)
    done = progress(rounds)
    added: dict[str, list[float]] = {key: [] for key in _EVERY}
    for _ in range(rounds):
        for key, every in _EVERY.items():
            bare = _pair_ns(torch, 500)
            probe.install(every)
            try:
                added[key].append(_pair_ns(torch, 500) - bare)
            finally:
                probe.remove()
        done()
    for key in _EVERY:
        yield repeated(GROUP, f"an allocation and its free, {key}: added", added[key], "ns")
    took: list[float] = []
    for _ in range(rounds):
        began = time.thread_time_ns()
        probe.read()
        took.append(float(time.thread_time_ns() - began))
    yield repeated(GROUP, "one reading (once a second)", took, "µs", scale=1e-3, budget=200)


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    import torch

    try:
        probe = load(torch)
    except BuildError as error:
        yield skipped(GROUP, "time per token", str(error), unit="%", budget=BUDGETS[TINY])
        return
    yield from _calls(torch, probe, plan, progress)
    for name, _, engine in engines():
        if engine is None:
            yield skipped(GROUP, f"{name}: time per token", MISSING, unit="%", budget=BUDGETS[name])
        else:
            yield from _rows(name, engine, probe, plan, progress)
