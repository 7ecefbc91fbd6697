"""Where the reserved bytes of a state are: what serves the program, and what does not, by cause.

Every reserved byte is in exactly one class, so the classes sum to the reserved bytes of each group and of the whole:

=============  =======================================================================================================
class          bytes
=============  =======================================================================================================
allocated      requested by the program, of ALLOCATED blocks
pending        requested by the program, of PENDING blocks: freed, but a stream may still use them
rounding       block size minus requested bytes, of ALLOCATED and PENDING blocks
other_pools    INACTIVE in private pools (CUDA graphs, MemPool), which serve only requests of that pool
cached         INACTIVE in the default pool, and the allocator's release order can return it: wholly inactive segments;
               of expandable segments the whole pages inside a free block
gaps           INACTIVE in the default pool, and a block that is in use keeps its segment (or page) from being returned
unexplained    in a segment, but in none of its blocks: the file contradicts itself (negative: blocks claim more)
=============  =======================================================================================================

What can be returned is decided by ``release_cached_blocks`` and ``unmap_block`` of PyTorch's CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

from kvobs.allocator.settings import Settings
from kvobs.allocator.state import ALLOCATED, DEFAULT_POOL, INACTIVE, Segment, State


class Group(NamedTuple):
    """Where a free block can serve: requests of this stream and pool, small ones (at most 1 MiB) or large ones."""

    stream: int
    pool: int
    small: bool


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes by class; ``reserved`` is the sum of the others."""

    reserved_bytes: int = 0
    allocated_bytes: int = 0
    rounding_bytes: int = 0
    gaps_bytes: int = 0
    cached_bytes: int = 0
    other_pools_bytes: int = 0
    pending_bytes: int = 0
    unexplained_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Waste:
    """The parts of a whole state, and of each group, the groups with most reserved bytes first."""

    total: Parts
    groups: dict[Group, Parts]


def waste(state: State, settings: Settings) -> Waste:
    """Class every reserved byte of a state."""
    found: dict[tuple[int, int, bool], list[int]] = {}
    for segment in state:
        _, size, stream, pool, small, expandable, blocks, _ = segment
        requested = pending = busy = inactive = 0
        for _, block_size, block_requested, kind, _ in blocks:
            if kind == INACTIVE:
                inactive += block_size
                continue
            busy += block_size
            if block_requested > block_size:
                block_requested = block_size
            if kind == ALLOCATED:
                requested += block_requested
            else:
                pending += block_requested
        sums = found.get((stream, pool, small))
        if sums is None:
            sums = found[stream, pool, small] = [0] * 8
        sums[0] += size
        sums[1] += requested
        sums[2] += busy - requested - pending
        if inactive:
            if pool != DEFAULT_POOL:
                sums[5] += inactive
            else:
                returned = whole_pages(segment, settings.page_size(small)) if expandable else 0 if busy else inactive
                sums[3] += inactive - returned
                sums[4] += returned
        sums[6] += pending
        sums[7] += size - busy - inactive
    groups = {Group(*key): Parts(*sums) for key, sums in sorted(found.items(), key=lambda entry: -entry[1][0])}
    return Waste(Parts(*(sum(column) for column in zip(*map(astuple, groups.values()), strict=True))), groups)


def whole_pages(segment: Segment, page: int) -> int:
    """The bytes of an expandable segment's mapped range that are whole pages inside one free block.

    A mapped range begins at a page. Its pages are ``page`` bytes.
    """
    start, found = segment.address, 0
    for address, size, _, kind, _ in segment.blocks:
        if kind == INACTIVE and size >= page:
            first = -(-(address - start) // page)
            found += max((address + size - start) // page - first, 0)
    return found * page
