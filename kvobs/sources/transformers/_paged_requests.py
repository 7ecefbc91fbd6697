"""Requests of continuous batching, from ``add_request`` to their end, as turns and spans.

A request's span starts on the caller's thread with the caller's span as its parent, and ends on the engine's
thread; it is never current there. A request without a session of its own is a session of one turn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import context

from kvobs import sessions, spans
from kvobs.model import Emit, Origin, Turn
from kvobs.sources.transformers._caches import SOURCE
from kvobs.sources.transformers._calls import model_name

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

    from kvobs.sources.transformers._paged_pool import PoolRecord

CACHE = "PagedAttentionCache"
_MARKS_LIMIT = 64
_serial = itertools.count(1)


def origin_of(model: Any) -> Origin:
    """Whose events these are: the model's name, its device and its type of numbers."""
    return Origin(SOURCE, model_name(model), CACHE, str(model.device), str(model.dtype).removeprefix("torch."))


def token_counts(state: Any) -> tuple[int, int]:
    """Prompt and new tokens of a request, also after its generated tokens became part of a longer prompt."""
    prompt = state._true_initial_tokens or len(state.initial_tokens)
    return prompt, len(state.initial_tokens) - prompt + len(state.generated_tokens)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error says that a device or the host ran out of memory."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


class OpenRequest:
    """A request that has not ended. ``kv_bytes`` is what it held when it last gave its blocks back."""

    __slots__ = ("admitted_ns", "bytes_copied", "cached_tokens", "first_ns", "hook_ns", "id", "kv_bytes", "last_ns",
                 "marks", "migrations", "origin", "parent", "pool", "preemptions", "priority", "session", "span",
                 "start_ns", "steps", "tokens", "turn", "wall_ns")

    def __init__(self, origin: Origin, start_ns: int, wall_ns: int, parent: context.Context, priority: str,
                 session: str, span: spans.OpenTurn) -> None:
        self.origin = origin
        self.start_ns = start_ns
        self.wall_ns = wall_ns
        self.parent = parent
        self.priority = priority
        self.session = session
        self.span = span
        self.id = ""
        self.turn = 1
        self.pool: PoolRecord | None = None
        self.admitted_ns: int | None = None
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.steps = self.tokens = self.cached_tokens = self.kv_bytes = self.bytes_copied = self.preemptions = 0
        self.hook_ns = 0
        self.migrations: dict[tuple[str, str], list[int]] = {}
        self.marks: list[spans.Mark] = []

    def mark(self, name: str, t_ns: int, attributes: dict[str, AttributeValue]) -> None:
        """Remember a span event (the first 64)."""
        if len(self.marks) < _MARKS_LIMIT:
            self.marks.append(spans.Mark(t_ns, name, attributes))

    def moved(self, src: str, dst: str, buffers: int, size_bytes: int) -> None:
        """Blocks of this request changed device."""
        total = self.migrations.setdefault((src, dst), [0, 0])
        total[0] += buffers
        total[1] += size_bytes


class Desk:
    """Opens and closes requests; shared by all managers of the process."""

    def __init__(self, tracer: Any, emit: Emit, names: sessions.Names, turns: sessions.TurnNumbers) -> None:
        self._tracer = tracer
        self._emit = emit
        self._names = names
        self._turns = turns

    def open(self, origin: Origin) -> OpenRequest:
        """A request as its caller hands it in, before it has an id."""
        start_ns, wall_ns = time.monotonic_ns(), time.time_ns()
        scope = sessions.current()
        return self._opened(origin, start_ns, wall_ns, context.get_current(), scope.priority if scope else "normal",
                            scope.id if scope else "")

    def _opened(self, origin: Origin, start_ns: int, wall_ns: int, parent: context.Context, priority: str,
                session: str) -> OpenRequest:
        tracer: Tracer = self._tracer()
        span = spans.open_turn(tracer, origin.model, wall_ns, {}, parent=parent, attach=False)
        request = OpenRequest(origin, start_ns, wall_ns, parent, priority, session, span)
        request.hook_ns = time.monotonic_ns() - start_ns
        return request

    def name(self, request: OpenRequest, request_id: str, serial: int) -> None:
        """The engine gave the request its id. Ids repeat between managers, so each manager numbers its own."""
        request.id = request_id
        request.turn = self._turns.next(request.session or f"{serial}:{request_id}")

    def forked(self, parent: OpenRequest, request_id: str) -> OpenRequest:
        """One more answer to the same prompt: same session, same turn, own span."""
        began = time.monotonic_ns()
        child = self._opened(parent.origin, parent.start_ns, parent.wall_ns, parent.parent, parent.priority,
                             parent.session)
        child.hook_ns = time.monotonic_ns() - began
        child.id, child.turn, child.pool, child.admitted_ns = request_id, parent.turn, parent.pool, parent.admitted_ns
        return child

    def close(self, request: OpenRequest, outcome: str, tokens: tuple[int, int], error: BaseException | None) -> None:
        """Emit the turn and end the span."""
        now = time.monotonic_ns()
        pool = request.pool
        prompt, new = tokens
        first, last = request.first_ns, request.last_ns
        trace_id, span_id, sampled = request.span.ids
        if request.admitted_ns is not None:
            request.mark("kvobs.scheduled", request.admitted_ns, {})
        turn = Turn(
            t_ns=now, start_ns=request.start_ns, wall_start_ns=request.wall_ns, origin=request.origin,
            cache_id=pool.cache_id if pool else 0, session=self._names.shown(request.session or request.id),
            priority=request.priority, turn=request.turn, outcome=outcome, steps=request.steps, prompt_tokens=prompt,
            cached_tokens=request.cached_tokens, new_tokens=new,
            kv_bytes=(pool.held_by(request.id) if pool else 0) or request.kv_bytes,
            kv_reserved_bytes=pool.reserved_bytes if pool else 0, kv_largest_bytes=pool.reserved_bytes if pool else 0,
            reallocations=0, bytes_written=request.tokens * pool.bytes_per_token if pool else 0,
            bytes_copied=request.bytes_copied,
            migrations=tuple((src, dst, number, size) for (src, dst), (number, size) in request.migrations.items()),
            ttft_ns=first - request.start_ns if first is not None and new else None,
            tpot_ns=(last - first) // (new - 1) if first is not None and last is not None and new > 1 else None,
            prefill_ns=first - request.start_ns if first is not None else None,
            hook_ns=request.hook_ns, trace_id=trace_id, span_id=span_id, sampled=sampled)
        request.span.close(turn, request.marks, {"kvobs.request.preemptions": request.preemptions}, error)
        self._emit(turn)


class Requests:
    """The open requests of one manager, by id; written by callers' threads and the engine's thread."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._serial = next(_serial)
        self._open: dict[str, OpenRequest] = {}
        self.hook_ns = 0

    def name(self, request: OpenRequest, request_id: str) -> None:
        """The engine gave the request its id (before any other thread can see it)."""
        self._desk.name(request, request_id, self._serial)
        replaced = self._open.get(request_id)
        self._open[request_id] = request
        if replaced is not None:  # the engine forgets the older of two requests with one id
            self._desk.close(replaced, "cancelled", (0, 0), None)

    def take_hook_ns(self) -> int:
        """Time kvobs spent on the engine's thread for this manager since the last call."""
        spent, self.hook_ns = self.hook_ns, 0
        return spent

    def get(self, request_id: str) -> OpenRequest | None:
        """The open request with this id."""
        return self._open.get(request_id)

    def fork(self, parent: OpenRequest, request_ids: Sequence[str]) -> list[OpenRequest]:
        """Open the further answers of a request."""
        children = [self._desk.forked(parent, request_id) for request_id in request_ids]
        for child in children:
            self._open[child.id] = child
        return children

    def end(self, request_id: str, outcome: str, tokens: tuple[int, int], error: BaseException | None = None) -> None:
        """Close the request once; unknown ids (added before kvobs, or ended already) are none of ours."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self._desk.close(request, outcome, tokens, error)

    def forget(self, request: OpenRequest) -> None:
        """The engine refused the request: no turn took place."""
        if self._open.get(request.id) is request:
            del self._open[request.id]
        request.span.span.end()

    def drop_all(self) -> int:
        """End the spans of requests that nobody will finish under our eyes; returns how many."""
        dropped = 0
        while self._open:
            _, request = self._open.popitem()
            request.span.span.end()
            dropped += 1
        return dropped
