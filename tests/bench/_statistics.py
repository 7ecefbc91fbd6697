"""Medians of paired ratios and bootstrap intervals. Pure; the generator is seeded, so a report is reproducible."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import msgspec

_RESAMPLES = 2_000
_COVERAGE = 0.95


class Interval(msgspec.Struct, frozen=True):
    """Both ends belong to it."""

    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """The interval in another unit."""
        return Interval(self.low * factor, self.high * factor)


def median(values: Sequence[float]) -> float:
    """The median; ValueError without values."""
    return float(statistics.median(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile, ``share`` in 0 … 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bootstrap(values: Sequence[float], *, resamples: int = _RESAMPLES) -> Interval:
    """The 95 % percentile-bootstrap interval of the median."""
    draw = random.Random(len(values))
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1 - _COVERAGE) / 2
    return Interval(medians[int(tail * resamples)], medians[min(resamples - 1, int((1 - tail) * resamples))])


def ratios(tested: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """One ratio per pair; a pair is two neighbouring measurements."""
    return [a / b for a, b in zip(tested, baseline, strict=True)]


def halves(values: Sequence[float]) -> Interval:
    """The A/A interval of repeated measurements: every second one less its predecessor."""
    even = len(values) // 2 * 2
    return bootstrap([b - a for a, b in zip(values[0:even:2], values[1:even:2], strict=True)])
