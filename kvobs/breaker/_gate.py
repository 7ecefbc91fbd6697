"""The gate that requests pass: it reads one immutable decision, without a lock, and opens when in doubt."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from kvobs.breaker._limits import UNLIMITED, Limits
from kvobs.sessions import PRIORITIES

OBSERVE, ACT = "observe", "act"
_PLACE: dict[str, int] = {priority: place for place, priority in enumerate(PRIORITIES)}
_NORMAL = _PLACE["normal"]


class Probation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Level 3 is half-open: its limits stay, but for probes. ``tickets`` are those that are out, each for one request;
    a gate lets at most ``at_most`` requests pass on them at a time, and tells the breaker of ``process`` how they
    ended. The first byte of a probe's streamed answer should come within ``first_byte_ns`` (None: whenever).
    """

    process: str
    tickets: tuple[int, ...]
    at_most: int
    first_byte_ns: int | None = None


class Decision(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the breaker decided for requests, until ``expires_ns`` (monotonic, of the process that holds it).

    ``limits`` are in the order of ``PRIORITIES``; ``retry_after_s`` is how long a refused request should stay away at
    least; ``mode`` is ``off``, ``observe`` or ``act``, and only in the last does anything happen to a request.
    """

    generation: int
    level: int
    mode: str
    limits: tuple[Limits, Limits, Limits]
    retry_after_s: float
    expires_ns: int
    reason: str = ""
    probation: Probation | None = None


class Gate:
    """Holds the decision in force. One writer assigns ``decision`` (atomic); any thread may ask."""

    __slots__ = ("_clock", "decision")

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self.decision: Decision | None = None

    def limits(self, priority: str) -> Limits:
        """What a request of that priority may have now; an unknown priority counts as normal."""
        decision = self.decision
        if decision is None or decision.mode != ACT or self._clock() >= decision.expires_ns:
            return UNLIMITED
        return decision.limits[_PLACE.get(priority, _NORMAL)]

    def current(self) -> Decision | None:
        """The decision, unless it has expired."""
        decision = self.decision
        return None if decision is None or self._clock() >= decision.expires_ns else decision


def limiting(decision: Decision) -> bool:
    """Whether anything happens to anybody's requests."""
    return decision.mode == ACT and decision.limits != (UNLIMITED,) * len(decision.limits)


def wanted(decision: Decision | None, priority: str) -> Limits:
    """What the decision would have a request be given, whether or not anything is done about it."""
    if decision is None or decision.mode not in (ACT, OBSERVE):
        return UNLIMITED
    return decision.limits[_PLACE.get(priority, _NORMAL)]
