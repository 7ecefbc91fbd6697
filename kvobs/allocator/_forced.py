"""Changes that no program makes: loading a state, and putting the twin where a recording says it was."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvobs.allocator._expandable import UNLIMITED_RANGE, Expandable
from kvobs.allocator.blocks import Block, Pool, Range
from kvobs.allocator.settings import SMALL_SIZE
from kvobs.allocator.state import INACTIVE, PENDING, Segment, State


class Forced(Expandable):
    """The part of the twin that is told instead of asked."""

    _active: dict[int, Block]
    _pools: dict[int, tuple[Pool, Pool]]

    def load(self, state: State) -> None:
        """Begin with these segments (of an allocator that has none). Pending blocks wait for ``complete``.

        Where mapped ranges belong to the same expandable segment is not recorded: ranges of one stream and pool with
        nothing of another kind between them are taken for one.

        Raises:
            ValueError: blocks do not fill their segment.
        """
        for segments in _reservations(state):
            self._load_chain(segments)
        self._peak_allocated = self._allocated
        self._peak_active = self._allocated + self._pending
        self._peak_reserved = self._reserved

    def fits(self, size: int, stream: int = 0, pool: int = 0) -> bool:
        """Whether a request would be served from the cache."""
        rounded = self.settings.round_size(size)
        return self._find(self._pool(pool, rounded), rounded, stream) is not None

    def install(self, address: int, size: int, stream: int, pool: int, small: bool) -> None:
        """Add a free segment."""
        home = self._pool(pool, 1 if small else SMALL_SIZE + 1)
        home.add(Block(home, stream, address, size))
        self._reserved += size
        self._peak_reserved = max(self._peak_reserved, self._reserved)

    def remove(self, address: int, size: int) -> bool:
        """Take away a segment that is wholly free; False: there is no such."""
        block = self._free_at(address)
        if block is None or block.address != address or block.size != size or block.split or block.range is not None:
            return False
        block.pool.remove(block)
        self._reserved -= size
        return True

    def install_pages(self, address: int, size: int, stream: int, pool: int, small: bool) -> bool:
        """Map pages of an expandable segment, of a new one if need be; False: they are mapped already."""
        home = self._pool(pool, 1 if small else SMALL_SIZE + 1)
        block = next((found for _, place, found in home.unmapped
                      if found.stream == stream and place <= address and address + size <= place + found.size), None)
        if block is None:
            if any(found.range is not None and found.address < address + size
                   and address < found.address + found.size for found in self._all()):
                return False
            page = self.settings.page_size(small)
            block = Block(home, stream, address, -(-UNLIMITED_RANGE // page) * page, Range(address, 1, page))
            block.mapped = False
            home.add_unmapped(block)
        if address > block.address:
            home.remove_unmapped(block)
            before = Block(home, stream, block.address, address - block.address, block.range)
            before.mapped = False
            before.insert_before(block)
            block.address, block.size = address, block.size - before.size
            home.add_unmapped(before)
            home.add_unmapped(block)
        return self._map_block(block, size)

    def remove_pages(self, address: int, size: int) -> bool:
        """Unmap pages of an expandable segment that lie in a free block; False: they do not."""
        block = self._free_at(address)
        if block is None or block.range is None or block.address + block.size < address + size:
            return False
        pool, rest = block.pool, block.address + block.size - address - size
        pool.remove(block)
        if address > block.address:
            pool.add(self._cut(block, address - block.address))
            pool.remove(block)
        if rest:
            block = self._cut(block, size)
        pool.add(block)
        self._unmap_block(block)
        return not block.mapped

    def place(self, address: int, size: int, stream: int, pool: int) -> bool:
        """Put an allocation at this address; False: that is not within a free block of the stream."""
        block = self._free_at(address)
        rounded = self.settings.round_size(size)
        if block is None or block.stream != stream or block.address + block.size < address + rounded:
            return False
        block.pool.remove(block)
        if address > block.address:
            block.pool.add(self._cut(block, address - block.address))
            block.pool.remove(block)
        self._hand_out(block, size, rounded)
        return True

    def _free_at(self, address: int) -> Block | None:
        """The free block that this address lies in."""
        for pair in self._pools.values():
            for pool in pair:
                found = pool.by_address.get(address)
                if found is not None:
                    return found
        return next((block for pair in self._pools.values() for pool in pair for block in pool.by_address.values()
                     if block.address <= address < block.address + block.size), None)

    def _load_chain(self, segments: list[Segment]) -> None:
        first = segments[0]
        home = self._pool(first.pool, 1 if first.small else SMALL_SIZE + 1)
        page = self.settings.page_size(first.small)
        span = -(-max(UNLIMITED_RANGE, segments[-1].address + segments[-1].size - first.address) // page) * page
        owner = Range(first.address, span, page) if first.expandable else None
        last: Block | None = None
        for segment in segments:
            if sum(block.size for block in segment.blocks) != segment.size:
                raise ValueError(f"the blocks of the segment at {segment.address:#x} do not fill it")
            if last is not None and last.address + last.size < segment.address:
                last = self._load_unmapped(home, last, segment.address)
            for told in segment.blocks:
                block = Block(home, segment.stream, told.address, told.size, owner)
                if last is not None:
                    block.insert_after(last)
                last = block
                if told.state == INACTIVE:
                    home.add(block)
                    continue
                block.requested = told.requested
                self._active[block.address] = block
                self._requested += told.requested
                if told.state == PENDING:
                    block.events = 1
                    self._pending += block.size
                else:
                    block.allocated = True
                    self._allocated += block.size
            self._reserved += segment.size
        if owner is not None and last is not None:
            self._load_unmapped(home, last, first.address + span)

    def _load_unmapped(self, home: Pool, last: Block, until: int) -> Block:
        address = last.address + last.size
        block = Block(home, last.stream, address, until - address, last.range)
        block.mapped = False
        block.insert_after(last)
        home.add_unmapped(block)
        return block

    if TYPE_CHECKING:
        _reserved: int
        _allocated: int
        _pending: int
        _requested: int
        _peak_reserved: int
        _peak_allocated: int
        _peak_active: int
        def _all(self) -> list[Block]: ...
        def _pool(self, pool: int, rounded: int) -> Pool: ...
        def _find(self, pool: Pool, rounded: int, stream: int) -> Block | None: ...
        def _cut(self, block: Block, size: int) -> Block: ...
        def _hand_out(self, block: Block, size: int, rounded: int) -> int: ...


def _reservations(state: State) -> Iterable[list[Segment]]:
    """Segments, those of one expandable segment together."""
    open_chains: dict[tuple[int, int, bool], list[Segment]] = {}
    starts = sorted(segment.address for segment in state)
    for segment in sorted(state, key=lambda one: one.address):
        if not segment.expandable:
            yield [segment]
            continue
        key = segment.stream, segment.pool, segment.small
        chain = open_chains.get(key)
        if chain is None:
            open_chains[key] = [segment]
        elif starts[bisect_right(starts, chain[-1].address)] == segment.address and (
                segment.address - chain[-1].address < UNLIMITED_RANGE):
            chain.append(segment)
        else:
            yield chain
            open_chains[key] = [segment]
    yield from open_chains.values()
