"""How old evicted blocks were and how long unused, by bucket, until that is told."""

from __future__ import annotations

import bisect

from kvobs.catalog import EVICTION_BOUNDS_NS
from kvobs.model import Evictions, Origin


class Times:
    """Durations by bucket of ``EVICTION_BOUNDS_NS``, and their sum."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(EVICTION_BOUNDS_NS) + 1)
        self.sum_ns = 0

    def add(self, duration_ns: int, blocks: int) -> None:
        """Count a duration once per block."""
        self.counts[bisect.bisect_left(EVICTION_BOUNDS_NS, duration_ns)] += blocks
        self.sum_ns += blocks * duration_ns


class EvictionTimes:
    """Of one pool, since they were last told."""

    __slots__ = ("ages", "idles")

    def __init__(self) -> None:
        self.ages, self.idles = Times(), Times()

    def add(self, age_ns: int | None, idle_ns: int | None, blocks: int = 1) -> None:
        """So many blocks were evicted together; what is not known of them is not counted."""
        for times, duration in ((self.ages, age_ns), (self.idles, idle_ns)):
            if duration is not None:
                times.add(duration, blocks)

    def take(self, t_ns: int, origin: Origin, cache_id: int) -> Evictions | None:
        """What was counted since the last call; None if nothing."""
        ages, idles = self.ages, self.idles
        if not any(ages.counts) and not any(idles.counts):
            return None
        self.ages, self.idles = Times(), Times()
        return Evictions(t_ns, origin, cache_id, tuple(ages.counts), ages.sum_ns, tuple(idles.counts), idles.sum_ns)
