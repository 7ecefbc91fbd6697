"""A pool of KV blocks with a prefix cache. Every block is used, cached or free.

Blocks of a request are its own, or belong to a chunk of a prefix that several requests may hold. A chunk that nobody
holds is cached until its blocks are needed, the one that was let go longest ago first; it is evicted as a whole, where
vLLM evicts block by block. While ``offloading``, what is evicted goes to the host's memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Pool:
    """Counts of blocks, and which chunks there are."""

    def __init__(self, size: int, chunk_blocks: int, host_blocks: int) -> None:
        self.size, self.free, self.chunk_blocks = size, size, chunk_blocks
        self.offloading = False
        self.evictions = self.dropped = self.offloaded = self.fetched = 0  # blocks
        self._holders: dict[int, int] = {}  # chunks on the device, and how many hold them
        self._idle: OrderedDict[int, int] = OrderedDict()  # of these, the ones that nobody holds, and since when
        self._host: OrderedDict[int, None] = OrderedDict()
        self._host_chunks = host_blocks // chunk_blocks

    @property
    def cached(self) -> int:
        """Blocks of chunks that nobody holds."""
        return len(self._idle) * self.chunk_blocks

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self.size - self.free - self.cached

    def take(self, blocks: int) -> bool:
        """Free blocks for a request, evicting what nobody holds; False, and nothing is changed, if there are not
        enough.
        """
        if blocks > self.free + self.cached:
            return False
        while self.free < blocks:
            self._evict()
        self.free -= blocks
        return True

    def give(self, blocks: int) -> None:
        """A request's own blocks back."""
        self.free += blocks

    # -- chunks ----------------------------------------------------------------------------------------

    def found(self, chunks: Sequence[int], most: int) -> tuple[int, int, int]:
        """How many of the first ``most`` chunks are there in a row; of these, how many nobody holds, and how many are
        on the host.
        """
        idle = host = 0
        for index, chunk in enumerate(chunks[:most]):
            if chunk in self._holders:
                idle += chunk in self._idle
            elif chunk in self._host:
                host += 1
            else:
                return index, idle, host
        return min(most, len(chunks)), idle, host

    def hold(self, chunks: Sequence[int]) -> int:
        """Hold chunks that were picked, or are on the host and their blocks taken; how many came from there."""
        fetched = 0
        for chunk in chunks:
            if chunk in self._holders:
                self._holders[chunk] += 1
            else:  # it stays on the host too, as long as that has room
                self._holders[chunk] = 1
                fetched += 1
        self.fetched += fetched * self.chunk_blocks
        return fetched

    def pick(self, chunks: Sequence[int]) -> None:
        """Keep chunks on the device from being evicted until they are held."""
        for chunk in chunks:
            self._idle.pop(chunk, None)

    def register(self, chunk: int) -> bool:
        """Make a chunk of blocks that a request has computed; False if another has made the same before."""
        if chunk in self._holders:
            return False
        self._holders[chunk] = 1
        return True

    def let_go(self, chunks: Sequence[int], now_ns: int) -> None:
        """Hold them no more, the last one first: the beginning of a prefix is evicted last."""
        for chunk in reversed(chunks):
            self._holders[chunk] -= 1
            if not self._holders[chunk]:
                self._idle[chunk] = now_ns

    # -- what the breaker's levels do ------------------------------------------------------------------

    def forget(self) -> None:
        """Level 1 in an idle engine: drop what nobody holds."""
        self.dropped += self.cached
        self.free += self.cached
        for chunk in self._idle:
            del self._holders[chunk]
        self._idle.clear()

    def offload(self, before_ns: int) -> None:
        """Level 2: move what nobody has held since ``before_ns`` to the host, if that has room at all."""
        while self._host_chunks and self._idle and next(iter(self._idle.values())) <= before_ns:
            self._evict()

    def _evict(self) -> None:
        chunk, _ = self._idle.popitem(last=False)
        del self._holders[chunk]
        self.free += self.chunk_blocks
        if not self.offloading:
            self.evictions += self.chunk_blocks
            return
        self.offloaded += self.chunk_blocks
        self._host[chunk] = None
        self._host.move_to_end(chunk)
        while len(self._host) > self._host_chunks:
            self._host.popitem(last=False)
