"""What relieves a vLLM engine beside admission: its prefix cache reset, a pause of admission, shorter answers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from kvobs.model import Effect
from kvobs.sources._safe_point import Result, refused
from kvobs.sources.vllm._pool import is_cached
from kvobs.sources.vllm._requests import PRIORITY, headers_of

GONE = "The scheduler is gone."
Current = Callable[[], Any]


# -- the prefix cache ----------------------------------------------------------------------------------


def plan_reset(scheduler: Any, block_bytes: int, protected: int) -> Effect:
    """What a reset of the prefix cache would do now, while so many cached blocks are protected."""
    why = _why_no_reset(scheduler, protected)
    return Effect(None if why else _cached(scheduler) * block_bytes, None, why)


def reset(scheduler: Any, block_bytes: int, protected: int) -> Result:
    """Drop the content of all cached blocks; only while no request holds one, and none is protected.

    vLLM's reset is all or nothing: it cannot spare some.
    """
    why = _why_no_reset(scheduler, protected)
    if why:
        return refused(why)
    before = _cached(scheduler)
    if before and not scheduler.reset_prefix_cache():
        return refused("vLLM refused to reset its prefix cache; its log says why.")
    blocks = before - _cached(scheduler)
    return Result(True, blocks * block_bytes, f"{blocks:,} cached blocks lost their content." if blocks else "")


def _why_no_reset(scheduler: Any, protected: int) -> str:
    if scheduler is None:
        return GONE
    if not scheduler.kv_cache_manager.enable_caching:
        return "Prefix caching is off, so there is no cache to reset."
    pool = scheduler.kv_cache_manager.block_pool
    held = len(pool.blocks) - 1 - int(pool.free_block_queue.num_free_blocks)
    if held:
        return f"Requests hold {held:,} blocks; vLLM resets its prefix cache only while none is held."
    return f"{protected:,} hot blocks are protected, and vLLM's reset is all or nothing." if protected else ""


def _cached(scheduler: Any) -> int:
    return sum(map(is_cached, scheduler.kv_cache_manager.block_pool.blocks))


# -- a pause -------------------------------------------------------------------------------------------


class Pause:
    """Admits nobody while those that run come to their ends (vLLM's ``PAUSED_NEW``).

    It ends by itself when nobody runs any more: from then on it would only keep requests waiting. A pause that
    somebody else asks for takes precedence, and is not ended here.
    """

    def __init__(self, scheduler: Current) -> None:
        self._scheduler = scheduler
        self.active = False
        self._setting = False

    def why_not(self) -> str:
        """Why there can be no pause now; empty where there can."""
        scheduler = self._scheduler()
        if scheduler is None:
            return GONE
        state = getattr(getattr(scheduler, "_pause_state", None), "name", "")
        if not state or not hasattr(scheduler, "set_pause_state"):
            return "This version of vLLM knows no pause."
        if self.active:
            return ""
        if state != "UNPAUSED":
            return "The engine is paused already, and not by kvobs."
        if int(scheduler.vllm_config.parallel_config.data_parallel_size) > 1:
            return "The engine is one of several replicas that step together, and one of them cannot pause alone."
        if not _busy(scheduler):
            return "No request runs, so there is none whose end could be waited for."
        return ""

    def begin(self, _: int) -> Result:
        """Admit nobody."""
        why = self.why_not()
        if why:
            return refused(why)
        if not self.active:
            self._set("PAUSED_NEW")
            self.active = True
        return Result(True)

    def lift(self) -> None:
        """End it if nobody runs any more."""
        scheduler = self._scheduler()
        if self.active and scheduler is not None and not _busy(scheduler):
            self.end(0)

    def end(self, _: int) -> Result:
        """Admit again, unless somebody else has paused the engine meanwhile."""
        if self.active:
            self.active = False
            if self._scheduler() is not None:
                self._set("UNPAUSED")
        return Result(True)

    def was_set(self) -> None:
        """Somebody set the engine's state of pause: if that was not this object, the state is theirs."""
        self.active = self.active and self._setting

    def _set(self, name: str) -> None:
        scheduler = self._scheduler()
        self._setting = True
        try:
            scheduler.set_pause_state(type(scheduler._pause_state)[name])
        finally:
            self._setting = False


def _busy(scheduler: Any) -> bool:
    return bool(scheduler.running) or bool(getattr(scheduler, "kv_holding_waiting", ()))


# -- shorter answers -----------------------------------------------------------------------------------


class Clamp:
    """Lets requests of sheddable sessions generate ``limit`` tokens at most, those that they have not cut.

    What a request has generated stays, and one token more is in the making. ``min_tokens`` is kept. Requests that take
    further input while they run (``resumable``) get their limit anew with each, and are left alone.
    """

    def __init__(self, scheduler: Current, limit: int) -> None:
        self._scheduler = scheduler
        self.limit = limit
        self.active = False
        self._sheddable: weakref.WeakSet[Any] = weakref.WeakSet()
        self._clamped: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    def __contains__(self, request: object) -> bool:
        return request in self._clamped

    def plan(self) -> Effect:
        """What it would do now."""
        if self._scheduler() is None:
            return Effect(None, None, GONE)
        found = sum(self._limit_of(request) < request.max_tokens for request in list(self._sheddable))
        return Effect(0, None, "" if found else "No request of a sheddable session would be cut.")

    def arriving(self, request: Any) -> None:
        """A request comes to the scheduler, and says whose it is."""
        if (headers_of(request).get(PRIORITY) == "sheddable" and request.sampling_params is not None
                and not getattr(request, "resumable", False)):
            self._sheddable.add(request)
            if self.active:
                self._cut(request)

    def begin(self, _: int) -> Result:
        """Clamp those that are there, and from now on those that come."""
        if self._scheduler() is None:
            return refused(GONE)
        self.active = True
        cut = sum([self._cut(request) for request in self._sheddable])
        return Result(True, 0, f"{cut:,} requests are cut." if cut else "")

    def _cut(self, request: Any) -> bool:
        limit = self._limit_of(request)
        if request in self._clamped or request.is_finished() or limit >= request.max_tokens:
            return False
        self._clamped[request] = request.max_tokens, limit
        request.max_tokens = limit
        return True

    def _limit_of(self, request: Any) -> int:
        promised = int(getattr(request.sampling_params, "min_tokens", 0) or 0)
        return max(self.limit, int(request.num_output_tokens) + 1, promised)

    def end(self, _: int) -> Result:
        """Give those that have not ended their limit back."""
        self.active = False
        for request, (before, limit) in list(self._clamped.items()):
            if request.max_tokens == limit:
                request.max_tokens = before
        self._clamped.clear()
        return Result(True)
