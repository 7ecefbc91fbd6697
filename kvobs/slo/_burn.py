"""Burn rates over several windows, from counts of good and of all events.

A burn rate is the share of bad events over a window, divided by the share that the objective allows: at 1 the error
budget lasts exactly for the objective's period. An alert fires while the rates over a long and a short window are both
above its factor (B. Beyer et al., The Site Reliability Workbook, chapter 5, "Multiwindow, Multi-Burn-Rate Alerts").
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator

import msgspec

from kvobs.config import Objective
from kvobs.model import Availability

SECOND = 10**9
RESOLUTION_NS = 30 * SECOND


class Alert(msgspec.Struct, frozen=True):
    """Fires while the burn rate is above ``factor`` over both windows (in seconds)."""

    factor: float
    short_s: int
    long_s: int
    severity: str

    @property
    def windows(self) -> str:
        """Both windows in Prometheus's words, such as ``5m & 1h``."""
        return f"{window_text(self.short_s)} & {window_text(self.long_s)}"


ALERTS = (Alert(14.4, 300, 3_600, "page"), Alert(6.0, 1_800, 21_600, "page"),
          Alert(3.0, 7_200, 86_400, "ticket"), Alert(1.0, 21_600, 259_200, "ticket"))
LONGEST_S = max(alert.long_s for alert in ALERTS)
_KEPT = LONGEST_S * SECOND // RESOLUTION_NS + 2


def window_text(seconds: int) -> str:
    """A window as PromQL writes it: ``5m``, ``6h``, ``3d``."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def refusal(objective: Objective, alert: Alert) -> str:
    """Why an alert cannot fire, or would be blind, for an objective, as a whole sentence; empty where it can."""
    highest = 1 / (1 - objective.target)
    if highest <= alert.factor * (1 + 1e-9):
        return (f"With a target of {objective.target:.6g} a burn rate is at most {highest:.4g}, never above "
                f"{alert.factor:g}: the alert over {alert.windows} cannot fire.")
    if objective.window_s > alert.short_s:
        return (f"An event is a window of {objective.window_s} s, longer than the {alert.short_s} s that the alert "
                f"over {alert.windows} looks at.")
    return ""


def refusals(objectives: Iterable[Objective]) -> Iterator[Availability]:
    """The alerts that are left out, with their reasons."""
    for objective in objectives:
        for alert in ALERTS:
            if reason := refusal(objective, alert):
                yield Availability(f"alert of {objective.name} over {alert.windows}", False, reason)


class History:
    """Cumulative counts of an objective's events over the last three days, one sample per 30 s, in 0.4 MB at most."""

    def __init__(self, now_ns: int) -> None:
        self._times, self._bad, self._all = array("q", [now_ns]), array("q", [0]), array("q", [0])
        self.bad = self.all = 0

    def add(self, good: int, events: int) -> None:
        """Count events."""
        self.all += events
        self.bad += events - good

    def keep(self, now_ns: int) -> None:
        """Remember the counts as of now, if the last sample is 30 s old."""
        if now_ns - self._times[-1] < RESOLUTION_NS:
            return
        for column, value in ((self._times, now_ns), (self._bad, self.bad), (self._all, self.all)):
            column.append(value)
            if len(column) > 2 * _KEPT:
                del column[:-_KEPT]

    def within(self, now_ns: int, seconds: int) -> tuple[int, int]:
        """Bad and all events since ``seconds`` ago, or since the beginning where that is later.

        The window begins at the last sample at or before its start, so it is up to 30 s longer than asked.
        """
        at = max(0, bisect_right(self._times, now_ns - seconds * SECOND) - 1)
        return self.bad - self._bad[at], self.all - self._all[at]


def burn_rate(history: History, objective: Objective, now_ns: int, seconds: int) -> float | None:
    """The burn rate over the last ``seconds``; None where there were no events."""
    bad, events = history.within(now_ns, seconds)
    return bad / events / (1 - objective.target) if events else None


def firing(history: History, objective: Objective, now_ns: int, alert: Alert) -> bool:
    """Whether an alert fires now."""
    rates = [burn_rate(history, objective, now_ns, seconds) for seconds in (alert.short_s, alert.long_s)]
    return all(rate is not None and rate > alert.factor for rate in rates)


def budget_left(history: History, objective: Objective, now_ns: int) -> float | None:
    """Share of the error budget of the last three days' events that is left; below 0 where it is overspent."""
    rate = burn_rate(history, objective, now_ns, LONGEST_S)
    return None if rate is None else 1 - rate
