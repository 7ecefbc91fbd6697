"""The hooks in vLLM's engine core: its block pool, its cache manager, its scheduler.

Run on vLLM 0.32.0 and 0.29.0. Every hook probes what it wraps; where one is missing that all known versions have,
nothing is patched, and the availability names it. Those that only newer versions have are taken where they are. All of
them run on the thread of the engine core. A hook that raises is detached and said so; vLLM's own exceptions pass
unchanged.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from kvobs.bus import Bus
from kvobs.model import Availability, Emit, Event
from kvobs.sources import Wiring
from kvobs.sources._identity import ByIdentity
from kvobs.sources._imports import when_imported
from kvobs.sources._patch import Patches
from kvobs.sources.vllm._actions import Actuators
from kvobs.sources.vllm._arrivals import Arrivals
from kvobs.sources.vllm._engine import EngineRecord, Spent
from kvobs.sources.vllm._pool import PoolLedger, flat, is_cached
from kvobs.sources.vllm._requests import Desk

SUBJECT = "vllm engine core"
SCHEDULER = "vllm.v1.core.sched.scheduler"
NOT_THERE = "vLLM's scheduler was not imported in this process."

Original = Callable[..., Any]
Make = Callable[[str], Callable[[Original], Original]]
# What it hooks: class, method, and whether every known version has it.
Point = tuple[Any, str, Make, bool]


def _nothing(_: object) -> None:
    """What is to be done at the end of an object of which only a record is kept."""


class EngineHooks:
    """The hooks of one ``VllmSource``. ``patches`` restores the originals; ``uninstall`` drops the state."""

    def __init__(self, wiring: Wiring, emit: Emit, patches: Patches, desk: Desk) -> None:
        self._bus = wiring.bus
        self._emit = emit
        self._patches = patches
        self._desk = desk
        self.arrivals = Arrivals(desk.session_of)
        self.actuators = Actuators(emit)
        self._spent = Spent()
        self._cancels: list[Callable[[], None]] = []
        self._running: Any = None
        self._ledgers: ByIdentity[PoolLedger] = ByIdentity()
        self._engines: ByIdentity[EngineRecord] = ByIdentity()  # of schedulers
        self._by_manager: ByIdentity[EngineRecord] = ByIdentity()  # the same
        self.reason = NOT_THERE
        self.cut = 0  # requests that are not told because a pause fell into them

    # -- life ------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Patch the scheduler's module and the engine core's now or when they are imported; never raises."""
        if not self._cancels:
            self._cancels = [when_imported(SCHEDULER, self._patch_all),
                             when_imported("vllm.v1.engine.core", self._patch_arrivals)]

    def uninstall(self) -> None:
        """Drop all state and end the spans of open requests; wrappers that somebody kept pass through."""
        for cancel in self._cancels:
            cancel()
        self._cancels = []
        self.actuators.close()
        self._bus = Bus(0)
        self._bus.active = False
        for record in self._engines.clear():  # the engine may be at work
            record.cut()
        self._ledgers.clear()
        self._by_manager.clear()

    def availability(self) -> Iterable[Availability]:
        """Whether the engine core is observed, and whether its counts were found wrong."""
        drift = sum(ledger.drift for ledger in self._ledgers.records())
        reason = self.reason
        if not reason and drift:
            reason = f"Counting all blocks anew found {drift:,} that changed unseen; the counts were put right."
        yield Availability(SUBJECT, not self.reason, reason)

    def _patch_all(self, module: Any) -> None:
        version = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
        try:
            request = importlib.import_module("vllm.v1.request")
            self._running = request.RequestStatus.RUNNING
            points = self._points(module)
            lacking = [(f"{owner.__name__}.{name}", must) for owner, name, _, must in points
                       if not hasattr(owner, name)]
            if any(must for _, must in lacking):
                raise AttributeError(f"{', '.join(name for name, must in lacking if must)} not found")
            for owner, name, make, _ in points:
                if hasattr(owner, name):
                    self._patches.wrap(owner, name, make(f"{owner.__name__}.{name}"))
            self.reason = ""
        except Exception as error:
            self.reason = f"The scheduler of vLLM {version} is not one that kvobs knows (0.29 to 0.32): {error}."

    def _patch_arrivals(self, module: Any) -> None:
        name = "preprocess_add_request"
        if hasattr(module.EngineCore, name):
            self._patches.wrap(module.EngineCore, name, self._around(
                lambda o, *a, **k: None, lambda o, seen, result, *a, **k: self.arrivals.received(result[0]))(
                    f"EngineCore.{name}"))
        self.actuators.patch(module, self._patches)

    def sample(self, now_ns: int) -> Iterable[Event]:
        """What engines that are in a long step, or idle, hold now; called on the drain thread."""
        for record in self._engines.records() if self._bus.active else ():
            if record.epoch == self._bus.epoch:  # else there was a pause since its last call
                yield from record.seen(now_ns)

    def _failed(self, name: str, error: Exception) -> None:
        self._patches.fail(name, error)
        self.reason = f"The hook {name} failed and was detached; the engine core is observed incompletely."

    # -- records ---------------------------------------------------------------------------------------

    def _ledger(self, pool: Any) -> PoolLedger:
        found = self._ledgers.get(pool)
        if found is None:
            found = self._ledgers.add(pool, PoolLedger(pool, self._bus.epoch), _nothing)
        elif found.epoch != self._bus.epoch:
            found.resume(self._bus.epoch)
        return found

    def _engine(self, scheduler: Any) -> EngineRecord:
        found = self._engines.get(scheduler)
        if found is None:
            manager = scheduler.kv_cache_manager
            found = self._engines.add(scheduler, EngineRecord(
                scheduler, self._ledger(manager.block_pool), self._desk, self.arrivals, self._spent, self._emit),
                EngineRecord.gone)
            self._by_manager.add(manager, found, _nothing)
            self.actuators.found(scheduler, found.ledger.hot)
        elif found.epoch != self._bus.epoch:
            found.epoch = self._bus.epoch
            self.arrivals.clear()
            self._ledger(scheduler.kv_cache_manager.block_pool)
            self.cut += found.cut()
        return found

    def _entered(self, scheduler: Any, arriving: Any = None) -> EngineRecord:
        record = self._engine(scheduler)
        if arriving is not None:
            self.actuators.arriving(scheduler, arriving)
        record.entering()
        return record

    # -- ways to hook ----------------------------------------------------------------------------------

    def _around(self, before: Callable[..., Any], after: Callable[..., None]) -> Make:
        """Look before a call, and after it returned, with what was seen before."""
        def named(name: str) -> Callable[[Original], Original]:
            def make(original: Original) -> Original:
                def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
                    if not self._bus.active:
                        return original(owner, *args, **kwargs)
                    began = time.monotonic_ns()
                    try:
                        seen = before(owner, *args, **kwargs)
                    except Exception as error:
                        self._failed(name, error)
                        return original(owner, *args, **kwargs)
                    self._spent.ns += time.monotonic_ns() - began
                    result = original(owner, *args, **kwargs)
                    ended = time.monotonic_ns()
                    try:
                        after(owner, seen, result, *args, **kwargs)
                    except Exception as error:
                        self._failed(name, error)
                    self._spent.ns += time.monotonic_ns() - ended
                    return result
                return call
            return make
        return named

    # -- the pool --------------------------------------------------------------------------------------

    def _get_new_blocks(self, name: str) -> Callable[[Original], Original]:
        def make(original: Original) -> Original:
            def get_new_blocks(pool: Any, *args: Any, **kwargs: Any) -> Any:
                if not self._bus.active:
                    return original(pool, *args, **kwargs)
                try:
                    ledger = self._ledger(pool)
                    ledger.handing_out(int(args[0] if args else kwargs["num_blocks"]))
                except Exception as error:
                    self._failed(name, error)
                    return original(pool, *args, **kwargs)
                blocks = None
                try:
                    blocks = original(pool, *args, **kwargs)
                    return blocks
                finally:
                    try:
                        ledger.handed_out(blocks)
                    except Exception as error:
                        self._failed(name, error)
            return get_new_blocks
        return make

    def _free_blocks(self, name: str) -> Callable[[Original], Original]:
        def make(original: Original) -> Original:
            def free_blocks(pool: Any, *args: Any, **kwargs: Any) -> Any:
                if not self._bus.active or not args:
                    return original(pool, *args, **kwargs)
                blocks = list(args[0])  # it may be an iterator, which the pool must still find full
                args = (blocks, *args[1:])
                try:
                    ledger = self._ledger(pool)
                except Exception as error:
                    self._failed(name, error)
                    return original(pool, *args, **kwargs)
                result = original(pool, *args, **kwargs)
                ended = time.monotonic_ns()
                try:
                    ledger.freed(blocks)
                except Exception as error:
                    self._failed(name, error)
                self._spent.ns += time.monotonic_ns() - ended
                return result
            return free_blocks
        return make

    # -- the cache manager and the scheduler -----------------------------------------------------------

    def _allocate_slots(self, name: str) -> Callable[[Original], Original]:
        def make(original: Original) -> Original:
            def allocate_slots(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
                record = self._by_manager.get(manager) if self._bus.active else None
                if record is None:
                    return original(manager, request, *args, **kwargs)
                evicted = record.ledger.evictions
                blocks = original(manager, request, *args, **kwargs)
                if blocks is None or request.status is not self._running or record.ledger.evictions != evicted:
                    began = time.monotonic_ns()
                    try:
                        self._allocated(record, request, blocks is not None, record.ledger.evictions - evicted, args,
                                        kwargs)
                    except Exception as error:
                        self._failed(name, error)
                    self._spent.ns += time.monotonic_ns() - began
                return blocks
            return allocate_slots
        return make

    def _allocated(self, record: EngineRecord, request: Any, served: bool, evicted: int, args: tuple[Any, ...],
                   kwargs: dict[str, Any]) -> None:
        waits = request.status is not self._running
        if not served:
            found = args[2] if len(args) > 2 else kwargs.get("new_computed_blocks")
            record.refuses(request, waits, flat(getattr(found, "blocks", ()) or ()))
        elif waits and not kwargs.get("delay_cache_blocks"):
            record.admitted(request, int(args[1] if len(args) > 1 else kwargs.get("num_new_computed_tokens", 0)))
        if evicted:
            record.evicted_for(request, evicted)

    def _schedule(self, name: str) -> Callable[[Original], Original]:
        def make(original: Original) -> Original:
            def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
                self.actuators.at(scheduler)
                if not self._bus.active:
                    return original(scheduler, *args, **kwargs)
                began = time.monotonic_ns()
                try:
                    record = self._engine(scheduler)
                    record.scheduling()
                except Exception as error:
                    self._failed(name, error)
                    return original(scheduler, *args, **kwargs)
                result = original(scheduler, *args, **kwargs)
                ended = time.monotonic_ns()
                try:
                    record.scheduled(scheduler, result, began)
                except Exception as error:
                    self._failed(name, error)
                self._spent.ns += time.monotonic_ns() - ended
                return result
            return schedule
        return make

    def _update_from_output(self, name: str) -> Callable[[Original], Original]:
        def make(original: Original) -> Original:
            def update_from_output(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
                known = self._engines.get(scheduler)
                if known is not None:
                    known.entering()
                result = original(scheduler, *args, **kwargs)
                if self._bus.active:
                    began = time.monotonic_ns()
                    try:
                        record = self._engine(scheduler)
                        record.stepped(scheduler, args[0] if args else kwargs["scheduler_output"])
                        self._spent.ns += time.monotonic_ns() - began
                    except Exception as error:
                        self._failed(name, error)
                return result
            return update_from_output
        return make

    def _reset(self, name: str) -> Callable[[Original], Original]:
        def make(original: Original) -> Original:
            def reset_prefix_cache(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
                record = self._engines.get(scheduler) if self._bus.active else None
                if record is None:
                    return original(scheduler, *args, **kwargs)
                record.resetting = True
                record.entering()
                try:
                    return original(scheduler, *args, **kwargs)
                finally:
                    record.resetting = False
                    try:
                        record.tell(force=True)  # an idle engine has no next step that would tell it
                        record.leaving()
                    except Exception as error:
                        self._failed(name, error)
            return reset_prefix_cache
        return make

    def _free_request(self, name: str) -> Callable[[Original], Original]:
        def make(original: Original) -> Original:
            def free_request(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
                if not self._bus.active:
                    return original(scheduler, request, *args, **kwargs)
                began = time.monotonic_ns()
                try:
                    record = self._engine(scheduler)
                    record.ending(request)
                    self.actuators.ended(scheduler, request)
                except Exception as error:
                    self._failed(name, error)
                    return original(scheduler, request, *args, **kwargs)
                self._spent.ns += time.monotonic_ns() - began
                result = original(scheduler, request, *args, **kwargs)
                if request.request_id in scheduler.requests:
                    record.layout.delayed(request)
                return result
            return free_request
        return make

    # -- the table -------------------------------------------------------------------------------------

    def _points(self, module: Any) -> list[Point]:
        scheduler = module.Scheduler
        manager = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
        pool = importlib.import_module("vllm.v1.core.block_pool").BlockPool
        around = self._around

        def two(first: Any, second: Any, *_: Any) -> tuple[list[Any], int]:
            blocks = [first, second]
            return blocks, sum(map(is_cached, blocks))

        return [
            (pool, "get_new_blocks", self._get_new_blocks, True),
            (pool, "_maybe_evict_cached_block", around(
                lambda o, block, *a, **k: self._ledger(o).forgetting(block),
                lambda o, seen, gone, block, *a, **k: self._ledger(o).forgot(block, seen) if gone else None), True),
            (pool, "touch", around(lambda o, blocks, *a, **k: self._ledger(o).touching(flat(blocks)),
                                   lambda o, seen, result, *a, **k: None), True),
            (pool, "free_blocks", self._free_blocks, True),
            (pool, "unpin_blocks", self._free_blocks, False),
            (pool, "move_block_hashes", around(
                lambda o, src_block, dst_block: two(src_block, dst_block),
                lambda o, seen, result, *a, **k: self._ledger(o).changed(*seen)), False),
            (pool, "reset_prefix_cache", around(
                lambda o, *a, **k: self._ledger(o),
                lambda o, ledger, done, *a, **k: ledger.reset() if done else None), True),
            (manager, "allocate_slots", self._allocate_slots, True),
            (scheduler, "__init__", around(lambda o, *a, **k: None,
                                           lambda o, seen, result, *a, **k: self._engine(o).ended(o)), True),
            (scheduler, "add_request", around(
                lambda o, request, *a, **k: self._entered(o, request),
                lambda o, record, result, request, *a, **k: record.added(o, request)), True),
            (scheduler, "schedule", self._schedule, True),
            (scheduler, "update_from_output", self._update_from_output, True),
            (scheduler, "_preempt_request", around(
                lambda o, request, *a, **k: self._engine(o).preempting(request),
                lambda o, seen, result, request, *a, **k: self._engine(o).preempted(request, seen)), True),
            (scheduler, "_free_request", self._free_request, True),
            (scheduler, "_free_blocks", around(lambda o, request, *a, **k: self._engine(o).layout.released(request),
                                               lambda o, seen, result, *a, **k: None), True),
            (scheduler, "finish_requests", around(
                lambda o, *a, **k: self._entered(o),
                lambda o, record, *a, **k: record.ended(o)), True),
            (scheduler, "reset_prefix_cache", self._reset, True),
        ]
