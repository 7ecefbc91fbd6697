"""What the hooks take inside the real step: as kvobs says itself, and as a stopwatch around them says.

kvobs tells wall time; the stopwatch reads the main thread's CPU time, which does not grow when the machine is shared.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvobs.model import Event, Step
from kvobs.runtime import Runtime
from tests.bench._arms import DISABLED, OFF, ON, arm
from tests.bench._engines import MISSING, Engine, engines
from tests.bench._rows import Plan, Progress, Row, compared, repeated, skipped
from tests.bench._statistics import median

GROUP = "hooks inside a decode step"
DISABLED_BUDGET = 0.1
_AGAIN = "off again"


class Stopwatch:
    """Two layers around a method, kvobs's wrapper between them: their difference is what kvobs adds.

    Nested calls (a model within a model) count too. ``steps`` is (added, whole) CPU nanoseconds per outermost call.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self._depth = self._added = self._inside = 0

    def inner(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            result = original(*args, **kwargs)
            self._inside = time.thread_time_ns() - began
            return result

        return __call__

    def outer(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.thread_time_ns()
            result = wrapped(*args, **kwargs)
            whole = time.thread_time_ns() - began
            self._depth -= 1
            self._added += whole - self._inside
            if not self._depth:
                self.steps.append((self._added, whole))
                self._added = 0
            return result

        return __call__


@contextlib.contextmanager
def replaced(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A method wrapped for a while, then as it was (inherited ones are inherited again)."""
    own = vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def watch_steps(runtime: Runtime, into: list[Step]) -> None:
    """Copy the decode steps out of what the drain thread folds."""
    fold = runtime.metrics.fold

    def tee(events: Iterable[Event]) -> int:
        taken = list(events)
        into.extend(event for event in taken if isinstance(event, Step) and not event.prefill)
        return fold(taken)

    runtime.metrics.fold = tee  # type: ignore[method-assign]


def _watched(engine: Engine, name: str, steps: int) -> tuple[float, float, list[Step]]:
    """Median added and whole CPU nanoseconds per decode step in that arm, and kvobs's own records of the steps."""
    from transformers import PreTrainedModel

    watch, own = Stopwatch(), list[Step]()
    with replaced(PreTrainedModel, "__call__", watch.inner), arm(name) as runtime:
        if runtime is not None:
            watch_steps(runtime, own)
        with replaced(PreTrainedModel, "__call__", watch.outer):
            engine.decode(steps)
    decode = watch.steps[3:]
    return median([added for added, _ in decode]), median([whole for _, whole in decode]), own


def _rows(name: str, engine: Engine, plan: Plan, step: Callable[[], None]) -> Iterator[Row]:
    rounds, steps, draw = plan.rounds(16, 4), plan.rounds(24, 6), random.Random(1)
    arms = [OFF, _AGAIN, ON, DISABLED]
    added: dict[str, list[float]] = {key: [] for key in arms}
    whole: dict[str, list[float]] = {key: [] for key in arms}
    told: list[float] = []
    hook_us: list[float] = []
    engine.decode(steps)
    for _ in range(rounds):
        for key in draw.sample(arms, len(arms)):
            extra, total, own = _watched(engine, OFF if key == _AGAIN else key, steps)
            added[key].append(extra)
            whole[key].append(total)
            if own:
                told.append(100 * sum(s.hook_ns for s in own) / sum(s.duration_ns for s in own))
                hook_us += [s.hook_ns / 1000 for s in own]
            step()
    yield repeated(GROUP, f"{name}: as kvobs itself says", told, "%", budget=engine.budget,
                   note=f"Σ hook time / Σ step time, wall; median {median(hook_us):.1f} µs")
    share = {key: [100 * (extra - nothing) / total for extra, nothing, total in
                   zip(added[key], added[OFF], whole[OFF], strict=True)] for key in arms}
    for key, budget in ((ON, engine.budget), (DISABLED, DISABLED_BUDGET)):
        us = (median(added[key]) - median(added[OFF])) / 1000
        yield compared(GROUP, f"{name}: by a stopwatch, {key}", share[key], share[_AGAIN], "%", budget=budget,
                       note=f"{us:.1f} µs CPU of a {median(whole[OFF]) / 1e6:.1f} ms step")


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    for name, budget, engine in engines():
        if engine is None:
            yield skipped(GROUP, f"{name}: hooks", MISSING, unit="%", budget=budget)
        else:
            yield from _rows(name, engine, plan, progress(4 * plan.rounds(16, 4)))
