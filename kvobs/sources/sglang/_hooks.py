"""What SGLang's methods tell when they are called; all on the scheduler's thread.

A *refusal* (``Blocks.failures``) is an allocator that returned None, a decode step that did not fit although
everything evictable was evicted (``check_decode_mem``), or a waiting request for which the token budget of the pool
was too small (``add_one_req``: NO_TOKEN). Prefix look-ups count when a request is admitted: SGLang matches those that
wait again and again to order them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvobs.bus import Bus
from kvobs.model import Emit
from kvobs.sources._identity import ByIdentity
from kvobs.sources.sglang._account import read, tail_of, unchecked
from kvobs.sources.sglang._clock import TickClock
from kvobs.sources.sglang._hooking import Hook, Hooking
from kvobs.sources.sglang._pools import FULL, MAMBA, SWA, Pool, PoolSet
from kvobs.sources.sglang._retract import Retractions

READ_NS = 100_000_000  # the accounting is read so often at most while the scheduler is busy
SECOND = 1e9
RAISED = object()  # instead of a result


class EngineHooks:
    """The hooks of one source and the pools that they found."""

    def __init__(self, bus: Bus, emit: Emit, hooking: Hooking, shown: Callable[[str], str]) -> None:
        self._bus, self._emit, self._hooking = bus, emit, hooking
        self._sets: ByIdentity[PoolSet] = ByIdentity()  # of schedulers
        self._by_tree: dict[int, PoolSet] = {}
        self._by_allocator: dict[int, Pool] = {}
        self.why_unchecked = ""
        self.unseen: tuple[str, ...] = ()
        self.clock = TickClock()
        self.retractions = Retractions(emit, shown)

    def pool_sets(self) -> list[PoolSet]:
        """The pools of every scheduler that is alive."""
        return self._sets.records()

    def forget(self) -> None:
        """Uninstalled: the pools are not observed any more."""
        for pools in self._sets.clear():
            pools.gone(self._emit)
        self._by_tree, self._by_allocator = {}, {}

    # -- guarded ways to look ----------------------------------------------------------------------------

    def after(self, name: str, see: Callable[..., None]) -> Hook:
        """``see(result, self, *args, **kwargs)`` once the call has returned."""
        def hook(original: Hook, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._bus.active:
                self._guarded(name, see, result, *args, **kwargs)
            return result
        return hook

    def before(self, name: str, see: Callable[..., None]) -> Hook:
        """``see(self, *args, **kwargs)`` before the call."""
        def hook(original: Hook, *args: Any, **kwargs: Any) -> Any:
            if self._bus.active:
                self._guarded(name, see, *args, **kwargs)
            return original(*args, **kwargs)
        return hook

    def around(self, name: str, begin: Callable[..., Any], end: Callable[[Any, Any], None]) -> Hook:
        """``end(what begin returned, the result)``, or RAISED for the result."""
        def hook(original: Hook, *args: Any, **kwargs: Any) -> Any:
            if not self._bus.active:
                return original(*args, **kwargs)
            seen = self._guarded(name, begin, *args, **kwargs)
            result = RAISED
            try:
                result = original(*args, **kwargs)
                return result
            finally:
                if seen is not None:
                    self._guarded(name, end, seen, result)
        return hook

    def _guarded(self, name: str, see: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return see(*args, **kwargs)
        except Exception as error:
            self._hooking.failed(name, error)
            return None

    # -- the scheduler's loop ----------------------------------------------------------------------------

    def step(self, scheduler: Any, *_: Any, **__: Any) -> None:
        """An iteration begins: the last one's accounting is complete."""
        now = time.monotonic_ns()
        pools = self._sets.get(scheduler)
        if pools is None or now - pools.read_ns >= READ_NS:
            self.look(scheduler, now)

    def idle(self, scheduler: Any, *_: Any, **__: Any) -> None:
        """The scheduler has nothing to run; it may sleep now, so that the last word is due."""
        pools = self._sets.get(scheduler)
        if (pools is None or not pools.idle) and scheduler.is_fully_idle():
            self.look(scheduler, time.monotonic_ns())

    def look(self, scheduler: Any, now_ns: int) -> None:
        """Read all pools of a scheduler and tell what changed."""
        pools = self._sets.get(scheduler) or self._bind(scheduler)
        idle = bool(scheduler.is_fully_idle())
        pools.read_ns, pools.idle = now_ns, idle
        self.why_unchecked = unchecked(scheduler, pools, idle=idle)
        pools.first.tail_tokens = 0 if idle else tail_of(pools)
        for name, tokens in read(pools, idle=idle, checked=not self.why_unchecked).items():
            pools.pools[name].tell(now_ns, tokens, self._emit, idle=idle)

    def _bind(self, scheduler: Any) -> PoolSet:
        pools = self._sets.add(scheduler, PoolSet(scheduler), self._unbind)
        self._by_tree[id(pools.tree)] = pools
        self._by_allocator.update(pools.by_allocator)
        self.unseen = tuple(sorted({
            type(leaf).__name__ for leaf in (pools.allocator, getattr(pools.allocator, "full_attn_allocator", None))
            if leaf is not None and not self._hooking.hooks(type(leaf), "alloc")}))
        return pools

    def _unbind(self, pools: PoolSet) -> None:
        self._by_tree.pop(id(pools.tree), None)
        for allocator in pools.by_allocator:
            self._by_allocator.pop(allocator, None)
        pools.gone(self._emit)

    # -- allocators --------------------------------------------------------------------------------------

    def allocating(self, allocator: Any, *_: Any, **__: Any) -> tuple[Pool, Any, int] | None:
        """A leaf allocator is asked for blocks."""
        pool = self._by_allocator.get(id(allocator))
        return None if pool is None else (pool, allocator, int(allocator.available_size()))

    def allocated(self, seen: tuple[Pool, Any, int], result: Any) -> None:
        """It answered: blocks, or None for a refusal."""
        pool, allocator, before = seen
        if result is RAISED:
            return
        if result is None:
            pool.failures += 1
        elif pool.name == MAMBA:
            pool.allocations += len(result)
        else:
            pool.allocations += (before - int(allocator.available_size())) // pool.page_size

    def allocating_both(self, allocator: Any, *_: Any, **__: Any) -> tuple[PoolSet, int] | None:
        """The allocator of a full and a sliding pool is asked for blocks of both."""
        for pools in self.pool_sets():
            if pools.allocator is allocator:
                return pools, sum(pool.failures for pool in pools.pools.values())
        return None

    def allocated_both(self, seen: tuple[PoolSet, int], result: Any) -> None:
        """It refused before it asked either: the pool that has less refused."""
        pools, failures = seen
        if result is None and failures == sum(pool.failures for pool in pools.pools.values()):
            pools.scarcest().failures += 1

    # -- the radix tree ----------------------------------------------------------------------------------

    def evicted(self, result: Any, tree: Any, *_: Any, **__: Any) -> None:
        """Unlocked tokens of the tree were given up."""
        pools = self._by_tree.get(id(tree))
        if pools is None:
            return
        numbers = {SWA: getattr(result, "swa_num_tokens_evicted", 0), MAMBA: getattr(result, "mamba_num_evicted", 0)}
        first = pools.tree_pool()
        first.evictions += first.blocks(result.num_tokens_evicted)
        for name, number in numbers.items():
            if number and name in pools.pools:
                pools.pools[name].evictions += pools.pools[name].blocks(number)

    def leaf_deleted(self, tree: Any, node: Any) -> None:
        """RadixCache gives up a leaf; its nodes carry seconds of the monotonic clock."""
        pools = self._by_tree.get(id(tree))
        if pools is not None:
            now, pool = time.monotonic(), pools.tree_pool()
            pool.times.add(max(0, round((now - node.creation_time) * SECOND)),
                           max(0, round((now - node.last_access_time) * SECOND)), pool.blocks(len(node.key)))

    def component_evicted(self, result: Any, core: Any, node: Any, component: Any, *_: Any, **__: Any) -> None:
        """The unified tree gave up a node's slots of one pool; its nodes carry ticks of a logical clock."""
        freed = result[0]
        pools = next((one for one in self.pool_sets() if getattr(one.tree, "tree_core", None) is core), None)
        if not freed or pools is None:
            return
        name = str(component.component_type)
        pool = pools.pools.get(name)
        born, used = self.clock.time_of(node.creation_time), self.clock.time_of(node.last_access_time)
        if pool is not None and born is not None and used is not None:
            now = time.monotonic_ns()
            pool.times.add(now - born, now - used, pool.blocks(freed))

    def tree_used(self, tick: Callable[[], float]) -> Callable[..., None]:
        """The unified tree is about to be accessed: note which tick comes next."""
        def see(*_: Any, **__: Any) -> None:
            self.clock.note(tick(), time.monotonic_ns())
        return see

    def resetting(self, tree: Any, *_: Any, **__: Any) -> None:
        """All that the tree has is dropped."""
        pools = self._by_tree.get(id(tree))
        if pools is None:
            return
        for name, size in ((FULL, "full_evictable_size"), (SWA, "swa_evictable_size"), (MAMBA, "mamba_evictable_size")):
            pool = pools.pools.get(name)
            if pool is not None:
                plain = name == FULL and len(pools.pools) == 1
                held = tree.evictable_size() if plain else getattr(tree, size)()
                pool.dropped += pool.blocks(held)

    # -- admission and retraction ------------------------------------------------------------------------

    def admitted(self, result: Any, adder: Any, req: Any, *_: Any, **__: Any) -> None:
        """A waiting request was tried."""
        pools = self._by_tree.get(id(adder.tree_cache))
        if pools is None:
            return
        pool = pools.first
        if getattr(result, "name", "") == "NO_TOKEN":
            pool.failures += 1
            pool.failures_waiting += 1
        if not adder.can_run_list or adder.can_run_list[-1] is not req:
            return
        asked, hit = len(req.full_untruncated_fill_ids), int(req.prefix_len)
        pool.touches += hit // pool.page_size
        if req.retracted_stain:
            pool.resumed_queried += asked
            pool.resumed_hit += hit
            pool.recomputed += max(0, pools.lost.pop(req.rid, 0) - hit)
        else:
            pool.queried += asked
            pool.hit += hit

    def decode_checked(self, result: Any, batch: Any, *_: Any, **__: Any) -> None:
        """Whether the next decode step fits; asked again and again inside a retraction."""
        pools = self._by_tree.get(id(batch.tree_cache))
        if pools is None:
            return
        if not result and not self.retractions.open:
            pools.scarcest().failures += 1
        self.retractions.refused = not result

    def retracting(self, batch: Any, *_: Any, **__: Any) -> PoolSet | None:
        """Requests of a decode batch are about to lose their blocks."""
        pools = self._by_tree.get(id(batch.tree_cache))
        if pools is not None:
            self.retractions.begin(pools, batch.reqs)
        return pools

    def retracted(self, pools: PoolSet, _: Any) -> None:
        """They have lost them."""
        self.retractions.end()

    def reset_for_retract(self, req: Any, *_: Any, **__: Any) -> None:
        """A request has just given its blocks back and is about to forget what it had computed."""
        sets = self.pool_sets()
        self.retractions.victim(req, sets[0] if len(sets) == 1 else None)
