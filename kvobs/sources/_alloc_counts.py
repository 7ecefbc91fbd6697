"""What a native counter of an allocator's calls is read as, and what two readings of it say."""

from __future__ import annotations

import msgspec

from kvobs.catalog import BY_NAME, SLOW_ALLOCATION
from kvobs.model import AllocationLatencies

LATENCY = "kvobs.alloc.latency"
# Bucket i counts latencies with BOUNDS_NS[i - 1] < latency <= BOUNDS_NS[i]; one more bucket is above them all.
BOUNDS_NS: tuple[int, ...] = tuple(round(bound * 1e9) for bound in BY_NAME[LATENCY].buckets)
SLOW_NS = round(SLOW_ALLOCATION * 1e9)

Readings = tuple[tuple[str, tuple[str, ...], float], ...]


class LatencyCounts(msgspec.Struct, frozen=True, gc=False):
    """An allocator's calls since its counter began; every field but the last three of settings only grows.

    ``allocations`` are those whose ``frees`` are counted too, so that the difference is what is alive, in number and
    in bytes; ``untracked`` are those whose free nobody sees. ``buckets`` counts the ``timed`` ones (one of
    ``sampled_every``, on average) by ``BOUNDS_NS``, ``slow`` those that took longer than ``slow_ns``.
    """

    allocations: int
    frees: int
    allocated_bytes: int
    freed_bytes: int
    buckets: tuple[int, ...]
    sum_ns: int
    timed: int
    slow: int
    sampled_every: int
    slow_ns: int = SLOW_NS
    untracked: int = 0


class Growth:
    """How a device's counter grew, reading by reading; one that went back has begun anew.

    What grew before ``since`` is not told, but what was alive then counts as allocated, so that allocated - freed is
    always what is alive. Without ``since`` everything is told from the counter's beginning.
    """

    def __init__(self, device: str, since: LatencyCounts | None = None) -> None:
        self._device, self._before = device, since
        self._allocations = since.allocations - since.frees if since else 0
        self._allocated_bytes = since.allocated_bytes - since.freed_bytes if since else 0
        self._frees = self._freed_bytes = self._untracked = self._slow = 0

    def take(self, now_ns: int, now: LatencyCounts) -> tuple[AllocationLatencies | None, Readings]:
        """The latencies since the last reading (None where nothing was timed), and the counters for a ``Poll``."""
        before = self._before
        if before is None or any(getattr(now, name) < getattr(before, name) for name in _GROWING):
            before = _nothing(now)
        self._before = now
        self._allocations += now.allocations - before.allocations
        self._frees += now.frees - before.frees
        self._allocated_bytes += now.allocated_bytes - before.allocated_bytes
        self._freed_bytes += now.freed_bytes - before.freed_bytes
        self._untracked += now.untracked - before.untracked
        self._slow += now.slow - before.slow
        counts = tuple(new - old for new, old in zip(now.buckets, before.buckets, strict=True))
        latencies = AllocationLatencies(now_ns, self._device, counts, now.sum_ns - before.sum_ns)
        return latencies if any(counts) else None, self._readings(now.sampled_every)

    def _readings(self, sampled_every: int) -> Readings:
        device = self._device
        return (
            ("kvobs.alloc.operations", (device, "allocate"), self._allocations),
            ("kvobs.alloc.operations", (device, "free"), self._frees),
            ("kvobs.alloc.operations", (device, "untracked"), self._untracked),
            ("kvobs.alloc.io", (device, "allocate"), self._allocated_bytes),
            ("kvobs.alloc.io", (device, "free"), self._freed_bytes),
            ("kvobs.alloc.slow", (device,), self._slow),
            ("kvobs.alloc.interval", (device,), sampled_every),
        )


_GROWING = ("allocations", "frees", "allocated_bytes", "freed_bytes", "sum_ns", "timed", "slow", "untracked")


def _nothing(like: LatencyCounts) -> LatencyCounts:
    return LatencyCounts(0, 0, 0, 0, (0,) * len(like.buckets), 0, 0, 0, like.sampled_every, like.slow_ns)
