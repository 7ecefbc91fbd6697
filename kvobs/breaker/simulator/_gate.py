"""What the breaker's levels do to the engine and to arriving requests, and probes on probation. Modelled.

Level 1: who waits is admitted once it is expected to fit beside those who run, to the end of all of them; an engine
that is idle drops its cached blocks. Level 2: blocks that have been cached for a second move to the host, as do those
that are evicted, and are fetched back at a price when they are found; nothing is dropped then.

Level 3, by priority: critical requests pass; normal ones get at most ``clamp_tokens`` of output; sheddable ones are
refused with a Retry-After and come back. On probation its limits stay, but for the requests that the machine lets
through as probes. Levels 1 and 2 are lifted on probation, and requests that arrive are their probes. A probe is good
if its request ended in full, was not preempted and had its first token in time.
"""

from __future__ import annotations

import zlib

from kvobs.breaker._conditions import Signals
from kvobs.breaker._machine import begin, begin_probe, end_probe, step
from kvobs.breaker._states import LEVELS, Phase, Policy, Probe, Transition
from kvobs.breaker.simulator._engine import OK, Engine, Job
from kvobs.breaker.simulator._server import Server
from kvobs.breaker.simulator._trace import Request

SECOND = 10**9
CRITICAL, NORMAL, SHEDDABLE = "critical", "normal", "sheddable"
IDLE_NS = SECOND  # a cached chunk that nobody has held for so long belongs to an idle session


def share(*what: int | str) -> float:
    """A number from 0 to 1 that is the same each time."""
    return zlib.crc32(repr(what).encode()) / 2**32


def priority(server: Server, seed: int, number: int) -> str:
    """A request's priority: traces have none, so it is drawn by its number."""
    drawn = share("priority", seed, number)
    if drawn < server.sheddable:
        return SHEDDABLE
    return CRITICAL if drawn < server.sheddable + server.critical else NORMAL


class Gate:
    """A policy's machine, and what it does to one engine."""

    def __init__(self, policy: Policy, engine: Engine, seed: int) -> None:
        self._policy, self._engine, self._seed = policy, engine, seed
        self._state = begin(policy, 0)
        self._probes: dict[int, Probe] = {}
        self.transitions: list[Transition] = []
        self.seconds = [0.0] * len(LEVELS)  # with so many as the highest level that is open

    def tick(self, signals: Signals, now_ns: int) -> None:
        """One step of the machine, and its levels' effects on the engine."""
        engine = self._engine
        self.seconds[self._state.level] += (now_ns - self._state.now_ns) / SECOND
        self._state, told = step(self._policy, self._state, signals, now_ns)
        if told is not None:
            self.transitions.append(told)
        reorganise, offload, _ = (level.phase is Phase.OPEN for level in self._state.levels)
        engine.careful = reorganise
        engine.pool.offloading = offload
        if offload:  # rather than dropped
            engine.pool.offload(now_ns - IDLE_NS)
        elif reorganise and not engine.busy:
            engine.pool.forget()

    def limit(self, number: int, request: Request, now_ns: int) -> int | None:
        """The most output that a request gets; None if it is refused."""
        rank = priority(self._engine.server, self._seed, number)
        # While level 3 is engaged the lower ones are open: there is at most one level on probation.
        engaged = self._state.levels[2].phase is not Phase.CLOSED
        if engaged and rank == CRITICAL:
            return request.output
        passes = not engaged
        for level in (3,) if engaged else (1, 2):
            self._state, probe = begin_probe(self._policy, self._state, level, now_ns)
            if probe is not None:
                self._probes[number] = probe
                passes = True
        if passes:
            return request.output
        if rank == SHEDDABLE:
            return None
        return min(request.output, self._engine.server.clamp_tokens)

    def ended(self, job: Job, *, in_time: bool) -> None:
        """Tell the machine how a probe ended."""
        probe = self._probes.pop(job.number, None)
        if probe is not None:
            good = job.outcome == OK and not job.preemptions and in_time
            self._state = end_probe(self._state, probe, good=good)
