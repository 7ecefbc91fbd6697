"""What keeps memory from being returned: the blocks in use that pin segments with free bytes in them."""

from __future__ import annotations

from typing import NamedTuple

from kvobs.allocator.settings import Settings
from kvobs.allocator.state import INACTIVE, Block, Segment, State
from kvobs.allocator.waste import whole_pages


class Pin(NamedTuple):
    """A segment (for an expandable one: a mapped range) that cannot be returned although parts of it are free.

    ``held_back_bytes`` are the free bytes that its blocks in use hold back; of an expandable range only those in pages
    that are partly in use. ``blocks`` counts the blocks in use that do so, and ``block`` is the smallest of them (of
    equal ones the first): where ``blocks`` is 1, freeing it alone releases everything.
    """

    address: int
    size_bytes: int
    stream: int
    pool: int
    held_back_bytes: int
    blocks: int
    block: Block


def pins(state: State, settings: Settings) -> list[Pin]:
    """The pinned segments of a state, most bytes held back first.

    Segments without any block in use are not among them: those of private pools are kept by their pool.
    """
    found = []
    for segment in state:
        free = sum(block.size for block in segment.blocks if block.state == INACTIVE)
        if not free or len(segment.blocks) == 1:
            continue
        if segment.expandable:
            page = settings.page_size(segment.small)
            free -= whole_pages(segment, page)
            pinning = _in_partial_pages(segment, page)
        else:
            pinning = [block for block in segment.blocks if block.state != INACTIVE]
        if free and pinning:
            found.append(Pin(segment.address, segment.size, segment.stream, segment.pool, free, len(pinning),
                             min(pinning, key=lambda block: (block.size, block.address))))
    return sorted(found, key=lambda pin: (-pin.held_back_bytes, pin.address))


def _in_partial_pages(segment: Segment, page: int) -> list[Block]:
    """The blocks in use that share a page with free bytes."""
    shared: set[int] = set()
    for block in segment.blocks:
        if block.state == INACTIVE:
            start = block.address - segment.address
            shared.update((start // page, (start + block.size - 1) // page))
    found = []
    for block in segment.blocks:
        if block.state != INACTIVE:
            start = block.address - segment.address
            # In between, the block fills its pages.
            if {start // page, (start + block.size - 1) // page} & shared:
                found.append(block)
    return found
