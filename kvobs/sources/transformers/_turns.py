"""A turn: one generate call, or the bare forward passes over one cache from a prefill to the next."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvobs import sessions
from kvobs.model import Emit, Origin, OutOfMemory, Turn
from kvobs.sources.transformers._caches import SOURCE, CacheRecord
from kvobs.sources.transformers._sweep import Delta
from kvobs.spans import Mark, OpenTurn, open_turn

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

_MARKS = 64
_NOWHERE = Origin(SOURCE, "unknown", "none", "unknown", "unknown")


class LiveTurn:
    """Sums of a turn that is under way. ``prompt`` and ``consumed`` are token positions per row."""

    __slots__ = ("_burst", "cached", "consumed", "copied", "epoch", "first_ns", "hook_ns", "last_ns",
                 "layered", "marks", "model", "moves",
                 "named", "number", "opened", "owner", "parent", "prefill_end_ns", "priority", "process", "prompt",
                 "reallocations", "records", "reported", "rows", "session", "start_ns", "steps", "wall_start_ns",
                 "written")

    def __init__(self, owner: object, model: str, session: str, priority: str, number: int, *, named: bool) -> None:
        self.owner, self.model, self.named, self.process = owner, model, named, os.getpid()
        self.session, self.priority, self.number = session, priority, number
        self.start_ns, self.wall_start_ns = time.monotonic_ns(), time.time_ns()
        self.first_ns: int | None = None
        self.prefill_end_ns: int | None = None
        self.last_ns = self.start_ns
        self.steps = self.prompt = self.consumed = self.cached = self.hook_ns = 0
        self.rows = 1
        self.reported = self.epoch = 0
        self.layered = False
        self.written = self.copied = self.reallocations = 0
        self.records: dict[int, tuple[CacheRecord, Delta]] = {}
        self.moves: dict[tuple[str, str], list[int]] = {}
        self.marks: list[Mark] = []
        self.opened: OpenTurn | None = None
        self.parent: Context | None = None
        self._burst: list[int] | None = None

    def begins(self, now_ns: int) -> bool:
        """A forward pass begins; True if it belongs to the prefill."""
        prefill = self.steps == 0 or self.consumed < self.prompt
        if not prefill and self.first_ns is None:
            self.first_ns = now_ns
        return prefill

    def took(self, record: CacheRecord, delta: Delta, query_length: int, prefill: bool, now_ns: int) -> None:
        """A forward pass ended and its cache was swept."""
        if not self.records:
            self.cached = max(0, record.sweep.length() + record.missing() - query_length)
            self.consumed = self.cached
            if self.cached and query_length == self.prompt:
                self.prompt += self.cached  # only the new part of the prompt was passed
        self.records[record.id] = (record, delta)
        self.steps += 1
        self.consumed += query_length
        self.last_ns = now_ns
        if prefill:
            self.prefill_end_ns = now_ns
        self.written += delta.written
        self._changed(delta, now_ns)

    def took_without_cache(self, now_ns: int) -> None:
        """A forward pass ended that keeps no cache: every pass reads the whole sequence again."""
        self.steps += 1
        self.consumed = self.prompt
        self.last_ns = now_ns
        if self.steps == 1:
            self.prefill_end_ns = now_ns

    def rewrote(self, record: CacheRecord, delta: Delta) -> None:
        """The cache was rearranged between steps."""
        self.records[record.id] = (record, delta)
        self._changed(delta, time.monotonic_ns())

    def _changed(self, delta: Delta, now_ns: int) -> None:
        self.copied += delta.copied
        self.reallocations += delta.reallocations
        if delta.reallocations:
            if self._burst is None:
                self._burst = [now_ns, 0, 0, 0]
            self._burst[1] += 1
            self._burst[2] += delta.reallocations
            self._burst[3] += delta.copied
        else:
            self._end_burst()
        for src, dst, buffers, size in delta.moves:
            self.moved(now_ns, src, dst, buffers, size, None)

    def moved(self, t_ns: int, src: str, dst: str, buffers: int, size: int, duration_ns: int | None) -> None:
        """KV buffers changed device."""
        total = self.moves.setdefault((src, dst), [0, 0])
        total[0] += buffers
        total[1] += size
        found: dict[str, AttributeValue] = {"src": src, "dst": dst, "buffers": buffers, "bytes": size}
        if duration_ns is not None:
            found["duration_s"] = duration_ns / 1e9
        self.mark(t_ns, "kvobs.migration", found)

    def mark(self, t_ns: int, name: str, attributes: dict[str, AttributeValue]) -> None:
        """Note something that becomes a span event; the first 64 of a turn are kept."""
        if len(self.marks) < _MARKS:
            self.marks.append(Mark(t_ns, name, attributes))

    def _end_burst(self) -> None:
        if self._burst is not None:
            began, steps, count, copied = self._burst
            self.mark(began, "kvobs.reallocation_burst",
                      {"steps": steps, "reallocations": count, "copied_bytes": copied})
            self._burst = None

    def finish(self, new_per_row: int | None, new_tokens: int, prompt_tokens: int, cached_tokens: int, end_ns: int,
               outcome: str, shown: Callable[[str], str]) -> Turn:
        """The closed turn. ``new_per_row`` None counts the tokens that were fed back, as far as the turn came."""
        self._end_burst()
        if new_per_row is None:
            new_per_row = max(0, self.consumed - self.prompt)
            new_tokens = new_per_row * self.rows
        records = [record for record, _ in self.records.values()]
        last = [delta for _, delta in self.records.values()]
        first = self.first_ns if self.first_ns is not None else (end_ns if self.steps else None)
        tpot = None
        if self.first_ns is not None and new_per_row > 1:
            tpot = (end_ns - self.first_ns) // (new_per_row - 1)
        ids = self.opened.ids if self.opened is not None else ("", "", False)
        prefill = None if self.prefill_end_ns is None else self.prefill_end_ns - self.start_ns
        origin = records[0].origin if records and records[0].origin else None
        return Turn(
            t_ns=end_ns, start_ns=self.start_ns, wall_start_ns=self.wall_start_ns,
            origin=origin or Origin(SOURCE, self.model, _NOWHERE.cache, _NOWHERE.device, _NOWHERE.dtype),
            cache_id=records[0].id if records else 0, session=shown(self.session), priority=self.priority,
            turn=self.number, outcome=outcome, steps=self.steps, prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens, new_tokens=new_tokens,
            kv_bytes=sum(d.held for d in last), kv_reserved_bytes=sum(d.reserved for d in last),
            kv_largest_bytes=max((d.largest for d in last), default=0), reallocations=self.reallocations,
            bytes_written=self.written, bytes_copied=self.copied,
            migrations=tuple((src, dst, count, size) for (src, dst), (count, size) in self.moves.items()),
            ttft_ns=first - self.start_ns if first is not None and new_per_row else None, tpot_ns=tpot,
            prefill_ns=prefill, hook_ns=self.hook_ns, trace_id=ids[0], span_id=ids[1], sampled=ids[2])


def outcome_of(error: BaseException | None) -> str:
    """``ok``, ``out_of_memory``, ``cancelled`` or ``error``, by the exception that ended a call."""
    if error is None:
        return "ok"
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError") or (
            isinstance(error, RuntimeError) and any(
                words in str(error) for words in ("out of memory", "not enough memory", "can't allocate memory"))):
        return "out_of_memory"
    if isinstance(error, Exception) and type(error).__name__ != "CancelledError":
        return "error"
    return "cancelled"


class Turns:
    """Opens and closes turns: sessions, numbers, spans, events."""

    def __init__(self, emit: Emit, tracer: Callable[[], Tracer], names: sessions.Names,
                 numbers: sessions.TurnNumbers) -> None:
        self._emit, self._tracer, self._names, self._numbers = emit, tracer, names, numbers

    def open(self, owner: object, model: str, record: CacheRecord | None, outer: LiveTurn | None) -> LiveTurn:
        """A turn of the session in force, else of the cache's own session, else of a new one."""
        scope = sessions.current()
        priority, named = "normal", True
        if outer is not None:
            name, priority = f"{outer.session}/assistant", outer.priority
        elif scope is not None:
            name, priority = scope.id, scope.priority
        elif record is not None and record.session:
            name, named = record.session, record.named
        else:
            name, named = uuid.uuid4().hex[:12], False
        # A session that nobody named lives and dies with its cache: it takes no place among the named ones.
        number = self._numbers.next(name) if named else (record.turns if record is not None else 0) + 1
        if record is not None:
            record.belongs(name, number, named=named)
        return LiveTurn(owner, model, name, priority, number, named=named)

    def trace(self, turn: LiveTurn, attributes: Mapping[str, AttributeValue], parent: Context | None = None,
              *, attach: bool = True) -> None:
        """Open the turn's span."""
        turn.opened = open_turn(self._tracer(), turn.model, turn.wall_start_ns, attributes, parent=parent,
                                attach=attach)

    def leave(self, turn: LiveTurn) -> None:
        """Make the caller's span current again."""
        if turn.opened is not None:
            turn.opened.leave()

    def abandon(self, turn: LiveTurn) -> None:
        """End the span of a turn that could not be followed to its end; its sums would be wrong, so none are given."""
        if turn.opened is not None:
            turn.opened.span.end()

    def close(self, turn: LiveTurn, *, new_per_row: int | None, new_tokens: int, prompt_tokens: int,
              cached_tokens: int, end_ns: int, error: BaseException | None,
              attributes: Mapping[str, AttributeValue], outer: LiveTurn | None = None) -> None:
        """Emit the turn and end its span. An error that passes through nested turns is reported by the innermost."""
        outcome = outcome_of(error)
        closed = turn.finish(new_per_row, new_tokens, prompt_tokens, cached_tokens, end_ns, outcome,
                             self._names.shown)
        if outcome == "out_of_memory":
            turn.mark(end_ns, "kvobs.out_of_memory", {"kv_reserved_bytes": closed.kv_reserved_bytes})
            if turn.reported != id(error):
                self._emit(OutOfMemory(end_ns, closed.origin, closed.session, str(error)[:500]))
            if outer is not None:
                outer.reported = id(error)
        if turn.opened is not None:
            turn.opened.close(closed, turn.marks, attributes, error)
        self._emit(closed)
