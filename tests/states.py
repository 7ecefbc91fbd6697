"""Allocator states written down by hand."""

from __future__ import annotations

from kvobs.allocator.state import Block, Segment

KIB = 1024


def segment(address: int, *parts: tuple[int, int, int], stream: int = 0, pool: int = 0, small: bool = False,
            expandable: bool = False, size: int | None = None) -> Segment:
    """A segment of blocks (size, requested, state) in order; ``size`` contradicts their sum where it is given."""
    blocks, at = [], address
    for part, requested, state in parts:
        blocks.append(Block(at, part, requested, state))
        at += part
    return Segment(address, at - address if size is None else size, stream, pool, small, expandable, tuple(blocks))
