"""Requests of vLLM's engine core from their arrival at the scheduler to their end, as phases, turns and spans.

A request is queued until it is admitted, in prefill until its first token, then in decode; after a preemption it is
preempted until it is admitted again, then in prefill again. Its time begins when the engine core's process receives it
(see ``_arrivals``): what the API server did before (tokenisation, the way to this process) is not in it.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvobs import sessions, spans
from kvobs.model import Emit, Origin, RequestPhase, Turn
from kvobs.sessions import PRIORITIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

SOURCE = "vllm"
SESSION, PRIORITY, SPANS, PHASES = "kvobs-session", "kvobs-priority", "kvobs-spans", "kvobs-phases"
FRONT_END = "frontend"
_MARKS_LIMIT = 64
_PHASES_LIMIT = 64
_OUTCOMES = {"FINISHED_ABORTED": "cancelled", "FINISHED_ERROR": "error", "FINISHED_IGNORED": "error"}


def outcome_of(request: Any) -> str:
    """How a request that ended did, in a turn's words.

    A stop string is found in the front end, which then aborts the request in the engine core, just as when the client
    goes away: of a request that has stop strings the engine core cannot know which it was.
    """
    outcome = _OUTCOMES.get(getattr(request.status, "name", ""), "ok")
    if outcome == "cancelled" and getattr(getattr(request, "sampling_params", None), "stop", None):
        return "stopped"
    return outcome


def headers_of(request: Any) -> dict[str, str]:
    """The texts that came with a request from the front end."""
    return dict(getattr(request, "trace_headers", None) or {})


def _named(request: Any) -> str:
    return str(getattr(request, "session_id", None) or headers_of(request).get(SESSION) or "")


class OpenRequest:
    """A request that has not ended."""

    __slots__ = ("__weakref__", "arrived_ns", "cached_tokens", "evicted", "first_ns", "high", "id", "marks", "outputs",
                 "phase", "phases", "preemptions", "priority", "recomputed", "refused", "remote", "request", "scopes",
                 "session", "since_ns", "span", "steps", "tokens", "turn", "wall_ns")

    def __init__(self, request: Any, origin: Origin, now_ns: int, wall_ns: int) -> None:
        self.request = request
        self.scopes = spans.scopes_of(origin)
        self.id: str = request.request_id
        self.arrived_ns = self.since_ns = now_ns
        self.wall_ns = wall_ns
        self.phase = "queued"
        self.phases: list[tuple[str, int, int]] = []
        self.marks: list[spans.Mark] = []
        self.first_ns: int | None = None
        self.steps = self.tokens = self.cached_tokens = self.preemptions = 0
        self.outputs = 0  # tokens it had generated when it was admitted
        self.high = 0  # tokens that had been computed when it was preempted
        self.evicted = self.recomputed = 0
        self.refused = False  # since it last got blocks
        self.remote = False  # its spans are written by the front end
        self.session = ""
        self.priority = "normal"
        self.turn = 1
        self.span: spans.OpenTurn | None = None

    def mark(self, name: str, t_ns: int, attributes: dict[str, AttributeValue]) -> None:
        """Remember a span event (the first 64)."""
        if len(self.marks) < _MARKS_LIMIT:
            self.marks.append(spans.Mark(t_ns, name, attributes))

    def hear(self, scope: str, mark: spans.Mark) -> None:
        """Something happened that the front end's span is to tell."""
        if scope in self.scopes:
            self.mark(mark.name, mark.t_ns, mark.attributes)


class Sizes(NamedTuple):
    """Bytes of a request at its end: held by it, of its pool and the pool's largest buffer, and written for it."""

    held: int
    pool: int
    buffer: int
    written: int


class Desk:
    """Opens and closes the requests of one process."""

    def __init__(self, tracer: Callable[[], Tracer], emit: Emit, names: sessions.Names,
                 turns: sessions.TurnNumbers) -> None:
        self._tracer = tracer
        self._emit = emit
        self._names = names
        self._turns = turns

    def session_of(self, request: Any) -> str:
        """The session of a request as it may be shown; one without is a session of its own."""
        return self._names.shown(_named(request) or request.request_id)

    def open(self, request: Any, origin: Origin, received_ns: int | None) -> OpenRequest:
        """A request that the scheduler has just taken in, and when the engine core received it, where that was seen."""
        now = time.monotonic_ns()
        arrived = now if received_ns is None else received_ns
        found = OpenRequest(request, origin, arrived, time.time_ns() - (now - arrived))
        headers = headers_of(request)
        priority = headers.get(PRIORITY, "")
        found.priority = priority if priority in PRIORITIES else "normal"
        found.session = self.session_of(request)
        found.turn = self._turns.next(_named(request) or found.id)
        found.remote = headers.get(SPANS) == FRONT_END
        if found.remote:
            spans.listen(found)
        else:
            parent = _parent(headers)
            found.span = spans.open_turn(self._tracer(), origin.model, found.wall_ns, {"kvobs.request": found.id},
                                         parent=parent, attach=False)
        return found

    def enter(self, found: OpenRequest, phase: str, now_ns: int, origin: Origin, cache_id: int, blocks: int,
              outcome: str = "") -> None:
        """The phase a request was in ends; another begins, or, with an outcome, none."""
        if len(found.phases) < _PHASES_LIMIT:
            found.phases.append((found.phase, found.since_ns, now_ns))
        self._emit(RequestPhase(now_ns, found.since_ns, origin, cache_id, found.id, found.session, found.phase, outcome,
                                blocks))
        found.phase, found.since_ns = phase, now_ns
        if found.remote:
            # At each transition: of a request that a stop string ends, the front end sees no last output.
            found.request.trace_headers = {**headers_of(found.request), PHASES: told(found)}

    def close(self, found: OpenRequest, origin: Origin, cache_id: int, blocks: int, sizes: Sizes) -> None:
        """The request ended: emit its turn and end its span, or hand its phases to the front end."""
        spans.deafen(found)
        request, now = found.request, time.monotonic_ns()
        outcome, new = outcome_of(request), request.num_output_tokens
        if found.first_ns is None and new:
            found.first_ns = now
            self.enter(found, "decode", now, origin, cache_id, blocks)
        if found.evicted:
            found.mark("kvobs.prefix_evicted", now, {"kvobs.blocks": found.evicted})
        self.enter(found, "", now, origin, cache_id, blocks, outcome)
        first = found.first_ns
        # What was ended from outside may have waited since its last token.
        whole = first is not None and new > 1 and outcome == "ok"
        trace_id, span_id, sampled = found.span.ids if found.span is not None else _remote_ids(headers_of(request))
        turn = Turn(
            t_ns=now, start_ns=found.arrived_ns, wall_start_ns=found.wall_ns, origin=origin, cache_id=cache_id,
            session=found.session, priority=found.priority, turn=found.turn, outcome=outcome, steps=found.steps,
            prompt_tokens=request.num_prompt_tokens, cached_tokens=found.cached_tokens, new_tokens=new,
            kv_bytes=sizes.held, kv_reserved_bytes=sizes.pool, kv_largest_bytes=sizes.buffer, reallocations=0,
            bytes_written=sizes.written, bytes_copied=0, migrations=(),
            ttft_ns=first - found.arrived_ns if first is not None else None,
            tpot_ns=(now - first) // (new - 1) if first is not None and whole else None,
            prefill_ns=first - found.arrived_ns if first is not None else None,
            hook_ns=0,  # that of all its hooks is in the steps
            trace_id=trace_id, span_id=span_id, sampled=sampled)
        totals: dict[str, AttributeValue] = {
            "kvobs.request.preemptions": found.preemptions, "kvobs.kv.recomputed_tokens": found.recomputed}
        if found.span is not None:
            found.span.close(turn, found.marks, totals, None, found.phases)
        self._emit(turn)


def told(found: OpenRequest) -> str:
    """The phases of a request with their events, for the front end, in Unix nanoseconds.

    A list of [name, start, end, [[event, time, attributes], ...]] as JSON; a phase that goes on has no end (null).
    """
    shift = found.wall_ns - found.arrived_ns
    phases: list[list[Any]] = [[name, start + shift, end + shift, []] for name, start, end in found.phases]
    if found.phase:
        phases.append([found.phase, found.since_ns + shift, None, []])
    for mark in found.marks:
        at = mark.t_ns + shift
        home = next((phase for phase in phases if phase[1] <= at and (phase[2] is None or at <= phase[2])), phases[-1])
        home[3].append([mark.name, at, mark.attributes])
    return json.dumps(phases)


def _parent(headers: Mapping[str, str]) -> context.Context | None:
    """The caller's span, where the front end told it; an empty context (a trace of its own) where it did not."""
    return TraceContextTextMapPropagator().extract(dict(headers), context.Context())


def _remote_ids(headers: Mapping[str, str]) -> tuple[str, str, bool]:
    parts = headers.get("traceparent", "").split("-")
    return (parts[1], "", parts[3][-1:] in "13579bdf") if len(parts) >= 4 and parts[3] else ("", "", False)
