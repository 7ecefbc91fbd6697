"""Admission: who is let in when only so many may be active, who waits, and when who is refused should come back.

Waiting requests are in lines, one per session. The most important priority goes first; within it sessions take turns,
so that one with many requests does not keep out one with few; within a session the first comes first. Lines are
bounded, and nobody waits beyond their deadline. Pure: time (monotonic ns), limits and random numbers come in.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum

from kvobs.sessions import PRIORITIES

SECOND = 1_000_000_000
WINDOW_S = 30.0  # over which the drain rate is measured
_ENDS = 512  # that are remembered of them
LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
JITTER = 0.5


class Stand(Enum):
    """How a request stands."""

    WAITING = "waiting"
    ACTIVE = "active"
    FULL = "full"  # refused: its line or its priority's lines were full
    LATE = "late"  # refused: its deadline passed
    GONE = "gone"  # it left, served or not


class Ticket:
    """One request; ``wake`` is called when it does not wait any more."""

    __slots__ = ("deadline_ns", "priority", "session", "stand", "wake")

    def __init__(self, session: str, priority: str, deadline_ns: int) -> None:
        self.session, self.priority, self.deadline_ns = session, priority, deadline_ns
        self.stand = Stand.WAITING
        self.wake: Callable[[], object] | None = None


class Admission:
    """The lines, and how many requests are active.

    Args:
        now_ns: when measuring begins.
        queued: requests of one priority that may wait.
        per_session: requests of one session that may wait.
    """

    def __init__(self, now_ns: int, *, queued: int = 64, per_session: int = 8) -> None:
        self.active = 0
        self._began_ns = now_ns
        self._queued, self._per_session = queued, per_session
        self._lines: dict[str, OrderedDict[str, deque[Ticket]]] = {
            priority: OrderedDict() for priority in PRIORITIES}
        self._waiting: dict[str, int] = dict.fromkeys(PRIORITIES, 0)
        self._ends: deque[int] = deque(maxlen=_ENDS)

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(self._waiting.values())

    # -- coming and going ------------------------------------------------------------------------------

    def enter(self, session: str, priority: str) -> Ticket:
        """Let a request in at once, whoever waits and however many are active."""
        ticket = Ticket(session, priority, 0)
        ticket.stand = Stand.ACTIVE
        self.active += 1
        return ticket

    def arrive(self, session: str, priority: str, deadline_ns: int, limit: int | None) -> Ticket:
        """A request that is let in while fewer than ``limit`` are active and nobody waits; else it waits, or finds its
        line full.
        """
        ticket = Ticket(session, priority, deadline_ns)
        if not self.waiting and (limit is None or self.active < limit):
            ticket.stand = Stand.ACTIVE
            self.active += 1
            return ticket
        lines = self._lines[priority]
        if self._waiting[priority] >= self._queued or len(lines.get(session, ())) >= self._per_session:
            ticket.stand = Stand.FULL
            return ticket
        lines.setdefault(session, deque()).append(ticket)
        self._waiting[priority] += 1
        return ticket

    def leave(self, ticket: Ticket, now_ns: int) -> bool:
        """A request ends, or is given up while it waits; False (and nothing changes) where it was over before."""
        stand, ticket.stand = ticket.stand, Stand.GONE
        if stand is Stand.ACTIVE:
            self.active -= 1
            self._ends.append(now_ns)
        elif stand is Stand.WAITING:
            line = self._lines[ticket.priority][ticket.session]
            line.remove(ticket)
            if not line:
                del self._lines[ticket.priority][ticket.session]
            self._waiting[ticket.priority] -= 1
        return stand in (Stand.ACTIVE, Stand.WAITING)

    def settle(self, now_ns: int, limit: int | None) -> list[Ticket]:
        """Let in as many as may be, in their order; returns them and those who were found too late on the way."""
        settled: list[Ticket] = []
        for priority in PRIORITIES:
            while self._waiting[priority] and (limit is None or self.active < limit):
                ticket = self._next(priority)
                late = now_ns >= ticket.deadline_ns
                ticket.stand = Stand.LATE if late else Stand.ACTIVE
                self.active += not late
                settled.append(ticket)
        return settled

    def expire(self, now_ns: int) -> list[Ticket]:
        """Refuse all whose deadline has passed; returns them."""
        late = [ticket for lines in self._lines.values() for line in lines.values() for ticket in line
                if now_ns >= ticket.deadline_ns]
        for ticket in late:
            self.leave(ticket, now_ns)
            ticket.stand = Stand.LATE
        return late

    def _next(self, priority: str) -> Ticket:
        """Take the first of the session whose turn it is; its next turn is after all others'."""
        lines = self._lines[priority]
        session, line = next(iter(lines.items()))
        ticket = line.popleft()
        if line:
            lines.move_to_end(session)
        else:
            del lines[session]
        self._waiting[priority] -= 1
        return ticket

    # -- when to come back -----------------------------------------------------------------------------

    def drain_rate(self, now_ns: int) -> float:
        """Requests per second that ended within the last ``WINDOW_S`` (since the beginning where that is shorter, or
        since the oldest end that is remembered).
        """
        while self._ends and now_ns - self._ends[0] > WINDOW_S * SECOND:
            self._ends.popleft()
        if not self._ends:
            return 0.0
        since = max(self._began_ns, now_ns - round(WINDOW_S * SECOND))
        if len(self._ends) == _ENDS:
            since = max(since, self._ends[0])
        return len(self._ends) * SECOND / max(now_ns - since, 1)

    def retry_after_s(self, now_ns: int, least_s: float, drawn: float) -> float:
        """Seconds after which a refused request should come back; see :func:`retry_after_s`."""
        return retry_after_s(self.waiting, self.drain_rate(now_ns), least_s, drawn)


def retry_after_s(waiting: int, rate: float, least_s: float, drawn: float) -> float:
    """Seconds until those who wait, and one more, will have ended at ``rate`` per second, and at least ``least_s``.

    It is kept within ``LEAST_RETRY_S`` and ``MOST_RETRY_S``, the jitter included: up to half of it more, by ``drawn``
    (0 to 1), so that who was refused together does not come back together. Without a rate it is ``least_s``.
    """
    drain_s = (waiting + 1) / rate if rate > 0 else 0.0
    wait_s = max(drain_s, least_s if math.isfinite(least_s) else 0.0)
    return min(max(wait_s, LEAST_RETRY_S), MOST_RETRY_S / (1 + JITTER)) * (1 + JITTER * drawn)
