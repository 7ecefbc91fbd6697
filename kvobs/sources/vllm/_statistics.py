"""What vLLM says of one of its engines, as readings of ``kvobs.engine.*``: its own numbers, none of kvobs's.

The engine's thread stores references and adds; the drain thread reads. What a version of vLLM does not say has no
reading. Its gauges are those of its latest word, which comes with steps: ``kvobs.engine.age`` says how old it is while
that word has requests in it. An idle engine takes no steps, so it has said all, and an age would only be alarming.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

Reading = tuple[str, tuple[str, ...], float]

ENGINE, TARGET, POOL = "vllm", "in-process", "device"
_ITERATION = (("preemptions", "num_preempted_reqs"), ("prompt", "num_prompt_tokens"),
              ("generation", "num_generation_tokens"))
_REQUESTS = ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs")
_PREFIX = (("queried", "queries"), ("hit", "hits"))


class Statistics:
    """The words of one engine. ``record`` runs on the engine's event loop, ``readings`` anywhere."""

    def __init__(self, model: str, index: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._who = (ENGINE, TARGET, model, f"dp={index}")
        self._clock = clock
        self._told_ns: int | None = None
        self._scheduler: Any = None
        self._counts: dict[str, int] = {}
        self._finished: dict[str, int] = {}
        self._blocks: int | None = None

    def blocks(self, number: int | None) -> None:
        """How many blocks the engine says that its pool has."""
        self._blocks = number

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Take vLLM's ``SchedulerStats`` and ``IterationStats``, each of which may be None."""
        if scheduler is not None:
            self._scheduler, self._told_ns = scheduler, self._clock()
            self._add(_PREFIX, getattr(scheduler, "prefix_cache_stats", None))
        if iteration is not None:
            self._add(_ITERATION, iteration)
            for request in getattr(iteration, "finished_requests", ()):
                outcome = str(request.finish_reason)
                self._finished[outcome] = self._finished.get(outcome, 0) + 1

    def readings(self) -> list[Reading]:
        """All that was said so far; nothing before the first word."""
        if self._told_ns is None:
            return []
        age = [("kvobs.engine.age", (TARGET,), (self._clock() - self._told_ns) / 1e9)] if self._busy() else []
        return [*age, *self._states(), *self._totals()]

    def _busy(self) -> bool:
        """Whether requests run or wait by the latest word; a version that does not say is taken for busy."""
        told = [getattr(self._scheduler, field, None) for field in _REQUESTS]
        return any(told) or all(number is None for number in told)

    def _add(self, fields: tuple[tuple[str, str], ...], stats: Any) -> None:
        for name, field in fields:
            number = getattr(stats, field, None)
            if number is not None:
                self._counts[name] = self._counts.get(name, 0) + number

    def _states(self) -> Iterator[Reading]:
        said = self._scheduler
        running, waiting, deferred = (getattr(said, field, None) for field in _REQUESTS)
        usage = getattr(said, "kv_cache_usage", None)
        if usage is not None:
            yield "kvobs.engine.kv.utilization", (*self._who, POOL), usage
        if self._blocks is not None:
            yield "kvobs.engine.kv.blocks", (*self._who, POOL), self._blocks
        if running is not None:
            yield "kvobs.engine.requests", (*self._who, "running"), running
        if waiting is not None:
            yield "kvobs.engine.requests", (*self._who, "waiting"), waiting + (deferred or 0)
            for reason, number in (("capacity", waiting), ("deferred", deferred)):
                if number is not None:
                    yield "kvobs.engine.waiting", (*self._who, reason), number

    def _totals(self) -> Iterator[Reading]:
        counts = dict(self._counts)
        for name, metric, more in (("preemptions", "kvobs.engine.preemptions", ()),
                                   ("prompt", "kvobs.engine.tokens", ("prompt",)),
                                   ("generation", "kvobs.engine.tokens", ("generation",)),
                                   ("queried", "kvobs.engine.prefix.queried", (POOL,)),
                                   ("hit", "kvobs.engine.prefix.hit", (POOL,))):
            if name in counts:
                yield metric, (*self._who, *more), counts[name]
        for outcome, number in dict(self._finished).items():
            yield "kvobs.engine.finished", (*self._who, outcome), number
