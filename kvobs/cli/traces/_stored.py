"""A trace from the store: turns, the phases of their time, and what happened to them. Callers' spans are not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvobs import model
from kvobs.breaker import DECISION
from kvobs.cli.traces._model import Event, Span, Trace, TraceError
from kvobs.spans import OPERATION, phases_of, scopes_of, turn_attributes
from kvobs.store import Stored, StoreError, StoreReader, decisions, last_traced, phases, preemptions, turns_of_trace

MARGIN_NS = 1_000_000_000
FAILED = {"error": "", "out_of_memory": "out of memory"}  # outcomes, and what is said of them
NOTE = "The store keeps turns, their phases and events; spans of callers, layers and other programs are not in it."
T = TypeVar("T")


def last(place: Path, *, sampled: bool) -> str:
    """The id of the trace of the newest turn; with ``sampled``, of those whose spans were exported.

    Raises:
        TraceError: there is none.
    """
    found = _asked(place, lambda reader: last_traced(reader, sampled=sampled))
    if found is None:
        raise TraceError(f"The store at {place} has no turn with a{' sampled' if sampled else ''} trace; turns have "
                         "one where an OpenTelemetry SDK records.")
    return found.record.trace_id


def read(place: Path, trace_id: str) -> Trace:
    """The trace of an id (lower-case hex).

    Raises:
        TraceError: the store has no turn of it, or cannot be read.
    """
    return _asked(place, lambda reader: _trace(reader, place, trace_id))


def _asked(place: Path, ask: Callable[[StoreReader], T]) -> T:
    try:
        return ask(StoreReader(place))
    except StoreError as error:
        raise TraceError(str(error)) from None


def _trace(reader: StoreReader, place: Path, trace_id: str) -> Trace:
    spans: list[Span] = []
    for stored in turns_of_trace(reader, trace_id.zfill(32)):
        own = _Moment(reader, stored)
        parent = len(spans)
        turn = stored.record
        spans.append(Span(
            name=f"{OPERATION} {turn.origin.model}".rstrip(), span_id=turn.span_id, start_ns=own.at(turn.start_ns),
            end_ns=own.at(turn.t_ns), error=FAILED.get(turn.outcome),
            attributes=dict(turn_attributes(turn)), events=own.events()))
        spans += [Span(name=name, parent_at=parent, start_ns=own.at(start_ns), end_ns=own.at(end_ns))
                  for name, start_ns, end_ns in own.phases()]
    if not spans:
        raise TraceError(f"The store at {place} has no turn of the trace {trace_id}.")
    return Trace(trace_id=trace_id, source=f"the store at {place}", spans=tuple(spans), notes=(NOTE,))


class _Moment:
    """What the store knows of the time of one turn: of its process, between its start and its end."""

    def __init__(self, reader: StoreReader, stored: Stored[model.Turn]) -> None:
        turn = self._turn = stored.record
        self._reader, self._process = reader, stored.process
        self._since = stored.wall_ns - (turn.t_ns - turn.start_ns) - MARGIN_NS
        self._until = stored.wall_ns + MARGIN_NS
        self._shift = turn.wall_start_ns - turn.start_ns
        ours = [one.record for one in phases(reader, self._since, self._until)
                if self._is_mine(one.process, one.record.t_ns)]
        # Only the phase that ends with the turn says which request it was.
        ids = {one.request for one in ours if one.outcome and (one.t_ns, one.session) == (turn.t_ns, turn.session)}
        self._request = ids.pop() if len(ids) == 1 else None
        self._phases = [one for one in ours if one.request == self._request]

    def at(self, t_ns: int) -> int:
        """Monotonic nanoseconds of the turn's process as Unix nanoseconds, as its span has them."""
        return t_ns + self._shift

    def phases(self) -> list[tuple[str, int, int]]:
        """(name, start, end) in monotonic nanoseconds: of the request, or else the turn's prefill and decode."""
        return [(one.phase, one.start_ns, one.t_ns) for one in self._phases] or phases_of(self._turn)

    def events(self) -> tuple[Event, ...]:
        """Migrations, preemptions, out-of-memory errors and the breaker's decisions, in the order of time."""
        found = [*self._migrations(), *self._preemptions(), *self._failures(), *self._decisions()]
        return tuple(sorted(found, key=lambda event: event.t_ns or 0))

    def _is_mine(self, process: str, t_ns: int) -> bool:
        return process == self._process and self._turn.start_ns <= t_ns <= self._turn.t_ns

    def _migrations(self) -> Iterator[Event]:
        ways = {(src, dst) for src, dst, _, _ in self._turn.migrations}
        for one in self._reader.migrations(self._since, self._until) if ways else ():
            move = one.record
            its = move.cache_id == self._turn.cache_id and (move.src, move.dst) in ways
            if its and self._is_mine(one.process, move.t_ns):
                yield Event(self.at(move.t_ns), "kvobs.migration", {
                    "src": move.src, "dst": move.dst, "buffers": move.buffers, "bytes": move.bytes,
                    **({} if move.duration_ns is None else {"duration_s": move.duration_ns / 1e9})})

    def _preemptions(self) -> Iterator[Event]:
        for one in preemptions(self._reader, self._since, self._until) if self._request else ():
            lost = one.record
            if self._is_mine(one.process, lost.t_ns) and lost.request == self._request:
                yield Event(self.at(lost.t_ns), "kvobs.preempted", {
                    "kvobs.cause": lost.cause, "kvobs.wanted_by": lost.wanted_by, "kvobs.blocks": lost.blocks,
                    "kvobs.tokens_lost": lost.tokens_lost})

    def _failures(self) -> Iterator[Event]:
        for one in self._reader.events(self._since, self._until):
            failure = one.record
            if (isinstance(failure, model.OutOfMemory) and failure.session == self._turn.session
                    and self._is_mine(one.process, failure.t_ns)):
                yield Event(self.at(failure.t_ns), "kvobs.out_of_memory", {"message": failure.message})

    def _decisions(self) -> Iterator[Event]:
        scopes = scopes_of(self._turn.origin)
        for one in decisions(self._reader, self._since, self._until):
            told = one.record
            if self._is_mine(one.process, told.t_ns) and told.scope in scopes:
                yield Event(self.at(told.t_ns), DECISION, {
                    "kvobs.breaker.scope": told.scope, "kvobs.breaker.mode": told.mode,
                    "kvobs.breaker.level": told.level, "kvobs.breaker.before": told.before,
                    "kvobs.breaker.after": told.after, "kvobs.breaker.reason": told.reason})
