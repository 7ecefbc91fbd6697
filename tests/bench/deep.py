"""What ``--deep`` takes of the decode step: by kvobs's own clock, and as CPU time of whole steps beside none."""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from kvobs.model import Attention, Event, Step
from kvobs.runtime import Runtime
from tests.bench._arms import configuration
from tests.bench._engines import MISSING, Engine, engines
from tests.bench._rows import Plan, Progress, Row, compared, repeated, skipped
from tests.bench._statistics import median
from tests.bench.hooks import replaced

GROUP = "--deep inside a decode step"
BUDGET = 5.0
OFF, AGAIN, DEEP = "off", "off again", "deep"


class Seen:
    """Decode steps and samples out of what the drain thread folds."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.samples: list[Attention] = []

    def watch(self, runtime: Runtime) -> None:
        fold = runtime.metrics.fold

        def tee(events: Iterable[Event]) -> int:
            taken = list(events)
            self.steps += [event for event in taken if isinstance(event, Step) and not event.prefill]
            self.samples += [event for event in taken if isinstance(event, Attention)]
            return fold(taken)

        runtime.metrics.fold = tee  # type: ignore[method-assign]


@contextlib.contextmanager
def deep(seen: Seen) -> Iterator[None]:
    """kvobs with deep sampling in this process."""
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory:
        runtime = Runtime(msgspec.structs.replace(configuration(directory), deep=True))
        seen.watch(runtime)
        runtime.start()
        try:
            yield
        finally:
            runtime.stop()


def whole(engine: Engine, steps: int, arm: str, seen: Seen) -> float:
    """Mean CPU nanoseconds of a whole step, everything that kvobs adds included; after the free first burst."""
    from transformers import PreTrainedModel

    took: list[int] = []

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        depth = 0

        def __call__(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            began = time.thread_time_ns()
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1
                if not depth:
                    took.append(time.thread_time_ns() - began)

        return __call__

    with deep(seen) if arm == DEEP else contextlib.nullcontext(), replaced(PreTrainedModel, "__call__", timed):
        engine.decode(steps)
    return statistics.fmean(took[4:])


def _rows(name: str, engine: Engine, plan: Plan, step: Callable[[], None]) -> Iterator[Row]:
    rounds, steps, draw = plan.rounds(12, 4), plan.rounds(96, 40), random.Random(3)
    took: dict[str, list[float]] = {arm: [] for arm in (OFF, AGAIN, DEEP)}
    told, intervals, per_layer = [], [], []
    engine.decode(8)
    for _ in range(rounds):
        for arm in draw.sample(sorted(took), len(took)):
            seen = Seen()
            took[arm].append(whole(engine, steps, arm, seen))
            if seen.steps:
                later = seen.steps[3:]
                told.append(100 * sum(s.hook_ns for s in later) / sum(s.duration_ns + s.hook_ns for s in later))
            if seen.samples:
                intervals.append(seen.samples[-1].every)
                per_layer += [sample.hook_ns / 1000 for sample in seen.samples]
            step()
    layers = engine.model.config.num_hidden_layers
    yield repeated(GROUP, f"{name}: as kvobs itself says", told, "%", budget=BUDGET,
                   note=f"hooks and sampling of the step and them; one of {median([float(n) for n in intervals]):.0f} "
                        f"steps; median {median(per_layer) / layers:.0f} µs per layer-sample")
    share = {arm: [100 * (value / base - 1) for value, base in zip(took[arm], took[OFF], strict=True)]
             for arm in (AGAIN, DEEP)}
    yield compared(GROUP, f"{name}: whole steps, CPU", share[DEEP], share[AGAIN], "%", budget=BUDGET,
                   note=f"of a {median(took[OFF]) / 1e6:.1f} ms step")


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    for name, _, engine in engines():
        if engine is None:
            yield skipped(GROUP, f"{name}: --deep", MISSING, unit="%", budget=BUDGET)
        else:
            yield from _rows(name, engine, plan, progress(3 * plan.rounds(12, 4)))
