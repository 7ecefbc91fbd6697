"""SGLang as the runtime sees it: install, uninstall, and what can be observed here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from kvobs.model import Availability, Emit, Event
from kvobs.sessions import Names
from kvobs.sources import Wiring
from kvobs.sources._imports import when_imported
from kvobs.sources.sglang._hooking import SOURCE, Hook, Hooking
from kvobs.sources.sglang._hooks import EngineHooks

_log = logging.getLogger("kvobs")
_MEMORY = "sglang.srt.mem_cache"
STEPS, SCHEDULE, BATCH, REQ = "Scheduler", "PrefillAdder", "ScheduleBatch", "Req"
_COMPONENTS = f"{_MEMORY}.unified_cache.components.base"
_TICK = "_LAST_ACCESS_TIME_COUNTER_FLOAT"
Point = tuple[str, str, Hook]


class SglangSource:
    """Observes SGLang in this process from the moment its parts are imported."""

    name = SOURCE

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._hooking: Hooking | None = None
        self._engine: EngineHooks | None = None
        self._cancels: list[Callable[[], None]] = []
        self._missing: dict[str, str] = {}

    def install(self, emit: Emit) -> None:
        """Hook in now, or as soon as the parts of SGLang that are hooked have been imported; never raises."""
        if self._hooking is not None:
            return
        config = self._wiring.config
        self._missing = {}
        self._hooking = Hooking(emit)
        self._engine = EngineHooks(self._wiring.bus, emit, self._hooking,
                                   Names(config.session_ids, config.session_key).shown)
        for module, points in self._points(self._engine).items():
            self._cancels.append(when_imported(module, self._placing(points)))

    def uninstall(self) -> None:
        """Put every original back."""
        for cancel in self._cancels:
            cancel()
        if self._hooking is not None:
            self._hooking.restore()
        if self._engine is not None:
            self._engine.forget()
        self._cancels, self._hooking, self._engine = [], None, None

    def sample(self, now_ns: int) -> Iterable[Event]:
        """Nothing: the pools are read on the scheduler's own thread, between two iterations of its loop."""
        return ()

    def after_fork_in_child(self) -> None:
        """Leave the parent's pools to it."""
        if self._hooking is not None:
            self._hooking.after_fork_in_child()

    def availability(self) -> Iterable[Availability]:
        """Whether SGLang is there, what of it is not hooked, and whether its pools' accounting holds."""
        engine = self._engine
        if engine is None or self._hooking is None or SOURCE not in sys.modules:
            yield Availability(SOURCE, False, "SGLang has not been imported in this process.")
            return
        reasons = list(self._missing.values())
        reasons += [f"The hook {name} failed and was detached." for name in self._hooking.broken]
        reasons += [f"SGLang did not apply the hook {name} of its registry." for name in self._hooking.unapplied]
        yield Availability(SOURCE, not reasons, " ".join(reasons))
        yield from _accounting(engine)
        if engine.unseen:
            yield Availability("sglang allocations", False,
                               f"Allocations of {', '.join(engine.unseen)} are not counted: kvobs does not know it.")

    def _placing(self, points: list[Point]) -> Callable[[ModuleType], None]:
        def place(module: ModuleType) -> None:
            for owner, method, hook in points:
                name = f"{owner}.{method}"
                try:
                    if self._hooking is not None:
                        self._hooking.place(getattr(module, owner), method, hook)
                except Exception as error:
                    self._missing[name] = f"SGLang's {name} could not be hooked ({type(error).__name__}: {error})."
        return place

    def _points(self, engine: EngineHooks) -> dict[str, list[Point]]:
        def after(owner: str, method: str, see: Callable[..., None]) -> Point:
            return owner, method, engine.after(f"{owner}.{method}", see)

        def before(owner: str, method: str, see: Callable[..., None]) -> Point:
            return owner, method, engine.before(f"{owner}.{method}", see)

        def around(owner: str, method: str, begin: Callable[..., Any], end: Callable[..., None]) -> Point:
            return owner, method, engine.around(f"{owner}.{method}", begin, end)

        def leaf(owner: str, *methods: str) -> list[Point]:
            return [around(owner, method, engine.allocating, engine.allocated) for method in methods]

        radix, unified, both = "RadixCache", "UnifiedRadixCache", "SWATokenToKVPoolAllocator"
        used = engine.tree_used(lambda: float(getattr(sys.modules[_COMPONENTS], _TICK)))
        return {
            f"{_MEMORY}.allocator.token": leaf("TokenToKVPoolAllocator", "alloc"),
            f"{_MEMORY}.allocator.paged": leaf("PagedTokenToKVPoolAllocator", "alloc", "alloc_extend", "alloc_decode"),
            f"{_MEMORY}.allocator.mamba": leaf("MambaSlotAllocator", "alloc"),
            f"{_MEMORY}.allocator.swa": [
                around(both, method, engine.allocating_both, engine.allocated_both)
                for method in ("alloc", "alloc_extend", "alloc_extend_swa_tail", "alloc_decode")],
            f"{_MEMORY}.radix_cache": [
                after(radix, "evict", engine.evicted), before(radix, "_delete_leaf", engine.leaf_deleted),
                before(radix, "reset", engine.resetting)],
            f"{_MEMORY}.unified_radix_cache": [
                after(unified, "_evict", engine.evicted), before(unified, "reset", engine.resetting),
                before(unified, "match_prefix", used), before(unified, "insert", used)],
            f"{_MEMORY}.unified_cache.unified_tree_core": [
                after("UnifiedTreeCore", "_evict_component_and_detach_lru", engine.component_evicted)],
            "sglang.srt.managers.schedule_policy": [after(SCHEDULE, "add_one_req", engine.admitted)],
            "sglang.srt.managers.schedule_batch": [
                after(BATCH, "check_decode_mem", engine.decode_checked),
                around(BATCH, "retract_decode", engine.retracting, engine.retracted),
                before(REQ, "reset_for_retract", engine.reset_for_retract)],
            "sglang.srt.managers.scheduler": [
                before(STEPS, "get_next_batch_to_run", engine.step), before(STEPS, "on_idle", engine.idle)],
        }


def _accounting(engine: EngineHooks) -> Iterable[Availability]:
    sets = engine.pool_sets()
    subject = "sglang accounting"
    if not sets:
        yield Availability(subject, False, "No scheduler of SGLang has run in this process.")
        return
    broken = [pool.broken for pools in sets for pool in pools.pools.values() if pool.broken]
    reason = " ".join(broken)
    if not broken and engine.why_unchecked:
        reason = f"The accounting of SGLang's pools is not checked now: {engine.why_unchecked}."
    yield Availability(subject, not reason, reason)
    unsized = ", ".join(sorted({name for pools in sets for name in pools.unsized}))
    if unsized:
        yield Availability("sglang block bytes", False,
                           f"SGLang does not say how large a page of the pools {unsized} is; their bytes are not told.")
