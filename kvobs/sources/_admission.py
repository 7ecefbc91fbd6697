"""Source: what the breaker's middleware in this process did to requests."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from kvobs.model import Availability, Emit, Event, Poll

SOURCE = "admission"
MODULE = "kvobs.asgi"
ABSENT = "No kvobs.asgi.BreakerMiddleware is used in this process."


class AdmissionSource:
    """Reads the middleware's counts, where the host has imported it."""

    name = SOURCE

    def install(self, emit: Emit) -> None:
        """Nothing is hooked: the host puts the middleware before its application itself."""

    def uninstall(self) -> None:
        """Nothing was hooked."""

    def sample(self, now_ns: int) -> Iterable[Event]:
        """Requests by mode, priority and outcome since this process began."""
        module = sys.modules.get(MODULE)
        if module is not None:
            yield Poll(now_ns, SOURCE, 0, tuple(("kvobs.admission.requests", key, float(count))
                                                for key, count in module.totals().items()))

    def availability(self) -> Iterable[Availability]:
        """Whether the middleware is there."""
        module = sys.modules.get(MODULE)
        there = module is not None and module.in_use()
        yield Availability(SOURCE, there, "" if there else ABSENT)
