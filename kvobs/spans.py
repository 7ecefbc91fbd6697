"""Turns as spans after the OpenTelemetry GenAI conventions.

The call's span is opened on the engine's thread and made current, so that the caller's span is its parent and
what runs inside the call becomes its child; prefill and decode are written at the end from the turn's times.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from opentelemetry import context, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from kvobs.analysis import article_fragmentation_rate, write_amplification
from kvobs.model import Origin, Turn

OPERATION = "text_completion"
PROCESS = "process"  # the scope of what concerns all turns
MOST_HEARD = 64  # by a turn


class Mark(msgspec.Struct, frozen=True, gc=False):
    """Something that happened within a turn: becomes a span event. ``t_ns`` is monotonic."""

    t_ns: int
    name: str
    attributes: dict[str, AttributeValue]


class Listener(Protocol):
    """A turn that runs. ``hear`` is called on another thread than the engine's."""

    def hear(self, scope: str, mark: Mark) -> None:
        """Something happened to a device, a model's pool or the process."""
        ...


_running: dict[int, weakref.ref[Listener]] = {}


def listen(turn: Listener) -> None:
    """Have a turn hear what is announced until it is gone, or ``deafen`` is called."""
    key = id(turn)
    _running[key] = weakref.ref(turn, lambda _: _running.pop(key, None))


def deafen(turn: Listener) -> None:
    """The turn ends and hears nothing more."""
    _running.pop(id(turn), None)


def announce(scope: str, mark: Mark) -> None:
    """Tell the turns that run now what happened to a scope: ``DEVICE``, ``MODEL@DEVICE`` or ``process``."""
    for one in list(_running.values()):
        turn = one()
        if turn is not None:
            turn.hear(scope, mark)


def scopes_of(origin: Origin) -> tuple[str, str, str]:
    """The scopes that a turn belongs to."""
    return PROCESS, origin.device, f"{origin.model}@{origin.device}"


def inner(tracer: Tracer) -> Tracer:
    """The tracer of spans below a turn's own: the same one, unless the setting ``span_depth`` leaves them out."""
    found: Tracer = getattr(tracer, "inner", tracer)
    return found


class OpenTurn:
    """A started span. When attached it is current on this thread, and ``leave`` must run on the same thread."""

    __slots__ = ("__weakref__", "_heard", "_token", "_tracer", "span")

    def __init__(self, tracer: Tracer, span: Span, *, attach: bool = True) -> None:
        self._tracer = tracer
        self.span = span
        self._heard: list[tuple[str, Mark]] = []
        self._token = context.attach(trace.set_span_in_context(span)) if attach else None
        if span.is_recording():
            listen(self)

    @property
    def ids(self) -> tuple[str, str, bool]:
        """Trace id, span id (hex; empty when no SDK records) and whether the trace is sampled."""
        found = self.span.get_span_context()
        if not found.is_valid:
            return "", "", False
        return trace.format_trace_id(found.trace_id), trace.format_span_id(found.span_id), found.trace_flags.sampled

    def hear(self, scope: str, mark: Mark) -> None:
        """Keep it until the turn ends and it is known where it ran; of another thread no span is touched."""
        if len(self._heard) < MOST_HEARD:
            self._heard.append((scope, mark))

    def leave(self) -> None:
        """Make the parent current again (before the span ends)."""
        if self._token is not None:
            context.detach(self._token)

    def close(self, turn: Turn, marks: Sequence[Mark], attributes: Mapping[str, AttributeValue],
              error: BaseException | None, phases: Sequence[tuple[str, int, int]] | None = None) -> None:
        """Write the turn's totals, its events and its children, and end the span.

        Args:
            phases: the children as (name, start, end) in monotonic nanoseconds; by default prefill and decode, from
                the turn's own times.
        """
        deafen(self)
        if not self.span.is_recording():
            self.span.end()
            return
        shift = turn.wall_start_ns - turn.start_ns
        self.span.set_attributes(turn_attributes(turn))
        self.span.set_attributes(attributes)
        own = scopes_of(turn.origin)
        for mark in (*marks, *(mark for scope, mark in self._heard if scope in own)):
            self.span.add_event(mark.name, mark.attributes, timestamp=mark.t_ns + shift)
        if error is not None:
            self.span.record_exception(error, escaped=True)
            self.span.set_attribute("error.type", type(error).__qualname__)
            self.span.set_status(Status(StatusCode.ERROR, str(error)[:200]))
        if phases is None:
            phases = phases_of(turn)
        parent = trace.set_span_in_context(self.span)
        for name, start_ns, end_ns in phases:
            self._child(name, parent, start_ns + shift, end_ns + shift)
        self.span.end(turn.t_ns + shift)

    def _child(self, name: str, parent: context.Context, start_ns: int, end_ns: int) -> None:
        inner(self._tracer).start_span(name, parent, start_time=start_ns).end(end_ns)


def phases_of(turn: Turn) -> list[tuple[str, int, int]]:
    """Prefill and decode as (name, start, end) in monotonic nanoseconds, from the turn's own times."""
    if turn.prefill_ns is None:
        return []
    middle = turn.start_ns + turn.prefill_ns
    return [("prefill", turn.start_ns, middle)] + ([("decode", middle, turn.t_ns)] if turn.steps > 1 else [])


def open_turn(tracer: Tracer, model: str, wall_start_ns: int, attributes: Mapping[str, AttributeValue], *,
              parent: context.Context | None = None, attach: bool = True) -> OpenTurn:
    """Start the span of a call or request.

    Args:
        parent: context whose span is the parent; the current one when None.
        attach: make the span current on this thread (for calls; not for requests served by another thread).
    """
    span = tracer.start_span(f"{OPERATION} {model}" if model else OPERATION, parent, kind=SpanKind.INTERNAL,
                             attributes={"gen_ai.operation.name": OPERATION, "gen_ai.request.model": model,
                                         **attributes},
                             start_time=wall_start_ns)
    return OpenTurn(tracer, span, attach=attach)


class LayerCall(msgspec.Struct, frozen=True, gc=False):
    """A layer's attention call in a sampled pass; times are monotonic nanoseconds."""

    layer: int
    kind: str
    implementation: str
    began_ns: int
    ended_ns: int


def layer_spans(tracer: Tracer, turn: Span, shift_ns: int, layers: Sequence[LayerCall],
                updates_ns: Mapping[int, int]) -> None:
    """One sampled pass below a turn's span: a span ``sampled step`` with a child per layer's attention call.

    Args:
        shift_ns: what turns monotonic into Unix nanoseconds.
        updates_ns: how long ``Cache.update`` took, by layer.
    """
    if not turn.is_recording() or not layers:
        return
    tracer = inner(tracer)
    step = tracer.start_span("sampled step", trace.set_span_in_context(turn), start_time=layers[0].began_ns + shift_ns,
                             attributes={"kvobs.layers": len(layers)})
    parent = trace.set_span_in_context(step)
    for found in layers:
        attributes: dict[str, AttributeValue] = {
            "kvobs.layer": found.layer, "kvobs.layer.kind": found.kind,
            "kvobs.attention.implementation": found.implementation}
        if found.layer in updates_ns:
            attributes["kvobs.cache.update_s"] = updates_ns[found.layer] / 1e9
        tracer.start_span(f"attention layer {found.layer}", parent, start_time=found.began_ns + shift_ns,
                          attributes=attributes).end(found.ended_ns + shift_ns)
    step.end(layers[-1].ended_ns + shift_ns)


def turn_attributes(turn: Turn) -> dict[str, AttributeValue]:
    """The span attributes of a turn; absent values are left out."""
    found: dict[str, AttributeValue | None] = {
        "gen_ai.provider.name": turn.origin.source,
        "gen_ai.usage.input_tokens": turn.prompt_tokens,
        "gen_ai.usage.output_tokens": turn.new_tokens,
        "gen_ai.usage.cache_read.input_tokens": turn.cached_tokens,
        "gen_ai.conversation.id": turn.session or None,
        "kvobs.session.priority": turn.priority,
        "kvobs.turn": turn.turn,
        "kvobs.steps": turn.steps,
        "kvobs.cache": turn.origin.cache,
        "kvobs.device": turn.origin.device,
        "kvobs.dtype": turn.origin.dtype,
        "kvobs.kv.bytes": turn.kv_bytes,
        "kvobs.kv.reserved_bytes": turn.kv_reserved_bytes,
        "kvobs.kv.largest_bytes": turn.kv_largest_bytes,
        "kvobs.kv.fragmentation.article": article_fragmentation_rate(turn.kv_reserved_bytes, turn.kv_largest_bytes),
        "kvobs.kv.reallocations": turn.reallocations,
        "kvobs.kv.written_bytes": turn.bytes_written,
        "kvobs.kv.copied_bytes": turn.bytes_copied,
        "kvobs.kv.write_amplification": write_amplification(turn.bytes_written, turn.bytes_copied),
        "kvobs.migrations": sum(count for _, _, count, _ in turn.migrations),
        "kvobs.migrated_bytes": sum(moved for _, _, _, moved in turn.migrations),
        "kvobs.ttft_s": None if turn.ttft_ns is None else turn.ttft_ns / 1e9,
        "kvobs.tpot_s": None if turn.tpot_ns is None else turn.tpot_ns / 1e9,
        "kvobs.outcome": turn.outcome,
    }
    if not turn.cache_id:  # no cache was seen: nothing is known of one
        unknown = ("kvobs.kv.", "kvobs.cache", "kvobs.device", "kvobs.dtype")
        found = {key: value for key, value in found.items() if not key.startswith(unknown)}
    return {key: value for key, value in found.items() if value is not None}
