"""Changes that no program makes: loading a state, and putting the twin where a recording says it was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvobs.allocator._expandable import UNLIMITED_RANGE, Expandable
from kvobs.allocator.blocks import Block, Pool, Range
from kvobs.allocator.reservations import Pages, reservations
from kvobs.allocator.settings import SMALL_SIZE
from kvobs.allocator.state import INACTIVE, PENDING, Segment, State

NOWHERE = 1 << 60  # from here on addresses are invented; no device has such


class Forced(Expandable):
    """The part of the twin that is told instead of asked."""

    _active: dict[int, Block]
    _pools: dict[int, tuple[Pool, Pool]]
    _plain: set[int]
    _released: dict[int, None]

    def load(self, state: State, pages: Iterable[Pages] = ()) -> None:
        """Begin with these segments (of an allocator that has none). Pending blocks wait for ``complete``.

        ``pages`` are known to lie in expandable segments too, without memory now.

        Raises:
            ValueError: blocks do not fill their segment.
        """
        for base, segments in reservations(state, pages, self.settings.large_segment_size):
            self._load_chain(base, segments)
        self._peak_allocated = self.allocated
        self._peak_active = self.allocated + self.pending
        self._peak_reserved = self.reserved

    def fits(self, size: int, stream: int = 0, pool: int = 0) -> bool:
        """Whether a request would be served from the cache."""
        rounded = self.settings.round_size(size)
        return self._find(self._pool(pool, rounded), rounded, stream) is not None

    def finish(self, address: int) -> None:
        """Free a block whether it was deferred before or not (its deferral may not have been recorded)."""
        if self._active[address].allocated:
            self.defer(address)
        self.complete(address)

    def release_for(self, size: int, stream: int, pool: int) -> None:
        """Return the oversize blocks that a request would have returned first (only with a max_split_size)."""
        rounded = self.settings.round_size(size)
        self._release_available(self._pool(pool, rounded), rounded, stream)

    def alloc_from_device(self, size: int, stream: int = 0, pool: int = 0) -> int | None:
        """Serve a request with memory of the device although the cache could: as after a release, which frees what
        had been pending. None: the device has nothing.
        """
        rounded = self.settings.round_size(size)
        block = self._from_device(self._pool(pool, rounded), rounded, stream)
        return None if block is None else self._hand_out(block, size, rounded)

    def settle(self, address: int, stream: int, pool: int, small: bool) -> None:
        """Move a range that was reserved where no recording told (and never mapped) to where it must have been."""
        if pool not in self._pools:
            return
        home = self._pools[pool][not small]
        for _, _, block in home.unmapped:
            if block.stream == stream and block.address >= NOWHERE and not block.split:
                assert block.range is not None
                home.remove_unmapped(block)
                block.address = block.range.address = address
                home.add_unmapped(block)
                return

    def empty_pool(self, pool: int) -> None:
        """Return what is wholly free of one private pool that nothing uses any more."""
        for home in self._pools[pool] if pool in self._released else ():
            self._release_unsplit(home)

    def own_allocator(self, pool: int, has: bool) -> None:
        """Say whether a private pool takes memory from an allocator of its own, which knows no pages."""
        (self._plain.add if has else self._plain.discard)(pool)

    def _reserved_at(self, address: int) -> bool:
        """Whether an expandable segment covers an address."""
        blocks = self._all() + [block for pair in self._pools.values() for pool in pair
                                for _, _, block in pool.unmapped]
        return any(block.range is not None and block.range.address <= address < block.range.address + block.range.size
                   for block in blocks)

    def install(self, address: int, size: int, stream: int, pool: int, small: bool) -> None:
        """Add a free segment."""
        home = self._pool(pool, 1 if small else SMALL_SIZE + 1)
        home.add(Block(home, stream, address, size))
        self.reserved += size
        self._peak_reserved = max(self._peak_reserved, self.reserved)

    def remove(self, address: int, size: int) -> bool:
        """Take away a segment that is wholly free; False: there is no such."""
        block = self._free_at(address)
        if block is None or block.address != address or block.size != size or block.split or block.range is not None:
            return False
        block.pool.remove(block)
        self.reserved -= size
        return True

    def install_pages(self, address: int, size: int, stream: int, pool: int, small: bool) -> bool:
        """Map pages of an expandable segment, of a new one if need be; False: they are mapped already."""
        home = self._pool(pool, 1 if small else SMALL_SIZE + 1)
        block = next((found for _, place, found in home.unmapped
                      if found.stream == stream and place <= address and address + size <= place + found.size), None)
        if block is None:
            if self._reserved_at(address):
                return False
            page = self.settings.page_size(small)
            span = -(-UNLIMITED_RANGE // page) * page
            block = Block(home, stream, address, span, Range(address, span, page))
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

    def _load_chain(self, base: int, segments: list[Segment]) -> None:
        first = segments[0]
        home = self._pool(first.pool, 1 if first.small else SMALL_SIZE + 1)
        page = self.settings.page_size(first.small)
        span = -(-max(UNLIMITED_RANGE, segments[-1].address + segments[-1].size - base) // page) * page
        owner = Range(base, span, page) if first.expandable else None
        last: Block | None = None
        if base < first.address:
            last = Block(home, first.stream, base, first.address - base, owner)
            last.mapped = False
            home.add_unmapped(last)
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
                    self.pending += block.size
                else:
                    block.allocated = True
                    self.allocated += block.size
            self.reserved += segment.size
        if owner is not None and last is not None:
            self._load_unmapped(home, last, base + span)

    def _load_unmapped(self, home: Pool, last: Block, until: int) -> Block:
        address = last.address + last.size
        block = Block(home, last.stream, address, until - address, last.range)
        block.mapped = False
        block.insert_after(last)
        home.add_unmapped(block)
        return block

    if TYPE_CHECKING:
        reserved: int
        allocated: int
        pending: int
        _requested: int
        _peak_reserved: int
        _peak_allocated: int
        _peak_active: int
        def defer(self, address: int) -> None: ...
        def complete(self, address: int) -> None: ...
        def _all(self) -> list[Block]: ...
        def _pool(self, pool: int, rounded: int) -> Pool: ...
        def _from_device(self, pool: Pool, rounded: int, stream: int) -> Block | None: ...
        def _release_available(self, pool: Pool, rounded: int, stream: int) -> bool: ...
        def _release_unsplit(self, pool: Pool) -> None: ...
        def _find(self, pool: Pool, rounded: int, stream: int) -> Block | None: ...
        def _cut(self, block: Block, size: int) -> Block: ...
        def _hand_out(self, block: Block, size: int, rounded: int) -> int: ...
