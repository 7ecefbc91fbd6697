"""The action that protects the hot blocks of a vLLM pool: when it can be done, its beginning and its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvobs.model import Effect
from kvobs.sources._safe_point import Result, refused
from kvobs.sources.vllm._hot import QUEUE, HotBlocks
from kvobs.sources.vllm._relief import GONE

NO_CACHE = "Prefix caching is off, so there are no blocks to protect."
OTHER_QUEUE = "This version of vLLM keeps its free blocks in another way than kvobs knows."
CONNECTOR = "A KV connector walks the queue of free blocks, whose order is left to it."


class Protection:
    """The action over ``HotBlocks``; ``scheduler()`` is None when it died."""

    def __init__(self, scheduler: Callable[[], Any], hot: HotBlocks, clock: Callable[[], int]) -> None:
        self._scheduler, self._hot, self._clock = scheduler, hot, clock
        self._thread = 0

    def plan(self) -> Effect:
        """What it would do now."""
        why = self._why_not()
        if why:
            return Effect(None, None, why)
        return Effect(0, None, "" if self._now_hot() else "No block is hot now.")

    def protected(self) -> int:
        """How many blocks it keeps from being lost now."""
        return self._now_hot() if self._hot.active and not self._why_not() else 0

    def begin(self, _: int) -> Result:
        """Protect hot blocks from now on."""
        why = self._why_not()
        if why:
            return refused(why)
        self._thread = threading.get_ident()
        if self._hot.active:
            return Result(True)
        self._hot.begin()
        found = self._now_hot()
        return Result(True, 0, f"{found:,} blocks are hot." if found else "")

    def end(self, _: int) -> Result:
        """Back to the plain order; from another thread than the engine's, the queue is left as it is."""
        scheduler = self._scheduler()
        if not self._hot.active:
            return Result(True)
        if scheduler is None or threading.get_ident() != self._thread:
            self._hot.active = False
            return Result(True)
        self._hot.end(scheduler.kv_cache_manager.block_pool)
        spared = self._hot.spared
        return Result(True, 0, f"Hot blocks were spared {spared:,} times, and hit in {self._hot.found:,} of their "
                               "second rounds." if spared else "")

    def _blocks(self) -> Sequence[Any]:
        found: Sequence[Any] = self._scheduler().kv_cache_manager.block_pool.blocks
        return found

    def _now_hot(self) -> int:
        return self._hot.hot(self._blocks(), self._clock())

    def _why_not(self) -> str:
        scheduler = self._scheduler()
        if scheduler is None:
            return GONE
        if not scheduler.kv_cache_manager.enable_caching:
            return NO_CACHE
        queue = scheduler.kv_cache_manager.block_pool.free_block_queue
        if not all(hasattr(queue, name) for name in QUEUE):
            return OTHER_QUEUE
        return CONNECTOR if getattr(scheduler, "connector", None) is not None else ""
