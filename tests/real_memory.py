"""The memory that the second account of PyTorch's allocator has, and the history that it writes down."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvobs.allocator import recording as rec
from kvobs.allocator.recording import DeviceRecording, Events
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, Block, Segment, State

KIB, MIB = 1 << 10, 1 << 20
Home = tuple[int, bool]  # pool, whether of small blocks


@dataclass(eq=False)
class Piece:
    """A block of the allocator."""

    address: int
    size: int
    stream: int
    home: Home
    segment: tuple[int, int, int] | None = None  # an expandable one: base, size, page
    requested: int = 0
    allocated: bool = False
    mapped: bool = True
    waits: int = 0
    uses: set[int] = field(default_factory=set)
    born: int = 0
    prev: Piece | None = None
    next: Piece | None = None

    @property
    def free(self) -> bool:
        return not self.allocated and not self.waits and not self.uses

    @property
    def split(self) -> bool:
        return self.prev is not None or self.next is not None


class Memory:
    """Pieces, where they lie, and what has been written: at most ``ring`` events, pools told or not, none ``skipped``.

    ``capacity`` and ``space``, the addresses of an expandable segment, are in bytes.
    """

    def __init__(self, capacity: int, space: int | None, ring: int | None, told_pools: bool,
                 skipped: tuple[int, ...]) -> None:
        self.capacity = capacity
        self.space = capacity + capacity // 8 if space is None else space
        self.told_pools, self.skipped = told_pools, skipped
        self.trace: deque[tuple[int, int, int, int, int]] = deque(maxlen=ring)
        self.cached: dict[Home, list[Piece]] = {}
        self.unmapped: dict[Home, list[Piece]] = {}
        self.lookups: dict[Home, int] = {}
        self.active: list[Piece] = []
        self.reserved = 0
        self.taken: dict[int, int] = {}  # addresses that the device has given out

    def recording(self) -> DeviceRecording:
        """What a snapshot says; its own entry comes after the trace was read."""
        made = Events()
        for time, (action, address, size, stream, pool) in enumerate(self.trace, 1):
            columns = (action, address, size, stream, time, -1, pool if self.told_pools else rec.UNKNOWN)
            for name, value in zip(Events.__slots__, columns, strict=True):
                getattr(made, name).append(value)
        return DeviceRecording(0, self.state(), made)

    def state(self) -> State:
        heads = [piece for piece in self._pieces() if piece.mapped and (piece.prev is None or not piece.prev.mapped)]
        return tuple(_told(head) for head in sorted(heads, key=lambda one: one.address))

    def _pieces(self) -> list[Piece]:
        return [one for pieces in self.cached.values() for one in pieces] + self.active

    def _log(self, action: int, address: int, size: int, stream: int, home: Home) -> None:
        if action not in self.skipped:
            self.trace.append((action, address, size, stream, home[0]))

    def _put(self, piece: Piece) -> None:
        piece.born = self.lookups.get(piece.home, 0)
        self.cached.setdefault(piece.home, []).append(piece)

    def _merge(self, piece: Piece, other: Piece | None) -> None:
        if other is None or not other.free or other.mapped != piece.mapped:
            return
        (self.cached if other.mapped else self.unmapped)[other.home].remove(other)
        if other is piece.prev:
            piece.address, piece.prev = other.address, other.prev
            if piece.prev is not None:
                piece.prev.next = piece
        else:
            piece.next = other.next
            if piece.next is not None:
                piece.next.prev = piece
        piece.size += other.size

    def _place(self, size: int) -> int:
        """The lowest free addresses: the driver likes to give back what it got."""
        at = 0x7F0000000000
        for start, length in sorted(self.taken.items()):
            if start - at >= size:
                break
            at = max(at, -(-(start + length) // (2 * MIB)) * 2 * MIB)
        self.taken[at] = size
        return at

    def _map(self, piece: Piece, size: int) -> bool:
        assert piece.segment is not None
        page = piece.segment[2]
        size = -(-size // page) * page
        if self.reserved + size > self.capacity:
            return False
        self.unmapped[piece.home].remove(piece)
        piece.mapped = True
        if size < piece.size:
            rest = Piece(piece.address + size, piece.size - size, piece.stream, piece.home, piece.segment, mapped=False)
            between(piece, rest, piece.next)
            self.unmapped[piece.home].append(rest)
            piece.size = size
        start = piece.address
        self._merge(piece, piece.prev)
        self._merge(piece, piece.next)
        self._put(piece)
        self.reserved += size
        self._log(rec.SEGMENT_MAP, start, size, piece.stream, piece.home)
        return True

    def _release(self, piece: Piece) -> None:
        self._log(rec.SEGMENT_FREE, piece.address, piece.size, piece.stream, piece.home)
        del self.taken[piece.address]
        self.reserved -= piece.size
        self.cached[piece.home].remove(piece)

    def _unmap(self, piece: Piece) -> None:
        assert piece.segment is not None
        base, size, page = piece.segment
        first = base + -(-(piece.address - base) // page) * page
        last = base + (piece.address + piece.size - base) // page * page
        if first >= last:
            return
        self.cached[piece.home].remove(piece)
        for start, end in ((piece.address, first), (last, piece.address + piece.size)):
            if start < end:
                rest = Piece(start, end - start, piece.stream, piece.home, piece.segment)
                between(*((piece.prev, rest, piece) if start < first else (piece, rest, piece.next)))
                self._put(rest)
        piece.address, piece.size, piece.mapped = first, last - first, False
        self._merge(piece, piece.prev)
        self._merge(piece, piece.next)
        self.unmapped[piece.home].append(piece)
        self.reserved -= last - first
        self._log(rec.SEGMENT_UNMAP, first, last - first, piece.stream, piece.home)
        if not piece.split:
            assert piece.size == size
            self.unmapped[piece.home].remove(piece)
            del self.taken[base]


def between(before: Piece | None, piece: Piece, after: Piece | None) -> None:
    piece.prev, piece.next = before, after
    if before is not None:
        before.next = piece
    if after is not None:
        after.prev = piece


def chain(head: Piece) -> list[Piece]:
    found, at = [], head
    while at is not None:
        found.append(at)
        at = at.next  # type: ignore[assignment]
    return found


def reach(piece: Piece) -> int:
    return piece.size + (piece.next.size if piece.next is not None and not piece.next.mapped else 0)


def _told(head: Piece) -> Segment:
    blocks = []
    for one in chain(head):
        if not one.mapped:
            break
        state = ALLOCATED if one.allocated else INACTIVE if one.free else PENDING
        blocks.append(Block(one.address, one.size, one.requested if state else 0, state))
    return Segment(head.address, sum(one.size for one in blocks), head.stream, *head.home, head.segment is not None,
                   tuple(blocks))
