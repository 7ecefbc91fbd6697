"""Probes of level 3: the breaker hands out tickets while it is half-open, and takes what gates say of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from kvobs.breaker._gate import Probation
from kvobs.breaker._machine import begin_probe, end_probe, in_flight
from kvobs.breaker._states import LEVELS, Phase, Policy, Probe, State

DEGRADE = LEVELS.index("degrade")
MOST_TICKETS = 16  # out at a time, whatever a policy says: they have to fit on the board
_MOST_OUTCOMES = 256  # that wait for the next tick


class Probing:
    """The tickets of one breaker. Their numbers are never given twice, so that no outcome is taken for another's.

    ``told`` may be called on any thread, the rest on the drain thread.
    """

    def __init__(self) -> None:
        self._out: dict[int, tuple[str, Probe]] = {}
        self._given = 0
        self._outcomes: deque[tuple[int, bool | None]] = deque(maxlen=_MOST_OUTCOMES)

    def told(self, ticket: int, good: bool | None) -> None:
        """A probe ended: well, badly, or (None) in a way that says nothing."""
        self._outcomes.append((ticket, good))

    def ended(self, states: dict[str, State]) -> None:
        """Take the outcomes into the scopes' states; those that came too late change nothing."""
        for _ in range(len(self._outcomes)):
            ticket, good = self._outcomes.popleft()
            scope, probe = self._out.pop(ticket, ("", None))
            if probe is not None and scope in states:
                states[scope] = end_probe(states[scope], probe, good=good)

    def begin(self, policy: Policy, states: dict[str, State], now_ns: int) -> None:
        """Hand out as many tickets as the scopes' probations allow now, and forget those that do not count any more."""
        self._out = {ticket: (scope, probe) for ticket, (scope, probe) in self._out.items()
                     if scope in states and in_flight(states[scope], probe)}
        for scope, state in states.items():
            while state.levels[DEGRADE - 1].phase is Phase.HALF_OPEN and len(self._out) < MOST_TICKETS:
                state, probe = begin_probe(policy, state, DEGRADE, now_ns)
                if probe is None:
                    break
                self._given += 1
                self._out[self._given] = scope, probe
            states[scope] = state

    def of(self, process: str, policy: Policy, states: Mapping[str, State],
           first_byte_ns: int | None) -> Probation | None:
        """What gates should know; None where no scope has level 3 half-open, or one has it open."""
        phases = {scope: state.levels[DEGRADE - 1].phase for scope, state in states.items()}
        if Phase.OPEN in phases.values() or Phase.HALF_OPEN not in phases.values():
            return None
        scope = next(scope for scope, phase in phases.items() if phase is Phase.HALF_OPEN)
        tickets = tuple(ticket for ticket, (whose, _) in self._out.items() if whose == scope)
        at_most = min(policy.levels[DEGRADE - 1].probes, MOST_TICKETS)
        return Probation(process, tickets, at_most, first_byte_ns)
