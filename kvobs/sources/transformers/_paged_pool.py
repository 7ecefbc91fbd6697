"""The engine's own ledger of one paged cache, in one unit of blocks.

Attention groups of one pool have blocks of different sizes (a sliding group's block holds a page of each of its
layers). They are counted in the largest size that divides them all, so that sums are exact; for a model with one
group this is the engine's own block. Every figure is the engine's (``CachePool``, ``CacheAllocator``,
``BlockLedger``); nothing here is computed from a model's dimensions, and no tensor is kept alive.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from kvobs import model
from kvobs.sources._identity import next_cache_id
from kvobs.sources.transformers._paged_requests import Requests


class Flight(msgspec.Struct, frozen=True, gc=False):
    """A step that was launched and whose tokens the host has not read yet."""

    began_ns: int
    ended_ns: int
    tokens: int
    prefill: bool
    held_bytes: int


class _Group:
    """One attention group: its allocator's index, block table and ledger, and what a block weighs."""

    __slots__ = ("block_bytes", "index", "ledger", "name", "table", "weight")

    def __init__(self, name: str, allocator: Any, unit_bytes: int) -> None:
        self.name = name
        self.index: int = allocator.index
        self.table: dict[str, list[int]] = allocator.block_table
        self.ledger = allocator.ledger
        self.block_bytes: int = allocator.bytes_per_block
        self.weight = self.block_bytes // unit_bytes


class PoolRecord:
    """What kvobs knows about one paged cache. Counters only grow; all sizes in bytes, blocks in ``block_bytes``."""

    __slots__ = ("_by_name", "_counted", "_groups", "_inner", "_sector_weight", "allocations", "block_bytes",
                 "bytes_per_token", "cache_id", "copied", "device", "failures", "flights", "inner_id", "last", "origin",
                 "preemptions", "read_before_ns", "read_ns", "requests", "reserved_bytes", "weights")

    def __init__(self, cache: Any) -> None:
        """Read the geometry of a ``PagedAttentionCache``.

        Raises:
            AttributeError: the cache lacks something of the geometry that transformers 5.18 introduced.
        """
        allocators = cache.cache_allocators
        self.cache_id = next_cache_id()
        self.device = str(cache.device)
        self.block_bytes = math.gcd(*(allocator.bytes_per_block for allocator in allocators.values()))
        self._groups = [_Group(name, allocator, self.block_bytes) for name, allocator in allocators.items()]
        self._by_name = {group.name: group for group in self._groups}
        self.weights = {group.index: group.weight for group in self._groups}
        self._inner = cache.pool
        self.inner_id = id(cache.pool)
        self._sector_weight = cache.bytes_per_sector // self.block_bytes
        self.bytes_per_token = sum(allocator.bytes_per_block // allocator.tokens_per_page
                                   for allocator in allocators.values())
        self.reserved_bytes: int = cache.cache_tensor.numel() * cache.cache_tensor.element_size()
        self.origin: model.Origin | None = None
        self.requests: Requests | None = None
        self.allocations = self.failures = self.preemptions = 0
        self.copied = self._counted = 0
        self.flights: deque[Flight] = deque(maxlen=2)
        self.read_ns = self.read_before_ns = 0
        self.last: model.Blocks | None = None

    def counts(self) -> tuple[int, int, int]:
        """Blocks used by requests, cached (reusable, referenced by none) and free."""
        inner = self._inner
        free = inner.num_free_sectors * self._sector_weight
        cached = 0
        for group in self._groups:
            free += inner.count_free_blocks(group.index) * group.weight
            cached += len(group.ledger.cached_blocks) * group.weight
        return inner.num_sectors * self._sector_weight - free - cached, cached, free

    def held_by(self, request_id: str) -> int:
        """Bytes of the blocks in the request's block tables; shared ones count for each request that uses them."""
        return sum(len(group.table.get(request_id, ())) * group.block_bytes for group in self._groups)

    def bytes_of(self, blocks: Mapping[str, int]) -> int:
        """Bytes of so many blocks per attention group."""
        return sum(number * self._by_name[name].block_bytes for name, number in blocks.items())

    def take_copied(self) -> int:
        """Bytes copied inside the pool since the last call."""
        since, self._counted = self.copied - self._counted, self.copied
        return since

    def blocks(self, *, only_changes: bool) -> model.Blocks | None:
        """The ledger now; None before the first step, or when asked for changes and there are none."""
        if self.origin is None:
            return None
        used, cached, free = self.counts()
        last = self.last
        if only_changes and last is not None and (last.used, last.cached, last.free) == (used, cached, free):
            return None
        self.last = model.Blocks(time.monotonic_ns(), self.origin, self.cache_id, self.block_bytes, used, cached, free,
                                 self.allocations, self.failures, self.preemptions)
        return self.last
