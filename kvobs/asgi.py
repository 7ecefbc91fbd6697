"""Middleware for any ASGI server: requests pass the breaker's gate, or wait, or are refused, or get fewer tokens.

``ErrorMiddleware(app)`` counts how requests end and tells failures apart (``kvobs.errors``).

``BreakerMiddleware(app)`` reads the decision boards of its own process group's engines, beside the store that the
configuration names; vLLM takes it as ``--middleware kvobs.asgi.BreakerMiddleware``. Without a board, with a stale one
and in mode ``observe`` requests and answers pass as they are.

Whose request it is say the headers ``kvobs-session`` and ``kvobs-priority`` (critical, normal, sheddable), else the
baggage entries ``session.id`` and ``session.priority``. Whoever may send them may call itself critical: a proxy that
faces the world should set or remove them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvobs import config
from kvobs.breaker._admission import Admission, Stand, Ticket
from kvobs.breaker._board import BoardReader, board_directory
from kvobs.breaker._gate import ACT, OBSERVE, Decision, Gate, wanted
from kvobs.breaker._http import NOT_READY, App, Receive, Scope, Send, Visit, refusal, respond
from kvobs.breaker._limits import UNLIMITED, Limits
from kvobs.breaker._trial import Trials
from kvobs.errors._asgi import ErrorMiddleware

if TYPE_CHECKING:
    from kvobs.runtime import Runtime

__all__ = ["BreakerMiddleware", "ErrorMiddleware", "totals"]

_log = logging.getLogger("kvobs")
LIVENESS = frozenset({"/health", "/healthz", "/livez", "/ping"})
READINESS = frozenset({"/readyz", "/ready"})
DEGRADED = 3  # the level at which a server may call itself not ready
REFRESH_NS = 50_000_000  # boards are looked at no more often
PUMP_S = 0.05  # and as often while somebody waits
Outcome = tuple[str, str, str]  # mode, priority, outcome


class Board(Protocol):
    """Where decisions come from."""

    def decision(self) -> Decision | None:
        """The one in force. Must not block."""
        ...


def totals() -> Counter[Outcome]:
    """What became of the requests of this process: how many by (mode, priority, outcome).

    Each has one outcome: ``admitted``, ``refused`` (by its priority), ``full`` (its line was), ``late`` (it waited
    until its deadline) or ``gone`` (its client left before it was let in). ``queued``, ``clamped`` (fewer new tokens),
    ``trimmed`` (less history) and ``probed`` are counted besides. In mode ``observe`` that would have become of it, and
    nothing was done; ``none`` is without a decision.
    """
    found: Counter[Outcome] = Counter()
    for one in list(_living):
        found.update(one.counts)
    return found


def in_use() -> bool:
    """Whether this process has a ``BreakerMiddleware``."""
    return len(_living) > 0


class BreakerMiddleware:
    """Stands before an ASGI application and does to its requests what the breaker has decided.

    Only ``POST`` requests to ``paths`` are judged. While their priority is limited they are refused with 503 and
    ``Retry-After``, or wait until fewer than ``max_active`` are active, and then have the number of new tokens in their
    JSON body lowered, and of a chat's history whole oldest turns dropped, as ``kvobs-degraded`` and
    ``kvobs-history-dropped`` in the answer say. Whoever is not limited never waits. While level 3 is on probation a few
    at a time pass as they are; how they ended is told to the breaker where it is in this process.

    Args:
        app: the application.
        board: a directory of boards, an object with ``decision()``, or None for what the configuration says.
        paths: prefixes of the paths that are judged.
        max_active: how many are active at once while anybody is limited; None for as many as were when that began.
        max_queued: how many of each priority may wait.
        queue_s: how long each may.
        count_tokens: how many tokens a text has, by the model's tokenizer; without it those of a history are estimated.
        readiness: answer 503 on ``/ready`` and ``/readyz`` at level 3. Liveness paths are never touched.
        clock: monotonic nanoseconds.
        draw: random numbers from 0 to 1, for the jitter of ``Retry-After``.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(self, app: App, *, board: str | Path | Board | None = None, paths: Iterable[str] = ("/v1/",),
                 max_active: int | None = None, max_queued: int = 64, queue_s: float = 10.0, readiness: bool = False,
                 count_tokens: Callable[[str], int] | None = None, clock: Callable[[], int] = time.monotonic_ns,
                 draw: Callable[[], float] = random.random) -> None:
        if (max_active is not None and max_active < 1) or max_queued < 0 or not 0 <= queue_s <= 3_600:
            raise ValueError("BreakerMiddleware takes max_active of at least 1 or None, max_queued of at least 0 and "
                             f"queue_s from 0 to 3600, and was given {max_active}, {max_queued} and {queue_s}.")
        self.app = app
        self.gate = Gate(clock)
        self.counts: Counter[Outcome] = Counter()
        self._paths = (paths,) if isinstance(paths, str) else tuple(paths)
        self._max_active, self._max_queued, self._queue_ns = max_active, max_queued, round(queue_s * 1e9)
        self._readiness, self._clock, self._draw = readiness, clock, draw
        self._tokens = count_tokens
        self._board = _board(board, clock)
        self._looked_ns: int | None = None
        self._admission = Admission(clock(), queued=max_queued)
        self._limit: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pumping = False
        self._told = False
        self._trials = Trials()
        self._tell = _tell
        _living.add(self)

    @property
    def active(self) -> int:
        """Requests that the application is serving."""
        return self._admission.active

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._admission.waiting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or whatever else the server has to say to the application."""
        visit = self._begin(scope, receive)
        if visit is None:
            return await self.app(scope, receive, send)
        try:
            await self._admit(visit)
            if visit.gone:
                return None
            if visit.answer is not None:
                return await respond(send, visit.answer)
            with visit.within():
                return await self.app(visit.scope, visit.receive, visit.sending(send))
        except Exception:
            visit.raised = True
            raise
        finally:
            self._end(visit)

    # -- a request -------------------------------------------------------------------------------------

    def _begin(self, scope: Scope, receive: Receive) -> Visit | None:
        """The request, if it is to be judged; never raises."""
        try:
            if scope["type"] != "http" or scope["path"] in LIVENESS:
                return None
            unready = self._readiness and scope["path"] in READINESS and self._degraded()
            if not unready and (scope["method"] != "POST" or not scope["path"].startswith(self._paths)):
                return None
            if not self._adopt():
                return None
            visit = Visit(scope, receive, self._admission)
            visit.answer = NOT_READY if unready else None
            return visit
        except Exception as error:
            self._failed(error)
            return None

    def _degraded(self) -> bool:
        decision = self._look()
        return (decision is not None and decision.mode == ACT and decision.level >= DEGRADED
                and decision.probation is None)  # to a server that is not ready nobody sends a probe

    def _adopt(self) -> bool:
        """Whether this event loop's requests are judged: the first one's, and the next one's once that is closed."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and not self._loop.is_closed():
                return False
            self._loop, self._pumping = loop, False
            self._admission, self._limit = Admission(self._clock(), queued=self._max_queued), None
        return True

    async def _admit(self, visit: Visit) -> None:
        """Have the request let in, refused or changed; whatever fails here lets it in."""
        if visit.answer is not None:
            return
        try:
            decision = self._look()
            limits = wanted(decision, visit.priority)
            visit.mode = decision.mode if decision is not None else "none"
            if decision is None or limits == UNLIMITED or self._probes(visit, decision):
                self._enter(visit)
            elif decision.mode == ACT:
                await self._degrade(visit, decision, limits)
            else:
                self._pretend(visit, limits)
        except Exception as error:
            self._failed(error)
            visit.answer, visit.gone = None, False
            self._enter(visit)

    def _probes(self, visit: Visit, decision: Decision) -> bool:
        """Whether the request passes undegraded, as a probe of a level that is on probation."""
        if decision.probation is not None:
            visit.trial = self._trials.begin(decision.probation, self._clock)
            if visit.trial is not None:
                self._count(visit, "probed")
        return visit.trial is not None

    def _enter(self, visit: Visit) -> None:
        if visit.ticket is not None:
            visit.admission.leave(visit.ticket, self._clock())
        visit.ticket = visit.admission.enter(visit.line, visit.priority)
        self._count(visit, "admitted")

    def _pretend(self, visit: Visit, limits: Limits) -> None:
        """Count what would have been done, and do nothing."""
        visit.ticket = visit.admission.enter(visit.line, visit.priority)
        self._count(visit, "admitted" if limits.admit else "refused")
        if not limits.admit:
            return
        if self._limit is not None and self.active > self._limit:
            self._count(visit, "queued")
        if limits.max_new_tokens is not None or limits.history_tokens is not None:
            visit.overhear(limits, self._tokens, lambda outcome: self._count(visit, outcome))

    async def _degrade(self, visit: Visit, decision: Decision, limits: Limits) -> None:
        if not limits.admit:
            return self._refuse(visit, "refused", f"requests of priority {visit.priority} are not taken now", decision)
        await visit.read_ahead()  # before it takes a place: a slow client holds up nobody
        if not visit.gone:
            await self._wait(visit)
        if visit.gone:
            return self._count(visit, "gone")
        assert visit.ticket is not None
        if visit.ticket.stand is Stand.FULL:
            return self._refuse(visit, "full", "too many requests wait", decision)
        if visit.ticket.stand is Stand.LATE:
            return self._refuse(visit, "late", "the request has waited too long", decision)
        self._count(visit, "admitted")
        try:
            for outcome in visit.degrade(limits, self._tokens):
                self._count(visit, outcome)
        except Exception as error:
            self._failed(error)
        return None

    async def _wait(self, visit: Visit) -> None:
        deadline = self._clock() + self._queue_ns
        ticket = visit.ticket = visit.admission.arrive(visit.line, visit.priority, deadline, self._limit)
        self._settle()
        if ticket.stand is not Stand.WAITING:
            return
        self._count(visit, "queued")
        done = asyncio.get_running_loop().create_future()
        ticket.wake = partial(_resolve, done)
        self._pump_later()
        await visit.stays_until(done)

    def _refuse(self, visit: Visit, outcome: str, why: str, decision: Decision) -> None:
        self._count(visit, outcome)
        seconds = visit.admission.retry_after_s(self._clock(), decision.retry_after_s, self._draw())
        visit.answer = refusal(why, math.ceil(seconds))

    def _end(self, visit: Visit) -> None:
        """Give the place back, once; never raises."""
        try:
            visit.end()
            if visit.ticket is not None and visit.admission.leave(visit.ticket, self._clock()):
                self._settle()
            if visit.trial is not None:
                self._trials.end(visit.trial)
                self._tell(visit.trial.process, visit.trial.ticket, visit.trial.good(raised=visit.raised))
        except Exception as error:
            self._failed(error)

    def _count(self, visit: Visit, outcome: str) -> None:
        self.counts[visit.mode, visit.priority, outcome] += 1

    # -- the gate and the queue ------------------------------------------------------------------------

    def _look(self) -> Decision | None:
        """The decision in force, looked up now and then; sets how many may be active while somebody is limited."""
        now = self._clock()
        if self._board is not None and (self._looked_ns is None or now - self._looked_ns >= REFRESH_NS):
            self._looked_ns = now
            try:
                self.gate.decision = self._board.decision()
            except Exception as error:
                self.gate.decision = None
                self._failed(error)
        decision = self.gate.current()
        if decision is None or decision.mode not in (ACT, OBSERVE) or decision.limits == (UNLIMITED,) * 3:
            self._limit = None
        elif self._limit is None:
            self._limit = self._max_active or max(1, self._admission.active)
        return decision

    def _settle(self) -> None:
        decision = self.gate.current()
        limit = self._limit if decision is not None and decision.mode == ACT else None
        _wake(self._admission.settle(self._clock(), limit))

    def _pump_later(self) -> None:
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_later(PUMP_S, self._pump)

    def _pump(self) -> None:
        """While somebody waits: see what is decided now, refuse who is late, let in who may."""
        self._pumping = False
        try:
            self._look()
            _wake(self._admission.expire(self._clock()))
            self._settle()
        except Exception as error:
            self._failed(error)
            _wake(self._admission.settle(self._clock(), None))
        if self._admission.waiting:
            self._pump_later()

    def _failed(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            _log.warning("kvobs: the breaker's middleware failed (%s: %s); requests pass it instead.",
                         type(error).__name__, error, exc_info=_log.isEnabledFor(logging.DEBUG))


def _tell(process: str, ticket: int, good: bool | None) -> None:
    """Let the breaker know how its probe ended, if it is this process's; another's probation ends by time."""
    module = sys.modules.get("kvobs.runtime")
    runtime: Runtime | None = module.current() if module is not None else None
    if runtime is not None and runtime.process_id == process and runtime.protection is not None:
        breaker = runtime.protection.breaker
        if breaker is not None:
            breaker.probing.told(ticket, good)


def _wake(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        if ticket.wake is not None:
            ticket.wake()


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _board(board: str | Path | Board | None, clock: Callable[[], int]) -> Board | None:
    if board is not None:
        return BoardReader(Path(board), clock=clock) if isinstance(board, str | Path) else board
    try:
        store = config.load().store
    except config.ConfigError as error:
        _log.error("kvobs: the breaker's middleware lets everything pass: %s", error)
        return None
    if store is None:
        _log.warning("kvobs: the breaker's middleware lets everything pass: decision boards lie with the store, "
                     "which is off (setting store).")
        return None
    return BoardReader(board_directory(store), group=os.getpgid(0), clock=clock)


_living: weakref.WeakSet[BreakerMiddleware] = weakref.WeakSet()
