"""The ledger of one block pool of vLLM: which blocks hold reusable content that nobody uses, and what was done.

A block of the pool is free (nobody holds it, it has no content that could be found again), cached (nobody holds it,
its content can be found by its hash) or held by requests. vLLM keeps free and cached ones in one queue and counts both
as free; how many of these are cached is kept here, by what each call changes. ``audit`` counts all blocks anew.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from kvobs.sources._eviction_times import EvictionTimes
from kvobs.sources.vllm._hot import HotBlocks

MOST_HASHES = 16_384  # of evicted blocks that are remembered: 32 bytes each, and what a dictionary takes


def is_cached(block: Any) -> bool:
    """Whether nobody holds the block and its content can be found by its hash."""
    return block.ref_cnt == 0 and not block.is_null and block.block_hash is not None


def flat(blocks: Iterable[Any]) -> list[Any]:
    """The blocks of a list, or of a list per group of layers as older versions pass them."""
    found: list[Any] = []
    for block in blocks:
        if isinstance(block, Sequence):
            found.extend(block)
        else:
            found.append(block)
    return found


class PoolLedger:
    """What happened in one ``BlockPool`` since it was first seen; counts grow."""

    def __init__(self, pool: Any, epoch: int) -> None:
        self._pool = weakref.ref(pool)
        self.size = len(pool.blocks)
        self.epoch = epoch
        self.allocations = self.evictions = self.dropped = self.touches = 0
        self.cached = self.audit()
        self.drift = 0  # blocks by which counting anew disagreed
        # When each block was handed out, and when it was last held; -1 where that was not seen.
        self._born = array("q", [-1]) * self.size
        self._held = array("q", [-1]) * self.size
        self._handing_ns: int | None = None
        self.times = EvictionTimes()
        self.evicted_hashes: OrderedDict[bytes, None] = OrderedDict()
        self.hot = HotBlocks(self.size)

    @property
    def pool(self) -> Any:
        """The pool itself; the ledger does not keep it alive."""
        return self._pool()

    def audit(self) -> int:
        """Cached blocks, counted block by block."""
        return sum(map(is_cached, self.pool.blocks))

    def resume(self, epoch: int) -> None:
        """Nothing was seen for a while: what is cached is counted anew."""
        self.epoch = epoch
        self.cached = self.audit()
        self._born = array("q", [-1]) * self.size
        self._held = array("q", [-1]) * self.size
        self.hot.forget()

    @property
    def free(self) -> int:
        """Blocks without content that nobody holds."""
        return int(self.pool.free_block_queue.num_free_blocks) - self.cached

    # -- what the pool does ----------------------------------------------------------------------------

    def handing_out(self, number: int) -> None:
        """So many blocks are about to be taken from the queue; those that are cached lose their content."""
        self._handing_ns = time.monotonic_ns()
        if self.hot.active:
            self.hot.handing_out(self.pool, number, self._handing_ns)

    def handed_out(self, blocks: Sequence[Any] | None) -> None:
        """These blocks were taken, or none because the call failed."""
        now, self._handing_ns = self._handing_ns, None
        if blocks and now is not None:
            self.allocations += len(blocks)
            born = self._born
            for block in blocks:
                born[block.block_id] = now

    def forgetting(self, block: Any) -> tuple[bool, Any]:
        """A block may lose its content: whether it is cached, and its hash."""
        return is_cached(block), block.block_hash

    def forgot(self, block: Any, before: tuple[bool, Any]) -> None:
        """A block lost its content."""
        was_cached, key = before
        self.cached -= was_cached
        if self._handing_ns is None:
            self.dropped += 1
            return
        self.evictions += 1
        number = block.block_id
        age_ns, idle_ns = (None if since < 0 else self._handing_ns - since
                           for since in (self._born[number], self._held[number]))
        self.times.add(age_ns, idle_ns)
        if isinstance(key, bytes):
            self.evicted_hashes[key] = None
            if len(self.evicted_hashes) > MOST_HASHES:
                self.evicted_hashes.popitem(last=False)

    def touching(self, blocks: Sequence[Any]) -> None:
        """Blocks are about to be held by one more request, which found them by their content."""
        self.hot.touching(blocks, time.monotonic_ns())
        for block in blocks:
            if not block.is_null:
                self.touches += 1
        self.cached -= len({block.block_id for block in blocks if is_cached(block)})

    def freed(self, blocks: Iterable[Any]) -> None:
        """Requests gave these blocks back; some may still be held by others."""
        now, pool, held = time.monotonic_ns(), self.pool, self._held  # a call may name blocks of other pools
        for number, block in {block.block_id: block for block in blocks
                              if getattr(block, "pool", None) in (None, pool)}.items():
            held[number] = now
            self.cached += is_cached(block)

    def changed(self, blocks: Sequence[Any], cached_before: int) -> None:
        """Content moved between these blocks."""
        self.cached += sum(map(is_cached, blocks)) - cached_before

    def reset(self) -> None:
        """The prefix cache was emptied: what had been evicted before would be gone now as well."""
        self.dropped += self.cached
        self.cached = 0
        self.evicted_hashes.clear()
