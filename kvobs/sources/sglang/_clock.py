"""When a tick of a logical clock was: nodes of SGLang's unified tree carry ticks, not times.

The tree draws a tick at each access. kvobs notes now and then which tick comes next; a tick between two notes is dated
by the earlier one. When the notes are full every second one is given up, so that they reach back without end at a
resolution of at most 1/16,384 of what they span (10 ms at best).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

LIMIT = 32_768
RESOLUTION_NS = 10_000_000


class TickClock:
    """Notes of (tick, time), both growing."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._ticks, self._times = array("d"), array("q")

    def note(self, tick: float, now_ns: int) -> None:
        """``tick`` is the next one to be drawn at ``now_ns``."""
        times = self._times
        if times and (now_ns - times[-1] < RESOLUTION_NS or tick <= self._ticks[-1]):
            return
        if len(times) >= self._limit:
            self._ticks, self._times = self._ticks[::2], times[::2]
        self._ticks.append(tick)
        self._times.append(now_ns)

    def time_of(self, tick: float) -> int | None:
        """When the tick was drawn, to the resolution; None for one from before the first note."""
        position = bisect_right(self._ticks, tick)
        return self._times[position - 1] if position else None
