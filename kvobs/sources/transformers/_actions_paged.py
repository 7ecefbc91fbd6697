"""What can be done to a pool of continuous batching: give up blocks that are kept for reuse alone.

The safe point is the beginning of ``prepare_next_batch``, which the engine's thread calls before each step, and ten
times a second while it has no requests.
"""

from __future__ import annotations

from typing import Any

from kvobs.model import Capability, Effect, Emit
from kvobs.sources._safe_point import Action, Result, SafePoint, refused

NO_POOL = "No pool of continuous batching has been seen."
TOO_OLD = "This transformers cannot evict cached blocks."


class PagedActions:
    """The actuator of continuous batching; an order is carried out by the first engine that reaches its safe point."""

    def __init__(self, emit: Emit) -> None:
        self._cache: Any = None
        self._seen: int | None = None  # cached bytes when an engine was last at its safe point
        self.point = SafePoint("continuous batching", (
            Action(Capability(1, "evict_cached_blocks", False,
                              "Give blocks back to the pool that no request refers to and that are kept for reuse."),
                   self._plan, self._evict),
        ), emit, idle=lambda: False)

    @property
    def used(self) -> bool:
        """Whether an engine of continuous batching has been at its safe point: else orders would wait in vain."""
        return self._seen is not None

    def reached(self, processor: Any) -> None:
        """An engine is at its safe point."""
        self._seen = _cached_bytes(processor.cache)
        if self.point.waiting:
            self._cache = processor.cache
            try:
                self.point.run()
            finally:
                self._cache = None

    def _plan(self) -> Effect:
        return Effect(None, None, NO_POOL) if self._seen is None else Effect(self._seen, None)

    def _evict(self, deadline_ns: int) -> Result:
        cache = self._cache
        if cache is None:
            return refused(NO_POOL)
        if not hasattr(cache, "evict_cached_blocks"):
            return refused(TOO_OLD)
        before = _cached_bytes(cache)
        cache.evict_cached_blocks()
        return Result(True, before - _cached_bytes(cache))


def _cached_bytes(cache: Any) -> int:
    return sum(len(one.ledger.cached_blocks) * one.bytes_per_block for one in cache.cache_allocators.values())
