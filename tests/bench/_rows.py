"""What a measurement hands to the table, and the verdict on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from tests.bench._statistics import Interval, bootstrap, halves, median, ratios

Verdict = Literal["ok", "over", "unclear", "skipped", "-"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report.

    ``value`` is in ``unit`` (an overhead's unit is ``%``) and ``interval`` is where its median lies with 95 %.
    ``noise`` is the A/A interval of the same run, in the same unit: what two measurements of one thing differ by.
    """

    group: str
    what: str
    value: float | None
    unit: str
    runs: int
    interval: Interval | None = None
    noise: Interval | None = None
    budget: float | None = None
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """``unclear`` where the budget lies inside the interval, or within the noise around the value."""
        if self.value is None:
            return "skipped"
        if self.budget is None:
            return "-"
        low = high = self.value
        if self.interval is not None:
            low, high = self.interval.low, self.interval.high
        if self.noise is not None:
            margin = max(abs(self.noise.low), abs(self.noise.high))
            low, high = min(low, self.value - margin), max(high, self.value + margin)
        if low <= self.budget < high:
            return "unclear"
        return "ok" if self.value <= self.budget else "over"


class Plan(msgspec.Struct, frozen=True):
    """How much is measured. ``quick`` is for CI: fewer rounds, the same rows."""

    quick: bool

    def rounds(self, full: int, quick: int) -> int:
        """The number that this run takes."""
        return quick if self.quick else full


# Announces how many steps a measurement has; each call of what it returns is one of them done.
Progress = Callable[[int], Callable[[], None]]
Measurement = Callable[[Plan, Progress], Iterable[Row]]


def repeated(group: str, what: str, values: list[float], unit: str, *, scale: float = 1.0, budget: float | None = None,
             note: str = "") -> Row:
    """A row of one measurement taken several times; ``scale`` brings the values to ``unit``."""
    return Row(group=group, what=what, value=median(values) * scale, unit=unit, runs=len(values),
               interval=bootstrap(values).scaled(scale), noise=halves(values).scaled(scale), budget=budget, note=note)


def overhead(group: str, what: str, tested: list[float], baseline: list[float], again: list[float], *,
             budget: float | None = None, note: str = "") -> Row:
    """A row of paired costs in per cent over the baseline; ``again`` is the baseline measured once more."""
    found = [100 * (ratio - 1) for ratio in ratios(tested, baseline)]
    same = [100 * (ratio - 1) for ratio in ratios(again, baseline)]
    return compared(group, what, found, same, "%", budget=budget, note=note)


def compared(group: str, what: str, found: list[float], same: list[float], unit: str, *, budget: float | None = None,
             note: str = "") -> Row:
    """A row of paired differences; ``same`` are differences between two measurements of the baseline."""
    return Row(group=group, what=what, value=median(found), unit=unit, runs=len(found), interval=bootstrap(found),
               noise=bootstrap(same), budget=budget, note=note)


def skipped(group: str, what: str, reason: str, *, unit: str = "", budget: float | None = None) -> Row:
    """A row that says why there is no measurement."""
    return Row(group=group, what=what, value=None, unit=unit, runs=0, budget=budget, note=reason)
