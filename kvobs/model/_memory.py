"""What memory allocators did, and what was known when memory ran out."""

from __future__ import annotations

import msgspec

from kvobs.model._cache import Origin


class Allocation(msgspec.Struct, frozen=True, gc=False):
    """One request to a memory allocator and how long it took."""

    t_ns: int
    device: str
    bytes: int
    latency_ns: int


class LatencyCounts(msgspec.Struct, frozen=True, gc=False):
    """A reading of a native counter of an allocator's calls; all but the setting ``sampled_every`` grows.

    ``allocations`` are those whose ``frees`` are counted too, so that the difference is what is alive, in number and
    in bytes; ``untracked`` are those whose free nobody sees. ``buckets`` counts the ``timed`` ones (one of
    ``sampled_every``, on average): bucket i those of at most the catalog's ``LATENCY_BOUNDS_NS[i]`` and above the bound
    before, one more bucket those above every bound.
    """

    allocations: int
    frees: int
    allocated_bytes: int
    freed_bytes: int
    buckets: tuple[int, ...]
    sum_ns: int
    sampled_every: int
    untracked: int = 0

    @property
    def timed(self) -> int:
        """How many were timed."""
        return sum(self.buckets)


class AllocationLatencies(msgspec.Struct, frozen=True, gc=False):
    """How long the requests that an allocator timed took since the last such event of its device, counted natively.

    ``counts`` has one number per bucket of the catalog's ``kvobs.alloc.latency`` (the last above every bound).
    """

    t_ns: int
    device: str
    counts: tuple[int, ...]
    sum_ns: int


class AllocatorState(msgspec.Struct, frozen=True, gc=False):
    """What an allocator held at one instant; ``largest_free_bytes`` is absent where it cannot be known."""

    t_ns: int
    device: str
    reserved_bytes: int
    allocated_bytes: int
    largest_free_bytes: int | None


class MemoryMap(msgspec.Struct, frozen=True, gc=False):
    """Segments and blocks of one device's allocator, as a snapshot listed them while somebody looked.

    ``packed`` is the state as ``kvobs.allocator.memory_map`` packs it; its blocks point into ``holders``, each (kind,
    name, cache id), and one that points nowhere has an unknown holder. The figures beside are the allocator's own
    statistics, which the metrics of this poll have too; an absent one is not kept here. ``steady`` says that they
    were the same before and after the snapshot: then the map is of that one moment. ``duration_ns`` is the CPU time
    that it took, ``every_ns`` how long there is no other one because of it, ``settings`` the allocator's settings.
    """

    t_ns: int
    device: str
    duration_ns: int
    every_ns: int
    steady: bool
    reserved_bytes: int
    allocated_bytes: int
    active_bytes: int | None
    requested_bytes: int | None
    segments: int | None
    settings: str
    holders: tuple[tuple[str, str, int | None], ...]
    packed: bytes


class OutOfMemory(msgspec.Struct, frozen=True, gc=False):
    """An engine call ended in an out-of-memory error (which passed on unchanged)."""

    t_ns: int
    origin: Origin | None
    session: str
    message: str


class FlightRecord(msgspec.Struct, frozen=True, gc=False):
    """What was known when memory ran out. ``windows`` (added by the runtime) and ``snapshot`` are JSON, or empty.

    ``windows`` holds the last minute of the window and usage metrics, one entry per second; ``snapshot`` a bounded
    summary of the allocator's segments and blocks, without traces.
    """

    t_ns: int
    reason: str
    device: str
    requested_bytes: int | None
    message: str
    windows: str
    snapshot: str
