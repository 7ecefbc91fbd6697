"""What a call through an inactive hook costs beyond the call itself, warm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.bench._arms import DISABLED, arm
from tests.bench._engines import engines
from tests.bench._rows import Plan, Progress, Row, repeated
from tests.bench.hooks import DISABLED_BUDGET, replaced

GROUP = "disabled"
_CALLS_PER_STEP = 2  # the causal model, and the model inside it


def nothing(*_: Any, **__: Any) -> None:
    """What the measured call does."""


def _call_ns(call: Callable[..., Any], calls: int) -> float:
    model, ids, cache = object(), object(), object()
    began = time.thread_time_ns()
    for _ in range(calls):
        call(model, input_ids=ids, past_key_values=cache, use_cache=True)
    return (time.thread_time_ns() - began) / calls


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    from transformers import PreTrainedModel

    rounds, calls = plan.rounds(60, 12), plan.rounds(20_000, 5_000)
    done = progress(rounds)
    added: list[float] = []
    with replaced(PreTrainedModel, "__call__", lambda _: nothing), arm(DISABLED):
        for _ in range(rounds):
            bare = _call_ns(nothing, calls)
            added.append(_call_ns(PreTrainedModel.__call__, calls) - bare)
            done()
    yield repeated(GROUP, "one call through an inactive hook", added, "ns", note="beyond the call itself, warm")
    for name, _, engine in engines():
        if engine is not None:
            engine.decode(4)
            took = engine.decode(8)
            yield repeated(GROUP, f"{name}: two such calls per step", added, "%", budget=DISABLED_BUDGET,
                           scale=100 * _CALLS_PER_STEP * took.steps / took.cpu_ns)
