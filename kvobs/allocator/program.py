"""A list of allocator operations, and what running it gave. The same for the Python twin and the C++ core."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvobs.allocator.settings import Settings
from kvobs.allocator.state import State

(ALLOC, FREE, RECORD_STREAM, ADVANCE, EMPTY_CACHE, RELEASE_POOL, SET) = range(7)


@dataclass(slots=True)
class Program:
    """Operations in order; columns of equal length.

    ``op``: ALLOC, FREE, RECORD_STREAM, ADVANCE (the device has done everything that was queued on a stream),
    EMPTY_CACHE, RELEASE_POOL or SET. ``handle``: names an allocation from its ALLOC to its FREE (0, 1, 2 … each
    allocated once); for SET an index into ``settings``. ``size``: requested bytes of an ALLOC. ``stream``: of ALLOC,
    RECORD_STREAM and ADVANCE. ``pool``: of ALLOC and RELEASE_POOL; 0 is the default pool.
    """

    op: array[int] = field(default_factory=lambda: array("B"))
    handle: array[int] = field(default_factory=lambda: array("q"))
    size: array[int] = field(default_factory=lambda: array("q"))
    stream: array[int] = field(default_factory=lambda: array("q"))
    pool: array[int] = field(default_factory=lambda: array("i"))
    settings: list[Settings] = field(default_factory=list)

    def add(self, op: int, handle: int = 0, size: int = 0, stream: int = 0, pool: int = 0) -> None:
        """Append one operation."""
        self.op.append(op)
        self.handle.append(handle)
        self.size.append(size)
        self.stream.append(stream)
        self.pool.append(pool)

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals of an allocator, bytes and counts, under the names of ``torch.cuda.memory_stats`` where it has them.

    ``active`` is allocated plus pending frees. ``retries`` counts device allocations that failed until the cache was
    released; ``syncs`` how often the device had to be waited for.
    """

    reserved: int = 0
    allocated: int = 0
    active: int = 0
    requested: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    peak_active: int = 0
    device_allocs: int = 0
    device_frees: int = 0
    retries: int = 0
    ooms: int = 0
    syncs: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program led to. ``address``, ``reserved``, ``allocated`` have one entry per operation: the address an
    ALLOC got (0: out of memory, or no ALLOC), and the bytes reserved and allocated after the operation. ``ooms`` lists
    the operations that failed; a later operation on their handle does nothing. ``engine`` is "C++" or "Python".
    """

    address: array[int]
    reserved: array[int]
    allocated: array[int]
    ooms: tuple[int, ...]
    stats: Stats
    state: State
    engine: str
