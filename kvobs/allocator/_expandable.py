"""Expandable segments: reserved address ranges whose pages are mapped and unmapped as needed."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from kvobs.allocator.blocks import Block, Pool, Range

if TYPE_CHECKING:
    from kvobs.allocator.device import Device
    from kvobs.allocator.settings import Settings

UNLIMITED_RANGE = 1 << 40  # bytes reserved on a device without limit


class Expandable:
    """The part of the twin that grows and shrinks segments in place."""

    settings: Settings
    device: Device

    def _expand(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A free block of at least ``size`` bytes at the lowest address where one can be made; None: out of memory.

        Pages that were mapped before the device gave out stay mapped.
        """
        block = self._room(pool, size, stream)
        if not block.mapped and not self._map_block(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            if following is None:  # larger than all addresses of a segment
                return None
            if not self._map_block(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _room(self, pool: Pool, size: int, stream: int) -> Block:
        """Where ``size`` bytes can be had by mapping: an unmapped range, or a free block in front of one."""
        index = bisect_left(pool.unmapped, (stream,), key=lambda entry: entry[:1])
        while index < len(pool.unmapped) and pool.unmapped[index][0] == stream:
            block = pool.unmapped[index][2]
            if block.prev is not None and not block.prev.busy:
                block = block.prev
            if _reach(block, size) >= size:
                return block
            index += 1
        page = self.settings.page_size(pool.small)
        space = -(-(UNLIMITED_RANGE if self.device.space is None else self.device.space) // page) * page
        segment = Range(self.device.reserve(space), space, page)
        block = Block(pool, stream, segment.address, space, segment)
        block.mapped = False
        pool.add_unmapped(block)
        return block

    def _map_block(self, block: Block, size: int) -> bool:
        """Put memory behind the first ``size`` bytes (whole pages) of an unmapped range; the block becomes free."""
        segment, pool = block.range, block.pool
        assert segment is not None
        size = -(-size // segment.page) * segment.page
        if not self.device.map(block.address, size):
            return False
        pool.remove_unmapped(block)
        block.mapped = True
        if size < block.size:
            rest = Block(pool, block.stream, block.address + size, block.size - size, segment)
            rest.mapped = False
            rest.insert_after(block)
            pool.add_unmapped(rest)
            block.size = size
        self._merge(block, block.prev)
        self._merge(block, block.next)
        pool.add(block)
        self._grew(size)
        return True

    def _unmap_block(self, block: Block) -> None:
        """Return the whole pages inside a free block; a range without any page is given up."""
        segment, pool = block.range, block.pool
        assert segment is not None
        first = -(-(block.address - segment.address) // segment.page) * segment.page + segment.address
        last = (block.address + block.size - segment.address) // segment.page * segment.page + segment.address
        if first >= last:
            return
        pool.remove(block)
        if first > block.address:
            before = Block(pool, block.stream, block.address, first - block.address, segment)
            before.insert_before(block)
            pool.add(before)
        if last < block.address + block.size:
            after = Block(pool, block.stream, last, block.address + block.size - last, segment)
            after.insert_after(block)
            pool.add(after)
        block.address, block.size, block.mapped = first, last - first, False
        self.device.unmap(first, last - first)
        self._shrank(last - first)
        self._merge(block, block.prev)
        self._merge(block, block.next)
        if block.split:
            pool.add_unmapped(block)

    if TYPE_CHECKING:
        def _merge(self, block: Block, other: Block | None) -> None: ...
        def _grew(self, size: int) -> None: ...
        def _shrank(self, size: int) -> None: ...


def _reach(block: Block | None, size: int) -> int:
    """The bytes from here on that are free or unmapped, counted up to ``size``."""
    found = 0
    while found < size and block is not None and not block.busy:
        found += block.size
        block = block.next
    return found
