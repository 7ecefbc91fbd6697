"""What the store tells that deserves an event: breaker transitions, out-of-memory errors, burning error budgets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvobs import model
from kvobs.store import News, Point, Stored, StoreError, StoreReader, decisions, trace_before

ALERT = "kvobs.slo.alert"
_REASONS = {"open": "BreakerOpened", "half-open": "BreakerProbing", "closed": "BreakerClosed"}
_AROUND_NS = 3_600_000_000_000  # in which the turn that a trace is taken from must have ended


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at ``wall_ns``. Facts of one reason and subject become one event with a count."""

    wall_ns: int
    reason: str
    subject: str
    message: str
    warning: bool
    trace_id: str = ""


class Watch:
    """Makes facts of what a store tells; every change of an alert once."""

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader
        self._burning: dict[tuple[str, str], bool] = {}

    def facts(self, since_wall_ns: int, until_wall_ns: int) -> list[Fact]:
        """The facts of [since, until) in the order of time.

        Raises:
            StoreError: a store became unreadable.
        """
        return self.told(News(decisions(self._reader, since_wall_ns, until_wall_ns),
                              self._reader.events(since_wall_ns, until_wall_ns),
                              self._reader.points(ALERT, since_wall_ns, until_wall_ns)))

    def told(self, news: News) -> list[Fact]:
        """The facts in what came, in the order of time; a trace that cannot be read is left out."""
        found = [*self._decisions(news), *self._failures(news), *self._alerts(news.points)]
        return sorted(found, key=lambda fact: fact.wall_ns)

    def _decisions(self, news: News) -> Iterator[Fact]:
        for one in news.decisions:
            told = one.record
            said = "" if told.mode == "act" else " It only observes: nothing was done."
            yield Fact(wall_ns=one.wall_ns, reason=_REASONS.get(told.after, "BreakerChanged"),
                       subject=f"{told.scope} level {told.level}", warning=told.after == "open",
                       message=f"Breaker level {told.level} of {told.scope}: {told.before} to {told.after}. "
                               f"{told.reason}{said}", trace_id=self._trace(one, ""))

    def _failures(self, news: News) -> Iterator[Fact]:
        for one in news.events:
            failure = one.record
            if isinstance(failure, model.OutOfMemory):
                device = failure.origin.device if failure.origin else "unknown"
                yield Fact(wall_ns=one.wall_ns, reason="OutOfMemory", subject=device, warning=True,
                           message=f"Out of memory on {device}: {failure.message}",
                           trace_id=self._trace(one, failure.session))

    def _alerts(self, points: list[Point]) -> Iterator[Fact]:
        for point in points:
            who = ", ".join(f"{key} {value}" for key, value in sorted(point.attributes.items()))
            burns, before = point.value > 0, self._burning.get((point.process, who), False)
            self._burning[point.process, who] = burns
            if burns != before:
                reason, said = ("ErrorBudgetBurning", "burns too fast") if burns else (
                    "ErrorBudgetRecovered", "no longer burns too fast")
                yield Fact(wall_ns=point.wall_ns, reason=reason, subject=who, warning=burns,
                           message=f"The error budget {said}: {who}.")

    def _trace(self, one: Stored[Any], session: str) -> str:
        """The trace of the turn that ended last until then, of the session where one is named; empty without one."""
        try:
            return trace_before(self._reader, one.process, session, one.wall_ns - _AROUND_NS, one.wall_ns)
        except StoreError:
            return ""
