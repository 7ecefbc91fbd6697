"""What can be done to a pool of continuous batching: give up blocks that are kept for reuse, or keep the hot ones.

The safe point is the beginning of ``prepare_next_batch``, which the engine's thread calls before each step, and ten
times a second while it has no requests.
"""

from __future__ import annotations

from typing import Any

from kvobs.model import Capability, Effect, Emit
from kvobs.sources._safe_point import Action, Result, SafePoint, refused
from kvobs.sources.transformers._actions_hot import PATCHED, HotPrefixes

NO_POOL = "No pool of continuous batching has been seen."
NO_SHARING = "Requests share no prefixes here, so there are no blocks to protect."
TOO_OLD = "This transformers cannot evict cached blocks."


class PagedActions:
    """The actuator of continuous batching; an order is carried out by the first engine that reaches its safe point."""

    def __init__(self, emit: Emit) -> None:
        self._cache: Any = None
        self._seen: int | None = None  # cached bytes when an engine was last at its safe point
        self.hot = HotPrefixes(emit)
        self.point = SafePoint("continuous batching", (
            Action(Capability(1, "protect_hot_blocks", True,
                              "Let an eviction pass over cached blocks that are hit often, once until the next hit."),
                   self._plan_protection, self._protect, self._unprotect),
            Action(Capability(1, "evict_cached_blocks", False,
                              "Give blocks back to the pool that are kept for reuse alone and are not hit often."),
                   self._plan, self._evict),
        ), emit, idle=lambda: False)

    @property
    def used(self) -> bool:
        """Whether an engine of continuous batching has been at its safe point: else orders would wait in vain."""
        return self._seen is not None

    def reached(self, processor: Any) -> None:
        """An engine is at its safe point."""
        self.hot.reached(processor)
        self._seen = _cached_bytes(processor.cache)
        if self.point.waiting:
            self._cache = processor.cache
            try:
                self.point.run()
            finally:
                self._cache = None

    def close(self) -> None:
        """Undo what is in effect; nothing is known any more."""
        self.point.close()
        self.hot.close()

    def after_fork_in_child(self) -> None:
        """Orders and locks are the parent's."""
        self.point.after_fork_in_child()
        self.hot.after_fork_in_child()

    # -- hot blocks ------------------------------------------------------------------------------------

    def _plan_protection(self) -> Effect:
        return Effect(None, None, NO_POOL) if self._seen is None else Effect(0, None)

    def _protect(self, deadline_ns: int) -> Result:
        cache = self._cache
        if cache is None:
            return refused(NO_POOL)
        if not getattr(cache, "use_prefix_sharing", False):
            return refused(NO_SHARING)
        if not all(hasattr(cache, name) for name in PATCHED):
            return refused(TOO_OLD)
        self.hot.begin(cache)
        return Result(True)

    def _unprotect(self, deadline_ns: int) -> Result:
        self.hot.end()
        spared, found = self.hot.told()
        return Result(True, 0, f"Hot blocks were passed over {spared:,} times, and {found:,} of these were hit "
                               "afterwards." if spared else "")

    # -- eviction --------------------------------------------------------------------------------------

    def _plan(self) -> Effect:
        return Effect(None, None, NO_POOL) if self._seen is None else Effect(self._seen, None)  # at most: hot ones stay

    def _evict(self, deadline_ns: int) -> Result:
        cache = self._cache
        if cache is None:
            return refused(NO_POOL)
        if not hasattr(cache, "evict_cached_blocks"):
            return refused(TOO_OLD)
        before = _cached_bytes(cache)
        kept = self.hot.evict(cache)
        return Result(True, before - _cached_bytes(cache), f"{kept:,} hot blocks were kept." if kept else "")


def _cached_bytes(cache: Any) -> int:
    return sum(len(one.ledger.cached_blocks) * one.bytes_per_block for one in cache.cache_allocators.values())
