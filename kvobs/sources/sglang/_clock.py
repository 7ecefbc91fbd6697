"""When a tick of a logical clock was: nodes of SGLang's unified tree carry ticks, not times.

The tree draws a tick at each access. kvobs notes now and then which tick comes next, and dates a tick by the last note
before it. Of the notes each tier keeps the latest ones: the first all, the next every second one, and so on. So a tick
is dated to 10 ms or to a thousandth of its age, whichever is more, and 20 tiers reach back for months.
"""

from __future__ import annotations

from bisect import bisect_right

RESOLUTION_NS = 10_000_000
KEPT, TIERS = 2_048, 20


class _Tier:
    """The latest notes of one tier, both columns growing; trimmed when twice as many as needed."""

    __slots__ = ("ticks", "times")

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.times: list[int] = []

    def add(self, tick: float, now_ns: int, kept: int) -> None:
        self.ticks.append(tick)
        self.times.append(now_ns)
        if len(self.ticks) >= 2 * kept:
            del self.ticks[:kept], self.times[:kept]


class TickClock:
    """Notes of (tick, time), both growing; ``kept`` are those of each tier at least."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._tiers = [_Tier() for _ in range(TIERS)]
        self._noted = 0
        self._last: tuple[float, int] | None = None

    def note(self, tick: float, now_ns: int) -> None:
        """``tick`` is the next one to be drawn at ``now_ns``."""
        last = self._last
        if last is not None and (now_ns - last[1] < RESOLUTION_NS or tick <= last[0]):
            return
        self._last = (tick, now_ns)
        for power, tier in enumerate(self._tiers):
            if self._noted % (1 << power):
                break
            tier.add(tick, now_ns, self._kept)
        self._noted += 1

    def time_of(self, tick: float) -> int | None:
        """When the tick was drawn; None for one from before the first note."""
        for tier in self._tiers:
            position = bisect_right(tier.ticks, tick)
            if position:
                return tier.times[position - 1]
        return None
