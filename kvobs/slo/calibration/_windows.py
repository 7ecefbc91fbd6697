"""Windows: of each stretch of time, the maximum of the signal and the maximum of the latency make one pair.

Neighbouring seconds resemble each other, and bounds for independent samples would be too bold on them. Maxima over
windows that are long enough do not; how much of the resemblance is left is measured.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from kvobs.slo.calibration._exact import fisher_greater


class Sample(NamedTuple):
    """A signal and a latency of one instant, in seconds; None is absent. ``source`` tells processes apart."""

    t_s: float
    signal: float | None
    latency_s: float | None
    source: int = 0


class Windows:
    """Pairs in the order of time, one per window and source that has a signal and a latency.

    ``samples`` is how many samples there were, ``absent`` how many of them lacked one of the two (or it was NaN);
    ``incomplete`` how many windows had only one of the two, and so are left out.
    """

    def __init__(self, width_s: float) -> None:
        self.width_s = width_s
        self.slots, self.sources = array("q"), array("q")
        self.signals, self.latencies = array("d"), array("d")
        self.samples = self.absent = self.incomplete = 0

    def __len__(self) -> int:
        return len(self.slots)

    def misses(self, limit_s: float) -> list[bool]:
        """Which windows had a latency above the limit."""
        return [latency > limit_s for latency in self.latencies]

    def _put(self, slot: int, source: int, signal: float, latency_s: float) -> None:
        self.slots.append(slot)
        self.sources.append(source)
        self.signals.append(signal)
        self.latencies.append(latency_s)

    def _close(self, key: tuple[int, int], signal: float, latency_s: float) -> None:
        if signal != signal or latency_s != latency_s:
            self.incomplete += 1
        else:
            self._put(key[1], key[0], signal, latency_s)


def in_windows(samples: Iterable[Sample], width_s: float) -> Windows:
    """The windows of samples that come source by source, each in the order of time."""
    found = Windows(width_s)
    highest = slowest = math.nan
    key: tuple[int, int] | None = None
    for t_s, signal, latency_s, source in samples:
        found.samples += 1
        here = (source, int(t_s // width_s))
        if here != key:
            if key is not None:
                found._close(key, highest, slowest)
            key, highest, slowest = here, math.nan, math.nan
        lacking = 0
        if signal is None or signal != signal:
            lacking = 1
        elif not signal <= highest:  # which NaN, no value yet, never is
            highest = signal
        if latency_s is None or latency_s != latency_s:
            lacking = 1
        elif not latency_s <= slowest:
            slowest = latency_s
        found.absent += lacking
    if key is not None:
        found._close(key, highest, slowest)
    return _by_time(found)


def wider(windows: Windows, factor: int) -> Windows:
    """The same in windows ``factor`` times as wide."""
    within = ((source, slot // factor, signal, latency) for source, slot, signal, latency in sorted(zip(
        windows.sources, windows.slots, windows.signals, windows.latencies, strict=True)))
    width = windows.width_s * factor
    return in_windows((Sample((slot + 0.5) * width, signal, latency, source)
                       for source, slot, signal, latency in within), width)


def _by_time(windows: Windows) -> Windows:
    if len(set(windows.sources)) < 2:
        return windows
    found = Windows(windows.width_s)
    found.samples, found.absent, found.incomplete = windows.samples, windows.absent, windows.incomplete
    for pair in sorted(zip(windows.slots, windows.sources, windows.signals, windows.latencies, strict=True)):
        found._put(*pair)
    return found


class Neighbours(NamedTuple):
    """How much misses of neighbouring windows resemble each other.

    ``correlation`` is the lag-1 autocorrelation of misses, None where every window misses or none does; ``p_value``
    that of as many joint misses by chance (Fisher's exact test, one-sided), given those of the windows alone.
    """

    pairs: int
    correlation: float | None
    p_value: float


def neighbours(windows: Windows, limit_s: float) -> Neighbours:
    """What is left of autocorrelation between windows that directly follow each other."""
    last: dict[int, tuple[int, bool]] = {}
    pairs = first = second = both = 0
    for slot, source, missed in zip(windows.slots, windows.sources, windows.misses(limit_s), strict=True):
        known = last.get(source)
        if known is not None and known[0] == slot - 1:
            pairs += 1
            first += known[1]
            second += missed
            both += known[1] and missed
        last[source] = (slot, missed)
    spread = first * (pairs - first) * second * (pairs - second)
    if not spread:
        return Neighbours(pairs, None, 1.0)
    return Neighbours(pairs, (pairs * both - first * second) / spread ** 0.5,
                      fisher_greater(both, first, second, pairs))
