"""An artificially slow hook: how long the guard lets it be, and what the engine does before, during and after."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

from kvobs.guard import PASSING
from kvobs.runtime import Runtime
from tests.bench._arms import configuration
from tests.bench._rows import Plan, Progress, Row, repeated, skipped
from tests.bench._statistics import median

GROUP = "the overhead guard against a hook of 20 ms"
SLOW_S = 0.02
BUDGET_S = 5.0


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    try:
        from kvobs.sources.transformers._sweep import CacheSweep
        from tests.contract import tiny
    except BaseException as error:  # pytest's skip is no Exception
        yield skipped(GROUP, "seconds to pass through", str(error), unit="s", budget=BUDGET_S)
        return
    rounds = plan.rounds(5, 2)
    done, until, before, during, after = progress(rounds), [], [], [], []
    net, ids = tiny.llama(), tiny.prompt(16)
    original = CacheSweep.step

    def slow(self: Any, *args: Any) -> Any:
        end = time.perf_counter() + SLOW_S
        while time.perf_counter() < end:
            pass
        return original(self, *args)

    def tokens_per_second(seconds: float, runtime: Runtime | None = None) -> float:
        began, tokens = time.perf_counter(), 0
        while time.perf_counter() - began < seconds and (runtime is None or runtime.guard.level != PASSING):
            tiny.greedy(net, ids, 8)
            tokens += 8
        return tokens / (time.perf_counter() - began)

    tokens_per_second(1.0)
    for _ in range(rounds):
        before.append(tokens_per_second(2.0))
        with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory:
            runtime = Runtime(configuration(directory))
            runtime.start()
            CacheSweep.step = slow  # type: ignore[method-assign]
            try:
                began = time.perf_counter()
                during.append(tokens_per_second(20.0, runtime))
                until.append(time.perf_counter() - began)
                after.append(tokens_per_second(3.0))
            finally:
                CacheSweep.step = original  # type: ignore[method-assign]
                runtime.stop()
        done()
    yield repeated(GROUP, "until everything passes through", until, "s", budget=BUDGET_S,
                   note=f"tokens/s: {median(before):.0f} without kvobs, {median(during):.0f} with the slow hook, "
                        f"{median(after):.0f} after the guard acted")
