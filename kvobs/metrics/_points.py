"""Points by metric and attribute set: counters, gauges, histograms, bounded in number."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvobs.catalog import BY_NAME, ROWS, Row
from kvobs.metrics._counted import representatives
from kvobs.model import Turn

Attributes = tuple[str, ...]
PENDING = 100_000  # observations that wait for an exporter; none takes them when none needs them


class Exemplar(msgspec.Struct, frozen=True, gc=False):
    """The latest traced observation of a bucket; ``wall_s`` is Unix time."""

    trace_id: str
    span_id: str
    value: float
    wall_s: float


class Histogram:
    """Counts per bucket (the last is +Inf), sum, and at most one exemplar per bucket."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, exemplar: Exemplar | None) -> None:
        """Count a value: bucket i holds values with bounds[i-1] < value <= bounds[i]."""
        index = bisect.bisect_left(self.bounds, value)
        self.counts[index] += 1
        self.total += value
        if exemplar is not None:
            self.exemplars[index] = exemplar

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add values that were counted elsewhere: how many per bucket, and their sum."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.total += total

    def copy(self) -> Histogram:
        """A copy that later observations do not change."""
        other = Histogram(self.bounds)
        other.counts, other.exemplars, other.total = list(self.counts), list(self.exemplars), self.total
        return other


Value = int | float | Histogram


class Observation(msgspec.Struct, frozen=True, gc=False):
    """A value observed ``times`` times by a histogram, for exporters that must record it themselves."""

    row: Row
    attributes: Attributes
    value: float
    trace_id: str
    span_id: str
    sampled: bool
    times: int = 1


class PointTable:
    """The points themselves. Not thread-safe: whoever owns it holds a lock."""

    def __init__(self, max_series: int, wall: Callable[[], float]) -> None:
        self._max_series = max_series
        self._wall = wall
        self.points: dict[str, dict[Attributes, Value]] = {row.name: {} for row in ROWS}
        self.pending: list[Observation] = []

    def add(self, name: str, attributes: Attributes, amount: float) -> None:
        """Add to a counter."""
        key = self._admit(name, attributes)
        before = self.points[name].get(key, 0)
        if not isinstance(before, Histogram):
            self.points[name][key] = before + amount

    def observe(self, name: str, attributes: Attributes, value: float, turn: Turn | None = None) -> None:
        """Count a value in a histogram, with the turn's trace as its exemplar."""
        row, key, histogram = self._histogram(name, attributes)
        exemplar = None
        if turn is not None and turn.sampled and turn.trace_id:
            exemplar = Exemplar(turn.trace_id, turn.span_id, value, self._wall())
        histogram.observe(value, exemplar)
        if len(self.pending) < PENDING:
            self.pending.append(Observation(row, key, value, turn.trace_id if turn else "",
                                            turn.span_id if turn else "", bool(turn and turn.sampled)))

    def observe_counts(self, name: str, attributes: Attributes, counts: Sequence[int], total: float) -> None:
        """Add values that were counted elsewhere, by the row's buckets, to a histogram."""
        row, key, histogram = self._histogram(name, attributes)
        histogram.add(counts, total)
        for value, times in representatives(row.buckets, counts, total):
            if len(self.pending) < PENDING:
                self.pending.append(Observation(row, key, value, "", "", False, times))

    def put(self, name: str, attributes: Attributes, value: float) -> None:
        """Set a gauge's point; one that folds into 'other' joins it as the row aggregates across ranks."""
        points = self.points[name]
        key = self._admit(name, attributes)
        before = points.get(key)
        if key == attributes or before is None or isinstance(before, Histogram):
            points[key] = value
        else:
            points[key] = _COMBINE[BY_NAME[name].across_ranks](before, value)

    def replace(self, name: str, points: Mapping[Attributes, float]) -> None:
        """Make these all the points of a gauge."""
        if len(points) <= self._max_series:
            self.points[name] = dict(points)
            return
        self.points[name] = {}
        for attributes, value in points.items():
            self.put(name, attributes, value)

    def copies(self) -> list[tuple[Row, dict[Attributes, Value]]]:
        """Every row that has points, with copies of its values."""
        return [(BY_NAME[name], {a: v.copy() if isinstance(v, Histogram) else v for a, v in points.items()})
                for name, points in self.points.items() if points]

    def total(self, name: str) -> float:
        """The sum over a counter's points, or over the sums of a histogram's."""
        return sum(value.total if isinstance(value, Histogram) else value for value in self.points[name].values())

    def _histogram(self, name: str, attributes: Attributes) -> tuple[Row, Attributes, Histogram]:
        row, key = BY_NAME[name], self._admit(name, attributes)
        histogram = self.points[name].get(key)
        if not isinstance(histogram, Histogram):
            histogram = self.points[name][key] = Histogram(row.buckets)
        return row, key, histogram

    def _admit(self, name: str, attributes: Attributes) -> Attributes:
        points = self.points[name]
        if attributes in points or len(points) < self._max_series:
            return attributes
        overflow = self.points["kvobs.self.series.overflow"]
        before = overflow.get((name,), 0)
        overflow[(name,)] = (0 if isinstance(before, Histogram) else before) + 1
        return ("other",) * len(attributes)


_COMBINE: dict[str, Callable[[float, float], float]] = {"sum": operator.add, "max": max, "min": min}
