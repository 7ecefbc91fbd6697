"""What became of a run, and what the allocations of its windows took."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvobs.config import LATENCY_BOUNDS_NS
from kvobs.model import LatencyCounts

SLOW_NS = 12_000_000
WINDOW_S = 60
QUANTILE = 0.95


class Window(msgspec.Struct, frozen=True):
    """A minute of the modelled clock: allocations, those of them that took longer than 12 ms, out-of-memory errors."""

    allocations: int
    slow: int
    errors: int

    @property
    def fast(self) -> bool:
        """Did at least 95 % of its allocations take at most 12 ms?"""
        return self.slow <= (1 - QUANTILE) * self.allocations

    @property
    def good(self) -> bool:
        """Was it fast, and did no request run out of memory?"""
        return self.fast and not self.errors


class Outcome(msgspec.Struct):
    """A run of an arm under a load.

    Requests: asked for, let in, finished, refused (or too late), ended by an out-of-memory error, unfinished.
    ``tokens`` are of finished requests; ``cut`` are tokens that limits took from answers; ``turns_lost`` are later
    turns of sessions that ended early. ``histogram`` has all allocations by latency, ``allocation_s`` and ``action_s``
    are seconds that allocations and actions of the breaker took. ``answers`` is a digest of the tokens of all finished
    turns.
    """

    arm: str = ""
    load: str = ""
    expandable: bool = False
    seed: int = 0
    asked: int = 0
    admitted: int = 0
    finished: int = 0
    shed: int = 0
    errors: int = 0
    unfinished: int = 0
    tokens: int = 0
    cut: int = 0
    turns_lost: int = 0
    steps: int = 0
    transitions: int = 0
    highest: int = 0
    allocation_s: float = 0.0
    action_s: float = 0.0
    windows: list[Window] = []
    histogram: list[int] = []
    answers: str = ""

    @property
    def seconds(self) -> float:
        """Of the modelled clock, of waiting for memory and of actions of the breaker."""
        return self.steps + self.allocation_s + self.action_s


class Windows:
    """Cuts the allocator's own counts (``counts``: so far) into windows."""

    def __init__(self, counts: Callable[[], LatencyCounts]) -> None:
        self._counts = counts
        self._slow_from = LATENCY_BOUNDS_NS.index(SLOW_NS) + 1
        self._began = self._last = counts()
        self._errors = 0
        self.found: list[Window] = []

    def cut(self, errors: int) -> None:
        """A window ends here, with so many errors in all; one in which nothing happened is none."""
        now = self._counts()
        grown = _grown(self._last.buckets, now.buckets)
        window = Window(sum(grown), sum(grown[self._slow_from:]), errors - self._errors)
        self._last, self._errors = now, errors
        if window.allocations or window.errors:
            self.found.append(window)

    def totals(self) -> tuple[list[int], float]:
        """All allocations since the beginning by latency, and the seconds that they took."""
        now = self._counts()
        return _grown(self._began.buckets, now.buckets), (now.sum_ns - self._began.sum_ns) / 1e9


def _grown(before: Sequence[int], now: Sequence[int]) -> list[int]:
    return [new - old for new, old in zip(now, before, strict=True)]


def p95_ns(histogram: Sequence[int]) -> float:
    """The bound of the bucket in which the 95th percentile lies; infinity beyond the last, NaN of nothing."""
    total, seen = sum(histogram), 0
    for count, bound in zip(histogram, (*map(float, LATENCY_BOUNDS_NS), float("inf")), strict=True):
        seen += count
        if total and seen >= QUANTILE * total:
            return bound
    return float("nan")
