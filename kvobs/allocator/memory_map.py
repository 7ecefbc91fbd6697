"""A memory map in few bytes: the state of one device's allocator with the holder of each block, packed and unpacked.

Columns of fixed width in little-endian order, compressed: a block takes 3 to 10 bytes instead of a dictionary. Pure,
and light: an observed process imports it at its start.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, Block, Segment, State

MOST_BLOCKS = 20_000  # of all devices together
MOST_SEGMENTS = 20_000
NOBODY = -1
SEVERAL = ("several", "", None)
_MAGIC = b"kvm1"
_SEGMENT = (("Q", 8), ("Q", 8), ("Q", 8), ("I", 4), ("B", 1), ("I", 4))  # address size stream pool flags blocks
_BLOCK = (("q", 8), ("Q", 8), ("Q", 8), ("B", 1), ("i", 4))  # gap before it, size, requested, state, holder
_SMALL, _EXPANDABLE = 1, 2
HolderName = tuple[str, str, int | None]  # kind, name (a session's or a model's), cache id
KV, WEIGHTS = "kv", "weights"
NO_OTHERS: Mapping[int, HolderName] = MappingProxyType({})


class Held(NamedTuple):
    """Memory whose holder is known: the address of a storage on a device such as ``cuda:0``, and who holds it."""

    address: int
    device: str
    holder: HolderName


class Sums(NamedTuple):
    """Bytes of a state by what its blocks are, and counts; ``reserved`` is the sum of the segments' sizes."""

    reserved: int
    allocated: int
    pending: int
    free: int
    largest_free: int
    requested: int
    segments: int
    blocks: int

    @property
    def active(self) -> int:
        """Allocated, or freed while a stream may still use it: what torch calls active."""
        return self.allocated + self.pending


def sums(state: State) -> Sums:
    """The sums of a state. ``requested`` is over allocated and pending blocks, as torch counts it."""
    by_state = [0, 0, 0]
    largest = requested = count = 0
    for segment in state:
        count += len(segment.blocks)
        for _, size, asked, kind, _ in segment.blocks:
            by_state[kind] += size
            if kind != INACTIVE:
                requested += asked
            elif size > largest:
                largest = size
    return Sums(sum(segment.size for segment in state), by_state[ALLOCATED], by_state[PENDING], by_state[INACTIVE],
                largest, requested, len(state), count)


def with_holders(state: State, held: Iterable[Held], device: str,
                 others: Mapping[int, HolderName] = NO_OTHERS) -> tuple[State, tuple[HolderName, ...]]:
    """The state with ``stack`` of each allocated block pointing into the holders that are returned (-1: not known).

    A holder has a block if one of its storages begins in it; a block with storages of several has ``SEVERAL``. Of
    what nobody holds, ``others`` may know more, by the addresses of blocks.
    """
    places = sorted((one.address, one.holder) for one in held if one.device == device and one.address)
    addresses = [address for address, _ in places]
    numbers: dict[HolderName, int] = {}

    def number(block: Block) -> int:
        first = bisect_left(addresses, block.address)
        end = bisect_left(addresses, block.address + block.size, first)
        if first == end:
            other = others.get(block.address)
            return NOBODY if other is None else numbers.setdefault(other, len(numbers))
        found = {holder for _, holder in places[first:end]}
        return numbers.setdefault(found.pop() if len(found) == 1 else SEVERAL, len(numbers))

    named = tuple(segment._replace(blocks=tuple(
        block._replace(stack=number(block)) if block.state == ALLOCATED else block for block in segment.blocks))
        for segment in state)
    return named, tuple(numbers)


def pack(state: State) -> bytes:
    """The state in bytes; ``unpack`` gives an equal one (less the stacks of segments).

    Raises:
        OverflowError: a number is not one that an allocator can have.
    """
    segments = [(one.address, one.size, one.stream, one.pool, one.small * _SMALL | one.expandable * _EXPANDABLE,
                 len(one.blocks)) for one in state]
    blocks: list[tuple[int, int, int, int, int]] = []
    for segment in state:
        following = segment.address
        for address, size, requested, kind, stack in segment.blocks:
            blocks.append((address - following, size, requested, kind, stack))
            following = address + size
    head = array("I", (len(segments), len(blocks)))
    parts = [_MAGIC, _bytes(head), *_columns(segments, _SEGMENT), *_columns(blocks, _BLOCK)]
    return zlib.compress(b"".join(parts), 1)


def unpack(packed: bytes) -> State:
    """The state that was packed.

    Raises:
        ValueError: these are not the bytes of a map, or of one that is larger than maps are.
    """
    most = 12 + MOST_SEGMENTS * sum(width for _, width in _SEGMENT) + MOST_BLOCKS * sum(width for _, width in _BLOCK)
    try:
        raw = zlib.decompressobj().decompress(packed, most + 1)
    except zlib.error as error:
        raise ValueError(f"These bytes are not a memory map ({error}).") from None
    if raw[:4] != _MAGIC or len(raw) < 12:
        raise ValueError("These bytes are not a memory map.")
    numbers = _array("I", raw[4:12])
    at, columns = 12, []
    for count, layout in zip(numbers, (_SEGMENT, _BLOCK), strict=True):
        for code, width in layout:
            if len(raw) < at + count * width:
                raise ValueError("The memory map is not whole.")
            columns.append(_array(code, raw[at:at + count * width]))
            at += count * width
    if at != len(raw):
        raise ValueError("The memory map is longer than it says.")
    return _state(columns[:6], columns[6:])


def _state(segments: Sequence[Sequence[int]], blocks: Sequence[Sequence[int]]) -> State:
    rows = zip(*blocks, strict=True)
    found = []
    for address, size, stream, pool, flags, count in zip(*segments, strict=True):
        following, made = address, []
        for gap, length, requested, kind, stack in itertools.islice(rows, count):
            if kind > ALLOCATED:
                raise ValueError("The memory map has a block of no known state.")
            made.append(Block(following + gap, length, requested, kind, stack))
            following += gap + length
        if len(made) != count:
            raise ValueError("The memory map has fewer blocks than its segments say.")
        found.append(Segment(address, size, stream, pool, bool(flags & _SMALL), bool(flags & _EXPANDABLE),
                             tuple(made)))
    return tuple(found)


def _columns(rows: Sequence[tuple[int, ...]], layout: Sequence[tuple[str, int]]) -> list[bytes]:
    columns = list(zip(*rows, strict=True)) or [()] * len(layout)
    return [_bytes(array(code, column)) for (code, _), column in zip(layout, columns, strict=True)]


def _bytes(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _array(code: str, raw: bytes) -> array[int]:
    column = array(code)
    column.frombytes(raw)
    if sys.byteorder == "big":
        column.byteswap()
    return column
