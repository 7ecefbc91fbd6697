"""What two readings of a native counter of an allocator's calls say."""

from __future__ import annotations

from kvobs.catalog import SLOW_BUCKET
from kvobs.model import AllocationLatencies, LatencyCounts

Readings = tuple[tuple[str, tuple[str, ...], float], ...]


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
        counts = tuple(new - old for new, old in zip(now.buckets, before.buckets, strict=True))
        self._slow += sum(counts[SLOW_BUCKET:])
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


_GROWING = ("allocations", "frees", "allocated_bytes", "freed_bytes", "sum_ns", "timed", "untracked")


def _nothing(like: LatencyCounts) -> LatencyCounts:
    return LatencyCounts(0, 0, 0, 0, (0,) * len(like.buckets), 0, like.sampled_every)
