"""Hot blocks of continuous batching live twice as long: an eviction passes them over once.

transformers gives up all of its cached blocks at once whenever memory is short. While hot ones (``kvobs.sources._hot``)
are protected, an eviction takes the others first. What it wanted is then looked at: the scheduler's safety margin, and
room for requests that are starved. Where that is not reached the hot blocks go after all, the least hot first, until it
is; those that were passed over also go when a request or a fork has no room even without the others. So nothing waits
or fails that would not without protection. A
block is passed over once until it is hit again, and at most half of a pool's blocks are.

Blocks are passed over by being taken out of the engine's own ledger for the duration of its own eviction, and put back
in their order.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from kvobs.model import Emit
from kvobs.sources._hot import SHARE, Hits
from kvobs.sources._identity import ByIdentity
from kvobs.sources._patch import Patches
from kvobs.sources.transformers._caches import SOURCE

Original = Callable[..., Any]
PATCHED = "evict_cached_blocks", "can_store_request_tokens", "prepare_fork_request"
Place = tuple[int, int]  # of a block: its allocator's index, and its number


class HotPool:
    """The hits of one paged cache's blocks, and which of them an eviction has passed over."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = weakref.ref(scheduler)
        self._hits: dict[int, Hits] = {}
        self.passed: dict[Place, None] = {}
        self.spared = self.found = 0

    def hit(self, cache: Any, request_id: str, tokens: int, now_ns: int) -> None:
        """A request found so many tokens of its prompt, whose blocks are its first."""
        for allocator in cache.cache_allocators.values():
            hits = self._hits.setdefault(allocator.index, Hits())
            content = allocator.ledger.block_to_hash
            for block in allocator.block_table.get(request_id, ())[:tokens // allocator.tokens_per_page]:
                hits.add(block, content.get(block), now_ns)
                if (allocator.index, block) in self.passed:
                    del self.passed[allocator.index, block]
                    self.found += 1

    def hot(self, cache: Any, now_ns: int) -> list[tuple[int, Place]]:
        """The cached blocks that are hot, the least hot first: no more of each allocator than may be protected.

        Blocks of one prefix are hit together; the last of them goes first.
        """
        found: list[tuple[int, Place]] = []
        for allocator in cache.cache_allocators.values():
            hits, ledger = self._hits.get(allocator.index), allocator.ledger
            heats = [] if hits is None else [
                (heat, (allocator.index, block)) for block in reversed(ledger.cached_blocks)
                if (heat := hits.heat_ns(block, ledger.block_to_hash.get(block), now_ns)) is not None]
            heats.sort(key=_by_heat)
            found += heats[max(0, len(heats) - allocator.num_blocks // SHARE):]
        return sorted(found, key=_by_heat)

    def enough(self, cache: Any) -> bool:
        """Whether an eviction has reached what the engine makes one for."""
        scheduler = self._scheduler()
        if scheduler is None:
            return False
        cache.pool.try_to_free_sectors()
        starved = [{name: allocator.needs_new_blocks(state.request_id, state.current_len(), length)
                    for name, allocator in cache.cache_allocators.items()}
                   for state, length in scheduler.starved_requests]
        return bool(cache.compute_free_capacity() >= scheduler.safety_margin
                    and cache.count_storable_requests(starved) == len(starved))


def _by_heat(one: tuple[int, Place]) -> int:
    return one[0]


class Hidden:
    """Cached blocks that an eviction does not see. As a context, what is left of them is put back at its end."""

    def __init__(self, cache: Any, places: list[Place]) -> None:
        self._ledgers = {allocator.index: allocator.ledger for allocator in cache.cache_allocators.values()}
        self._order = {index: list(ledger.cached_blocks) for index, ledger in self._ledgers.items()}
        self.places = dict.fromkeys(places)

    def __enter__(self) -> Hidden:
        for index, block in self.places:
            del self._ledgers[index].cached_blocks[block]
        return self

    def __exit__(self, *_: object) -> None:
        for index, order in self._order.items():
            cached = self._ledgers[index].cached_blocks
            left = [block for block in order if block in cached or (index, block) in self.places]
            cached.clear()
            cached.update(dict.fromkeys(left))

    def give(self, number: int) -> None:
        """The next eviction sees the first ones."""
        for index, block in list(self.places)[:number]:
            del self.places[index, block]
            self._ledgers[index].cached_blocks[block] = None


class HotPrefixes:
    """The hot blocks of all paged caches of the process. ``begin`` and ``end`` protect them, and stop it."""

    def __init__(self, emit: Emit) -> None:
        self._patches = Patches(SOURCE, emit)
        self._pools: ByIdentity[HotPool] = ByIdentity()
        self.active = False
        self._plain: Original | None = None  # the engine's own eviction, while it is patched

    # -- what the engine does --------------------------------------------------------------------------

    def reached(self, processor: Any) -> None:
        """An engine is at its safe point."""
        if self._pools.get(processor.cache) is None:
            self._pools.add(processor.cache, HotPool(processor.scheduler), lambda _: None)

    def matched(self, cache: Any, request_id: str, tokens: int) -> None:
        """A request found the start of its prompt in the pool."""
        pool = self._pools.get(cache)
        if tokens and pool is not None:
            pool.hit(cache, request_id, tokens, time.monotonic_ns())

    # -- what is asked ---------------------------------------------------------------------------------

    def told(self) -> tuple[int, int]:
        """How often blocks were passed over since the beginning, and how many of these were hit afterwards."""
        pools = self._pools.records()
        return sum(pool.spared for pool in pools), sum(pool.found for pool in pools)

    # -- the beginning and the end ---------------------------------------------------------------------

    def begin(self, cache: Any) -> None:
        """Protect hot blocks from now on, of every cache of this one's class."""
        if self.active:
            return
        for pool in self._pools.records():
            pool.passed, pool.spared, pool.found = {}, 0, 0
        for name, make in zip(PATCHED, (self._evict, self._store, self._fork), strict=True):
            self._patches.wrap(type(cache), name, make)
        self.active = True

    def end(self) -> None:
        """Put the engine's own methods back. The order of cached blocks was never another one."""
        self.active = False
        self._patches.restore()
        self._plain = None

    def evict(self, cache: Any) -> int:
        """Evict all cached blocks but the hot ones, whether or not these are protected; returns how many stay."""
        pool = self._pools.get(cache)
        places = [place for _, place in pool.hot(cache, time.monotonic_ns())] if pool is not None else []
        with Hidden(cache, places):
            (self._plain or type(cache).evict_cached_blocks)(cache)
        return len(places)

    def close(self) -> None:
        """Protect nothing, and forget everything."""
        self.end()
        self._pools.clear()

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have held a lock."""
        self._patches.after_fork_in_child()

    # -- hooks -----------------------------------------------------------------------------------------

    def _failed(self, cache: Any, name: str, error: Exception) -> None:
        self._patches.fail(f"{type(cache).__name__}.{name}", error)

    def _evict(self, original: Original) -> Original:
        def evict_cached_blocks(cache: Any, *args: Any, **kwargs: Any) -> Any:
            pool = self._pools.get(cache)
            if pool is None or not self.active:
                return original(cache, *args, **kwargs)
            try:
                places = [place for _, place in pool.hot(cache, time.monotonic_ns()) if place not in pool.passed]
                hidden = Hidden(cache, places)
            except Exception as error:
                self._failed(cache, "evict_cached_blocks", error)
                return original(cache, *args, **kwargs)
            with hidden:
                evicted, more = original(cache, *args, **kwargs), 1
                while hidden.places and not (evicted and self._enough(pool, cache)):
                    hidden.give(more)
                    evicted, more = original(cache, *args, **kwargs) or evicted, 2 * more
                pool.passed = dict(hidden.places)
                pool.spared += len(hidden.places)
            return evicted
        self._plain = original
        return evict_cached_blocks

    def _enough(self, pool: HotPool, cache: Any) -> bool:
        try:
            return pool.enough(cache)
        except Exception as error:
            self._failed(cache, "evict_cached_blocks", error)
            return False

    def _store(self, original: Original) -> Original:
        def can_store_request_tokens(cache: Any, state: Any, length: int, dry_run: bool = False) -> Any:
            if not dry_run:
                self._make_room("can_store_request_tokens", cache,
                                lambda: bool(original(cache, state, length, dry_run=True)))
            return original(cache, state, length, dry_run=dry_run)
        return can_store_request_tokens

    def _fork(self, original: Original) -> Original:
        def prepare_fork_request(cache: Any, src_state: Any, dst_req_ids: Any, *args: Any, **kwargs: Any) -> Any:
            def fits() -> bool:
                needed = {name: allocator.count_non_shareable_blocks(src_state.request_id, src_state.current_len())
                          for name, allocator in cache.cache_allocators.items()}
                return bool(cache.count_storable_requests([needed] * len(dst_req_ids)) == len(dst_req_ids))

            self._make_room("prepare_fork_request", cache, fits)
            return original(cache, src_state, dst_req_ids, *args, **kwargs)
        return prepare_fork_request

    def _make_room(self, name: str, cache: Any, fits: Callable[[], bool]) -> None:
        """Give up blocks that an eviction has passed over, until something fits that would have without."""
        pool = self._pools.get(cache)
        if pool is None or not pool.passed or not self.active:
            return
        try:
            if not fits():  # what is not hot goes first
                hot = {place for _, place in pool.hot(cache, time.monotonic_ns())}
                self._evict_if(cache, lambda place: place not in hot and place not in pool.passed)
            more = 1
            while pool.passed and not fits():
                given = dict.fromkeys(list(pool.passed)[:more])
                for place in given:
                    del pool.passed[place]
                self._evict_if(cache, given.__contains__)
                more *= 2
        except Exception as error:
            self._failed(cache, name, error)

    def _evict_if(self, cache: Any, goes: Callable[[Place], bool]) -> None:
        """Some cached blocks go back to the pool, by the engine's own eviction."""
        places = [(allocator.index, block) for allocator in cache.cache_allocators.values()
                  for block in allocator.ledger.cached_blocks]
        with Hidden(cache, [place for place in places if not goes(place)]):
            assert self._plain is not None
            self._plain(cache)
        cache.pool.try_to_free_sectors()
