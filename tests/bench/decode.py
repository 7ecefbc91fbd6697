"""Decode speed with and without kvobs: blocks of one process in random order, compared within each round."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.bench._arms import DISABLED, OFF, ON, arm, drain_cpu_ns
from tests.bench._engines import MISSING, Engine, engines
from tests.bench._rows import Plan, Progress, Row, overhead, repeated, skipped
from tests.bench.hooks import DISABLED_BUDGET

GROUP = "decode, time per token against no kvobs"
_AGAIN = "off again"
_ARMS = (OFF, _AGAIN, ON, DISABLED)


def _rows(name: str, engine: Engine, plan: Plan, progress: Progress) -> Iterator[Row]:
    rounds, steps, draw = plan.rounds(40, 4), plan.rounds(24, 6), random.Random(2)
    cpu: dict[str, list[float]] = {key: [] for key in _ARMS}
    wall: dict[str, list[float]] = {key: [] for key in _ARMS}
    drain: list[float] = []
    done = progress(rounds * len(_ARMS))
    engine.decode(steps)
    for _ in range(rounds):
        for key in draw.sample(_ARMS, len(_ARMS)):
            with arm(OFF if key == _AGAIN else key):
                before = drain_cpu_ns()
                took = engine.decode(steps)
                spent = drain_cpu_ns() - before
            cpu[key].append(took.cpu_ns / took.steps)
            wall[key].append(took.wall_ns / took.steps)
            if key == ON:
                drain.append(100 * spent / took.wall_ns)
            done()
    for kind, times in (("main-thread CPU", cpu), ("wall clock", wall)):
        for key, budget in ((ON, engine.budget), (DISABLED, DISABLED_BUDGET)):
            yield overhead(GROUP, f"{name}: {key}, {kind}", times[key], times[OFF], times[_AGAIN], budget=budget)
    yield repeated(GROUP, f"{name}: drain thread", drain, "%", note="its CPU time / wall time of the decode")


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    for name, budget, engine in engines():
        if engine is None:
            yield skipped(GROUP, f"{name}: tokens/s", MISSING, unit="%", budget=budget)
        else:
            yield from _rows(name, engine, plan, progress)
