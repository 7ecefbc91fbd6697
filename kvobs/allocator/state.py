"""One moment of an allocator: its segments and their blocks. What verdicts, waste and pictures are made from."""

from __future__ import annotations

from typing import NamedTuple

INACTIVE, PENDING, ALLOCATED = 0, 1, 2
DEFAULT_POOL = 0


class Block(NamedTuple):
    """A part of a segment. Sizes in bytes.

    ``requested`` is what the program asked for (``size`` where the file does not say, and meaningless when inactive).
    ``state`` is INACTIVE (free), PENDING (freed, but a stream may still use it) or ALLOCATED. ``stack`` is an index
    into ``Stacks.stacks`` of the recording, -1 without one.
    """

    address: int
    size: int
    requested: int
    state: int
    stack: int = -1


class Segment(NamedTuple):
    """A contiguous range of device memory: one cudaMalloc, or one mapped range of an expandable segment.

    Its blocks are in order of address and fill it. A free block serves only requests of the same ``stream``, ``pool``
    and ``small``. ``pool`` is an index: 0 is the default pool, others are private (CUDA graphs, MemPool).
    """

    address: int
    size: int
    stream: int
    pool: int
    small: bool
    expandable: bool
    blocks: tuple[Block, ...]
    stack: int = -1


State = tuple[Segment, ...]  # in order of address
