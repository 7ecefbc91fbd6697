"""Signals from what a store recorded: the points of one process, second by second. Pure: points come in as values.

``MAPPING`` is the whole of it. A signal that the points do not tell is not made up: ``verdict``, ``gateway_p99`` and
``pool_use`` are in no metric.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import msgspec

from kvobs.allocator.verdict import Verdict
from kvobs.breaker._conditions import Reading

SECOND = 10**9
RATE_S, HITS_S, ERRORS_S = 10, 60, 60
FIVE_MINUTES, HOUR = "5m", "1h"
_ORDER = {verdict.value: number for number, verdict in enumerate(Verdict)}

# One instant's points of a metric: attributes and values.
Points = list[tuple[Mapping[str, str], float]]


class Sample(Protocol):
    """A sample of one series, as a store has it."""

    @property
    def wall_ns(self) -> int:
        """When (Unix time)."""
        ...

    @property
    def attributes(self) -> dict[str, str]:
        """Which series of the metric."""
        ...

    @property
    def value(self) -> float:
        """What it was."""
        ...


class Mapped(msgspec.Struct, frozen=True):
    """How a signal comes from metrics: a state of one instant, or the growth of counters over ``span_s``."""

    signal: str
    metrics: tuple[str, ...]
    formula: str
    value: Callable[[Mapping[str, Points]], float | str | None]
    span_s: int = 0
    samples: Callable[[Mapping[str, Points]], int] = lambda found: 1


def _by(points: Points, *keys: str) -> dict[tuple[str, ...], Points]:
    found: dict[tuple[str, ...], Points] = defaultdict(list)
    for attributes, value in points:
        found[tuple(attributes.get(key, "") for key in keys)].append((attributes, value))
    return found


def _sum(points: Points, **wanted: tuple[str, ...]) -> float:
    return sum(value for attributes, value in points
               if all(attributes.get(key) in values for key, values in wanted.items()))


def _utilization(found: Mapping[str, Points]) -> float | None:
    shares = [_sum(pool, state=("used",)) / size for pool in _by(found["kvobs.kv.blocks"], "model", "device").values()
              if (size := _sum(pool, state=("used", "cached", "free")))]
    return max(shares, default=None)


def _waiting(found: Mapping[str, Points]) -> float | None:
    points = found["kvobs.requests"]
    return _sum(points, state=("waiting", "preempted")) if points else None


def _grown(name: str, span_s: int) -> Callable[[Mapping[str, Points]], float | None]:
    return lambda found: _sum(found[name]) / span_s if found[name] else None


def _headroom(found: Mapping[str, Points]) -> float | None:
    free = {key[0]: _sum(points, part=("free",)) for key, points in _by(found["kvobs.device.memory"], "device").items()
            if any(attributes.get("part") == "free" for attributes, _ in points)}
    left = []
    for (device,), points in _by(found["kvobs.allocator.usage"], "device").items():
        allowed = free.get(device, 0.0) + _sum(points)
        if device in free and allowed > 0:
            left.append(1 - _sum(points, state=("allocated",)) / allowed)
    return min(left, default=None)


def _burn(found: Mapping[str, Points]) -> float | None:
    rates = []
    for points in _by(found["kvobs.slo.burn"], "objective").values():
        windows = {attributes.get("window"): value for attributes, value in points}
        if FIVE_MINUTES in windows and HOUR in windows:
            rates.append(min(windows[FIVE_MINUTES], windows[HOUR]))
    return max(rates, default=None)


def _pool_verdict(found: Mapping[str, Points]) -> str | None:
    words = [attributes.get("verdict", "") for attributes, _ in found["kvobs.request.next"]]
    return max((word for word in words if word in _ORDER), key=_ORDER.__getitem__, default=None)


def _hit_rate(found: Mapping[str, Points]) -> float | None:
    queried = _sum(found["kvobs.prefix.queried"])
    return _sum(found["kvobs.prefix.hit"]) / queried if queried else None


def _highest(name: str) -> Callable[[Mapping[str, Points]], float | None]:
    return lambda found: max((value for _, value in found[name]), default=None)


MAPPING = (
    Mapped("kv_utilization", ("kvobs.kv.blocks",), "used / (used + cached + free), of the fullest pool", _utilization),
    Mapped("waiting", ("kvobs.requests",), "waiting + preempted", _waiting),
    Mapped("preemption_rate", ("kvobs.kv.preemptions",), "growth over 10 s / 10",
           _grown("kvobs.kv.preemptions", RATE_S), RATE_S),
    Mapped("failure_rate", ("kvobs.kv.block.failures",), "growth over 10 s / 10",
           _grown("kvobs.kv.block.failures", RATE_S), RATE_S),
    Mapped("pool_verdict", ("kvobs.request.next",), "the verdict, the worst of several models", _pool_verdict),
    Mapped("hit_rate", ("kvobs.prefix.hit", "kvobs.prefix.queried"), "hit / queried, both as growth over 60 s",
           _hit_rate, HITS_S, lambda found: int(_sum(found["kvobs.prefix.queried"]))),
    Mapped("out_of_memory", ("kvobs.out_of_memory",), "growth over 60 s", _grown("kvobs.out_of_memory", 1), ERRORS_S),
    Mapped("burn_rate", ("kvobs.slo.burn",), "highest of any objective, the lower one of 5m and 1h", _burn),
    Mapped("headroom", ("kvobs.allocator.usage", "kvobs.device.memory"),
           "1 - allocated / (allocated + unused + free), of the fullest device", _headroom),
    Mapped("fragmentation_article", ("kvobs.kv.fragmentation.article",), "the highest", _highest(
        "kvobs.kv.fragmentation.article")),
)
METRICS = tuple(dict.fromkeys(name for mapped in MAPPING for name in mapped.metrics))


class Growth:
    """How much each series of a counter grew over the last ``span_s`` (0: since the last instant); a counter that
    begins anew counts from 0.
    """

    def __init__(self, span_s: int) -> None:
        self._span_ns = span_s * SECOND
        self._before: dict[tuple[tuple[str, str], ...], float] = {}
        self._grown: deque[tuple[int, Points]] = deque()

    def add(self, t_ns: int, points: Points) -> Points:
        """Take an instant's points; returns what grew, series by series and instant by instant.

        What the first instant tells is no growth, since what was before is not known; a series that appears later
        began at 0.
        """
        more: Points = []
        for attributes, value in points:
            key = tuple(sorted(attributes.items()))
            before = self._before.get(key, 0.0 if self._grown else value)
            self._before[key] = value
            more.append((attributes, value - before if value >= before else value))
        self._grown.append((t_ns, more))
        while len(self._grown) > 1 and self._grown[0][0] <= t_ns - self._span_ns:
            self._grown.popleft()
        return [point for _, grown in self._grown for point in grown]


def instants(samples: Mapping[str, Iterable[Sample]]) -> Iterator[tuple[int, dict[str, Points]]]:
    """One process's points by instant, oldest first: it writes all of them at once, about once a second."""
    by_time: dict[int, dict[str, Points]] = {}
    for name, points in samples.items():
        for point in points:
            by_time.setdefault(point.wall_ns, defaultdict(list))[name].append((point.attributes, point.value))
    for t_ns in sorted(by_time):
        yield t_ns, by_time[t_ns]


class Recorded:
    """Signals of one process, instant by instant."""

    def __init__(self) -> None:
        self._growth = {(mapped.signal, name): Growth(mapped.span_s)
                        for mapped in MAPPING if mapped.span_s for name in mapped.metrics}

    def signals(self, t_ns: int, found: Mapping[str, Points]) -> dict[str, Reading]:
        """The readings of an instant; a signal whose metrics have no points then is not there."""
        readings: dict[str, Reading] = {}
        for mapped in MAPPING:
            points = {name: found.get(name, []) for name in mapped.metrics}
            if mapped.span_s:
                points = {name: self._growth[mapped.signal, name].add(t_ns, points[name]) for name in mapped.metrics}
            value = mapped.value(points)
            if value is not None:
                readings[mapped.signal] = Reading(value, t_ns, mapped.samples(points))
        return readings
