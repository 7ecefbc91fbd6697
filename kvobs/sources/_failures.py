"""Source: how the requests at this process's middleware for errors ended."""

from __future__ import annotations

from collections.abc import Iterable

from kvobs.errors import tally
from kvobs.model import Availability, Emit, Event, Poll

SOURCE = "errors"
ABSENT = "No ErrorMiddleware of kvobs.asgi or kvobs.wsgi is used in this process."


class FailureSource:
    """Reads the tally, where the host uses the middleware."""

    name = SOURCE

    def install(self, emit: Emit) -> None:
        """Nothing is hooked: the host puts the middleware before its application itself."""

    def uninstall(self) -> None:
        """Nothing was hooked."""

    def sample(self, now_ns: int) -> Iterable[Event]:
        """Requests by outcome, and failures by class, since this process began."""
        if requests := tally.requests():
            yield Poll(now_ns, SOURCE, 0, (
                *(("kvobs.http.requests", key, float(count)) for key, count in requests.items()),
                *(("kvobs.http.failures", key, float(count)) for key, count in tally.failures().items())))

    def availability(self) -> Iterable[Availability]:
        """Whether the middleware is there."""
        there = bool(tally.requests())
        yield Availability(SOURCE, there, "" if there else ABSENT)
