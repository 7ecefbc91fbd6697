"""What stands before the engine: the gate, and admission as the middleware for ASGI servers has it, step by step.

Without limits a request is let in at once. A priority that is not admitted is refused; one that is limited waits while
``MOST_ACTIVE`` are active (the middleware's ``max_active``), and is answered with fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from kvobs.breaker import UNLIMITED, BoardReader, Gate, Limits
from kvobs.breaker._admission import Admission, Stand, Ticket

QUEUE_S = 10.0
MOST_ACTIVE = 2  # while anybody is limited
MORE = 2  # requests at once beyond those that are active, after limits have ended and while somebody waits


class Front:
    """Lets requests in. ``clock`` is in nanoseconds; ``board`` says what the breaker decided, None without one."""

    def __init__(self, board: BoardReader | None, clock: Callable[[], int]) -> None:
        self._board, self._clock = board, clock
        self.gate = Gate(clock)
        self._admission = Admission(clock(), queued=64, per_session=8)
        self._limit: int | None = None

    def ask(self, session: str, priority: str) -> tuple[Ticket | None, Limits]:
        """A ticket, active or waiting or not taken (``FULL``); None where the priority is refused."""
        limits = self._look(priority)
        if limits == UNLIMITED and (priority == "critical" or not self._admission.waiting):
            return self._admission.enter(session, priority), limits
        if not limits.admit:
            return None, limits
        deadline = self._clock() + round(QUEUE_S * 1e9)
        return self._admission.arrive(session, priority, deadline, self._limit), limits

    def settle(self) -> None:
        """Once a step: those who wait are let in, or found too late; their tickets say which."""
        self._look("normal")
        self._admission.expire(self._clock())
        calm = self._limit is None and self._admission.waiting
        self._admission.settle(self._clock(), self._admission.active + MORE if calm else self._limit)

    def leave(self, ticket: Ticket) -> None:
        """A request ends."""
        self._admission.leave(ticket, self._clock())

    def limits(self, priority: str) -> Limits:
        """What a request of a priority may have now."""
        return self.gate.limits(priority)

    def _look(self, priority: str) -> Limits:
        self.gate.decision = self._board.decision() if self._board is not None else None
        limited = self.gate.limits("sheddable") != UNLIMITED or self.gate.limits("normal") != UNLIMITED
        self._limit = MOST_ACTIVE if limited else None
        return self.gate.limits(priority)


def waiting(ticket: Ticket) -> bool:
    """Does it still wait?"""
    return ticket.stand is Stand.WAITING


def active(ticket: Ticket) -> bool:
    """Was it let in?"""
    return ticket.stand is Stand.ACTIVE
