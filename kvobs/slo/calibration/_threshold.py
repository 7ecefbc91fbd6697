"""The largest threshold that keeps a promise with confidence, and what less careful methods would choose.

The question: the largest t with P(latency > SLO | signal <= t) <= alpha, at confidence 1 - delta.

Learn-then-Test (A. Angelopoulos, S. Bates, E. Candes, M. Jordan and L. Lei, 2021) by fixed-sequence testing: a grid of
thresholds from the lowest up, for each the hypothesis that its rate is above alpha, tested by the exact binomial
p-value at level delta, until one is not rejected. The grid is made of ranks of the signal, fixed by the number of
windows: latencies have no say in it. The level is exact for independent windows of a signal without ties whose misses
do not become rarer beyond the true threshold: then those up to it are a binomial sample, and what the grid adds to
them misses at alpha or more.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from kvobs.slo.calibration._binomial import lower_tail, most_misses, needed

GRID = 200
# The first tested rank. At the least number of samples a single early miss would end the sequence, at four times it a
# few are allowed; with few windows that would be too high a signal to begin with, hence an eighth of them at most.
_START, _PART = 4, 8
ARTICLE_MU, ARTICLE_SIGMA, ARTICLE_THRESHOLD = -0.392, 0.417, 0.683


class Point(NamedTuple):
    """A threshold, the windows with a signal at or below it, and how many of them missed."""

    threshold: float
    windows: int
    misses: int

    @property
    def rate(self) -> float | None:
        """The share that missed; None without windows."""
        return self.misses / self.windows if self.windows else None


class Ordered:
    """Windows in the order of their signal, with the misses up to each."""

    def __init__(self, signals: Sequence[float], missed: Sequence[bool]) -> None:
        order = sorted(range(len(signals)), key=signals.__getitem__)
        self.signals = array("d", (signals[index] for index in order))
        self._misses = array("q", accumulate((int(missed[index]) for index in order), initial=0))

    def __len__(self) -> int:
        return len(self.signals)

    def at(self, threshold: float) -> Point:
        """What the data say of a threshold."""
        count = bisect_right(self.signals, threshold)
        return Point(threshold, count, self._misses[count])


@lru_cache(maxsize=64)
def ranks(windows: int, alpha: float, delta: float) -> tuple[int, ...]:
    """The ranks of the signal that are tested, the lowest first: at most ``GRID`` and one.

    Each but the last is the first at which one more miss is allowed, where the test is closest to its level. The
    first is four times the least number of samples; or an eighth of the windows where that is less, but at least the
    least. Empty below that.
    """
    least = needed(0, alpha, delta)
    if windows < least:
        return ()
    start = max(least, min(_START * least, windows // _PART))
    fewest, most = most_misses(start, alpha, delta), most_misses(windows, alpha, delta)
    found = {needed(misses, alpha, delta) for misses in range(fewest, most + 1, -(-(most - fewest + 1) // GRID))}
    return (*sorted(found - {windows}), windows)


def grid(ordered: Ordered, alpha: float, delta: float) -> list[Point]:
    """The thresholds at the tested ranks; ranks with one signal value are one threshold."""
    values = sorted({ordered.signals[rank - 1] for rank in ranks(len(ordered), alpha, delta)})
    return [ordered.at(value) for value in values]


def learn_then_test(tested: Sequence[Point], alpha: float, delta: float) -> Point | None:
    """The last threshold before the first that is not rejected; None where the first is not."""
    found = None
    for point in tested:
        if lower_tail(point.misses, point.windows, alpha) > delta:
            break
        found = point
    return found


def plug_in(ordered: Ordered, alpha: float) -> Point | None:
    """The largest threshold whose observed rate is at most alpha: right in about half of all cases."""
    for index in range(len(ordered), 0, -1):
        point = ordered.at(ordered.signals[index - 1])
        if point.misses <= alpha * point.windows:
            return point
    return None


def dkw_margin(windows: int, delta: float) -> float:
    """How far a distribution may lie above the empirical one (Dvoretzky, Kiefer and Wolfowitz, with P. Massart's
    constant, 1990; one-sided).
    """
    return math.sqrt(math.log(1 / delta) / (2 * windows))


def dkw(tested: Sequence[Point], alpha: float, delta: float) -> Point | None:
    """As ``learn_then_test``, with the DKW bound on the latencies of each threshold's windows: valid and wasteful.

    It begins as that does, by the least number of windows that this bound asks for.
    """
    least = math.ceil(math.log(1 / delta) / (2 * alpha * alpha))
    whole = tested[-1].windows if tested else 0
    start = max(least, min(_START * least, whole // _PART))
    found = None
    for point in tested:
        if point.windows < start:
            continue
        if point.misses / point.windows + dkw_margin(point.windows, delta) > alpha:
            break
        found = point
    return found


def article_share_above(value: float = ARTICLE_THRESHOLD) -> float:
    """P(F >= value) for the article's F ~ LogNormal(-0.392, 0.417): 0.490 at its threshold 0.683, said to be 95 %."""
    return 0.5 * math.erfc((math.log(value) - ARTICLE_MU) / (ARTICLE_SIGMA * math.sqrt(2)))
