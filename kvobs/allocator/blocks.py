"""The twin's building blocks: blocks in a chain, and the ordered free lists of a pool."""

from __future__ import annotations

from bisect import bisect_left, insort


class Range:
    """An expandable segment: a reserved range of addresses of which whole pages are mapped."""

    __slots__ = ("address", "page", "size")

    def __init__(self, address: int, size: int, page: int) -> None:
        self.address, self.size, self.page = address, size, page


class Block:
    """A part of a segment: a link of the chain that fills it, in order of address."""

    __slots__ = ("address", "allocated", "born", "events", "mapped", "next", "pool", "prev", "range", "requested",
                 "size", "stream", "uses")

    def __init__(self, pool: Pool, stream: int, address: int, size: int, segment: Range | None = None) -> None:
        self.pool, self.stream, self.address, self.size, self.range = pool, stream, address, size, segment
        self.requested = 0
        self.allocated = False
        self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.events = 0  # what must come before it is free: the work of so many streams, or a deferral's completion
        self.uses: set[int] | None = None  # while allocated, streams that were told to use it besides its own
        self.born = 0  # the pool's look-ups when it became free: its age for garbage collection

    @property
    def busy(self) -> bool:
        """Allocated, or freed while a stream may still use it."""
        return self.allocated or self.events > 0

    @property
    def split(self) -> bool:
        """Whether it is less than its whole segment."""
        return self.prev is not None or self.next is not None

    @property
    def growth(self) -> int:
        """The bytes it could reach: its own and those of unmapped addresses behind it."""
        return self.size + (self.next.size if self.next is not None and not self.next.mapped else 0)

    def insert_before(self, after: Block) -> None:
        """Become the link in front of ``after``."""
        self.prev, self.next = after.prev, after
        if after.prev is not None:
            after.prev.next = self
        after.prev = self

    def insert_after(self, before: Block) -> None:
        """Become the link behind ``before``."""
        self.prev, self.next = before, before.next
        if before.next is not None:
            before.next.prev = self
        before.next = self


class Pool:
    """Free blocks of one kind: the small or the large ones of the default pool or of a private one."""

    __slots__ = ("by_address", "free", "identity", "lookups", "small", "unmapped")

    def __init__(self, identity: int, small: bool) -> None:
        self.identity, self.small = identity, small
        self.free: list[tuple[int, int, int]] = []  # (stream, size, address), in order
        self.by_address: dict[int, Block] = {}
        self.unmapped: list[tuple[int, int, Block]] = []  # (stream, address, block), in order
        self.lookups = 0

    def add(self, block: Block) -> None:
        """Put a free block into the list."""
        block.born = self.lookups
        insort(self.free, (block.stream, block.size, block.address))
        self.by_address[block.address] = block

    def remove(self, block: Block) -> None:
        """Take a block out of the list."""
        del self.free[bisect_left(self.free, (block.stream, block.size, block.address))]
        del self.by_address[block.address]

    def at(self, index: int) -> Block:
        """The free block at a place of the list."""
        return self.by_address[self.free[index][2]]

    def add_unmapped(self, block: Block) -> None:
        """Put a range without memory into the list of those."""
        insort(self.unmapped, (block.stream, block.address, block), key=_place)

    def remove_unmapped(self, block: Block) -> None:
        """Take it out again."""
        del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address), key=_place)]


def _place(entry: tuple[int, int, Block]) -> tuple[int, int]:
    return entry[:2]
