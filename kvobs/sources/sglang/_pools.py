"""The pools of one SGLang scheduler: where its figures are, what happened in them, and the events that say so.

Full attention, sliding window (SWA) and Mamba state have a pool each; a block is a page of tokens, or a Mamba slot.
Everything is read on the scheduler's own thread from SGLang's own objects (``SchedulerPoolStatsObserver``, the radix
tree, ``SchedulerInvariantChecker``); the bytes of a page are those that SGLang registers for a transfer of it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from kvobs import model
from kvobs.model import Emit
from kvobs.sources._eviction_times import EvictionTimes
from kvobs.sources._identity import next_cache_id
from kvobs.sources.sglang._balance import Tokens, balance, gap_of, sentence
from kvobs.sources.sglang._hooking import SOURCE

FULL, SWA, MAMBA = "full", "swa", "mamba"
MOST_LOST = 4_096  # retracted requests whose return is awaited


class Pool:
    """One pool: identity, geometry and counters."""

    def __init__(self, name: str, kind: str, page_size: int, block_bytes: int, scheduler: Any, dtype: str) -> None:
        self.name = name
        self.cache_id = next_cache_id()
        self.page_size = page_size
        self.block_bytes = block_bytes
        self.origin = model.Origin(SOURCE, str(getattr(scheduler.server_args, "model_path", "")),
                                   f"{kind}/{name}", str(scheduler.token_to_kv_pool_allocator.device), dtype)
        self.allocations = self.failures = self.failures_waiting = self.preemptions = 0
        self.evictions = self.dropped = self.touches = 0
        self.queried = self.hit = self.resumed_queried = self.resumed_hit = self.recomputed = 0
        self.tail_tokens: int | None = None
        self.times = EvictionTimes()
        self.tokens: Tokens | None = None
        self.suspect = 0
        self.broken = ""
        self._told: tuple[model.Blocks, model.PoolWork] | None = None

    def blocks(self, tokens: int) -> int:
        """Blocks of so many tokens, whole ones."""
        return -(-tokens // self.page_size)

    def tell(self, now_ns: int, tokens: Tokens, emit: Emit, *, idle: bool) -> None:
        """Emit the pool's states and counts where they changed.

        A gap in the accounting is believed of an idle engine at once, of a busy one when the next reading has it too.
        """
        gap = gap_of(tokens)
        believed = gap != 0 and (idle or gap * self.suspect > 0)
        self.suspect, self.tokens = gap, tokens
        if tokens.uncached is not None:
            self.broken = sentence(self.name, tokens) if believed else ""
        states = balance(tokens, self.page_size, idle=idle, believed=believed)
        blocks = model.Blocks(now_ns, self.origin, self.cache_id, self.block_bytes, states.used, states.cached,
                              states.free, self.allocations, self.failures, self.preemptions)
        tail = self.tail_tokens
        work = model.PoolWork(
            now_ns, self.origin, self.cache_id, states.pinned, tail,
            None if tail is None or not self.block_bytes else tail * self.block_bytes // self.page_size,
            states.unexplained, self.evictions, self.dropped, self.touches, self.queried, self.hit,
            self.resumed_queried, self.resumed_hit, self.recomputed, 0, self.failures_waiting)
        told = self._told
        if told is None or _differ(told[0], blocks) or _differ(told[1], work):
            self._told = (blocks, work)
            emit(blocks)
            emit(work)
        evicted = self.times.take(now_ns, self.origin, self.cache_id)
        if evicted is not None:
            emit(evicted)


def _differ(before: Any, after: Any) -> bool:
    return any(getattr(before, field) != getattr(after, field) for field in before.__struct_fields__[1:])


class PoolSet:
    """All pools of one scheduler, the first one being where requests are admitted to."""

    def __init__(self, scheduler: Any) -> None:
        """Find the pools.

        Raises:
            AttributeError: the scheduler lacks something of SGLang 0.5.23's.
        """
        self.observer, self.checker = scheduler.pool_stats_observer, scheduler.invariant_checker
        self.tree, self.rows = scheduler.tree_cache, scheduler.req_to_token_pool
        allocator = self.allocator = scheduler.token_to_kv_pool_allocator
        self.page_size = int(self.tree.page_size)
        self.pools: dict[str, Pool] = {}
        self.by_allocator: dict[int, Pool] = {}  # by identity
        self.read_ns, self.idle = 0, False  # when it was read last, and whether the scheduler was idle then
        self.lost: OrderedDict[str, int] = OrderedDict()
        self.unsized: list[str] = []
        kv = allocator.get_kvcache()
        dtype = str(getattr(kv, "dtype", "")).removeprefix("torch.")
        if self.checker.is_hybrid_swa:
            leaves = (FULL, "full_attn_allocator", "full_kv_pool"), (SWA, "swa_attn_allocator", "swa_kv_pool")
            for name, leaf, part in leaves:
                # A ring per request is no pool of tokens; a model whose layers all slide has no full pool.
                absent = getattr(allocator, "swa_req_ring", False) if name == SWA else (
                    not self.checker.full_tokens_per_layer)
                if not absent:
                    self._add(name, getattr(allocator, leaf, None), self.page_size, getattr(kv, part, kv), scheduler,
                              dtype)
        else:
            self._add(FULL, allocator, self.page_size, kv, scheduler, dtype)
        if self.checker.is_hybrid_ssm:
            self._add(MAMBA, self.rows.mamba_allocator, 1, self.rows.mamba_pool, scheduler, dtype)
        self.first = next(iter(self.pools.values()))

    def _add(self, name: str, allocator: Any, page_size: int, storage: Any, scheduler: Any, dtype: str) -> None:
        size = bytes_of_page(storage)
        if not size:
            self.unsized.append(name)
        # Pools of one shared buffer have no allocators of their own.
        kind = type(allocator if allocator is not None else self.allocator).__name__
        pool = self.pools[name] = Pool(name, kind, page_size, size, scheduler, dtype)
        self.by_allocator[id(allocator if allocator is not None else storage)] = pool

    def tree_pool(self) -> Pool:
        """The pool of the tokens that the tree counts first; of a model whose layers all slide, the SWA pool."""
        return self.pools.get(FULL) or self.first

    def scarcest(self) -> Pool:
        """The paged pool with least to give: where two are asked for the same number and one refuses, this one did."""
        paged = [pool for pool in self.pools.values() if pool.name != MAMBA]
        if len(paged) < 2:
            return paged[0]
        free = {FULL: self.allocator.full_available_size(), SWA: self.allocator.swa_available_size()}
        return min(paged, key=lambda pool: int(free[pool.name]))

    def remember_lost(self, request: str, tokens: int) -> None:
        """A retracted request must compute so many tokens again, unless the tree still has them at its return."""
        self.lost[request] = tokens
        if len(self.lost) > MOST_LOST:
            self.lost.popitem(last=False)

    def gone(self, emit: Emit) -> None:
        """The scheduler is gone."""
        for pool in self.pools.values():
            emit(model.CacheGone(time.monotonic_ns(), pool.cache_id))


def bytes_of_page(storage: Any) -> int:
    """Bytes of one page (Mamba: one slot) over all layers, as SGLang registers them for transfers.

    0 where the pool does not say (a layout without a transfer description).
    """
    try:
        return sum(int(length) for length in storage.get_contiguous_buf_infos()[2])
    except (AttributeError, IndexError, NotImplementedError, TypeError):
        return 0
