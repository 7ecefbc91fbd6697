"""What traces show of a breaker. Each decision is an event of every turn that runs in its scope, and a span of its own;
what an engine did about it is a span that is linked to those of the decisions that ordered it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Tracer
from opentelemetry.util.types import AttributeValue

from kvobs import model, spans
from kvobs.breaker._breaker import LIMITS_NS, MOST_CAUSES, Cause

DECISION, TRANSITION, ACTION = "kvobs.breaker.decision", "kvobs.breaker.transition", "kvobs.breaker.action"


class Traces:
    """Writes the spans of one breaker. One thread calls."""

    def __init__(self, tracer: Callable[[], Tracer], wall: Callable[[], int]) -> None:
        """``wall`` is Unix nanoseconds."""
        self._tracer, self._wall = tracer, wall
        self._contexts: dict[model.Decided, SpanContext] = {}

    def tell(self, now_ns: int, events: Iterable[model.Event], causes: Mapping[int, Cause]) -> None:
        """Write what was decided and done; ``causes`` say why orders were given, by their generation. ``now_ns`` is
        the monotonic time of this call.
        """
        shift = self._wall() - now_ns
        for event in events:
            if isinstance(event, model.Decided):
                self._decided(event, shift)
            elif isinstance(event, model.ActionTaken):
                self._taken(event, causes.get(event.generation, ""), shift)

    def _decided(self, told: model.Decided, shift: int) -> None:
        said: dict[str, AttributeValue] = {
            "kvobs.breaker.scope": told.scope, "kvobs.breaker.policy": told.policy, "kvobs.breaker.mode": told.mode,
            "kvobs.breaker.level": told.level, "kvobs.breaker.before": told.before, "kvobs.breaker.after": told.after,
            "kvobs.breaker.reason": told.reason, "kvobs.breaker.generation": told.generation}
        spans.announce(told.scope, spans.Mark(told.t_ns, DECISION, said))
        read: dict[str, AttributeValue] = {f"kvobs.breaker.signal.{name}": value for name, value in told.readings}
        span = self._tracer().start_span(TRANSITION, Context(), start_time=told.t_ns + shift, attributes={
            **said, **read, "kvobs.breaker.rejected": told.rejected})
        span.end(told.t_ns + shift)
        self._contexts[told] = span.get_span_context()
        if len(self._contexts) > MOST_CAUSES:
            del self._contexts[next(iter(self._contexts))]

    def _taken(self, taken: model.ActionTaken, cause: Cause, shift: int) -> None:
        decisions = () if isinstance(cause, str) else cause
        why = cause if isinstance(cause, str) else cause[0].reason
        said: dict[str, AttributeValue] = {
            "kvobs.breaker.actuator": taken.actuator, "kvobs.breaker.kind": taken.kind,
            "kvobs.breaker.level": taken.level, "kvobs.breaker.undo": taken.undo, "kvobs.breaker.done": taken.done,
            "kvobs.breaker.regained_bytes": taken.bytes, "kvobs.breaker.late": taken.late,
            "kvobs.breaker.limit_s": LIMITS_NS[taken.level - 1] / 1e9}
        said |= {name: text for name, text in (("kvobs.breaker.reason", why),
                                               ("kvobs.breaker.refusal", taken.reason)) if text}
        if decisions:
            said["kvobs.breaker.scope"] = ", ".join(one.scope for one in decisions)
        contexts = [self._contexts[one] for one in decisions if one in self._contexts]
        links = [Link(one) for one in contexts if one.is_valid] or None
        end = taken.t_ns + shift
        self._tracer().start_span(ACTION, Context(), start_time=end - taken.duration_ns, links=links,
                                  attributes=said).end(end)
