"""The phases of a request below the span that the engine's own code writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="The OpenTelemetry SDK is not installed (extra otel).")
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span

from kvobs.sources.vllm import _children

EVENT = ["preempted", 160, {"cause": "blocks", "tokens": 12}]
PHASES = [["queue", 100, 120, []], ["prefill", 120, 150, []], ["decode", 150, None, [EVENT]]]


class Provider:
    """A stand-in for the module ``opentelemetry.trace`` of a process whose provider records."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def get_tracer(self, name: str) -> trace.Tracer:
        return self._provider.get_tracer(name)

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def manual_instrument(span_name: str, start_time: int, end_time: int | None = None, *,
                      attributes: dict[str, Any] | None = None) -> None:
    """A stand-in for an engine's function: it starts a span, fills it and ends it."""
    span = trace.get_tracer(__name__).start_span(span_name, start_time=start_time)
    span.set_attributes(attributes or {})
    span.end(end_time)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Provider:
    made = Provider()
    monkeypatch.setattr(trace, "get_tracer", made.get_tracer)
    return made


def test_the_engines_own_code_writes_the_same_span_and_it_is_shown(provider: Provider) -> None:
    """The span is the one that the unchanged function writes, and is told once, before its end."""
    seen: list[Span] = []
    showing = _children.showing(manual_instrument, seen.append)
    manual_instrument("plain", 5, 9, attributes={"a": 1})
    showing("shown", 5, end_time=9, attributes={"a": 1})
    plain, shown = provider.spans()["plain"], provider.spans()["shown"]
    assert [span.get_span_context() for span in seen] == [shown.get_span_context()]
    assert (shown.start_time, shown.end_time, shown.attributes, shown.kind, shown.instrumentation_scope) == (
        plain.start_time, plain.end_time, plain.attributes, plain.kind, plain.instrumentation_scope)
    assert manual_instrument.__globals__["trace"] is trace


def test_what_makes_its_span_otherwise_is_refused() -> None:
    """A function that is not known to take its tracer from ``trace`` is not run in another way than its own."""
    for unknown in (len, lambda: None):
        with pytest.raises(AttributeError, match="does not make its span as kvobs knows it"):
            _children.showing(unknown, lambda span: None)


def test_phases_become_children_with_their_times_and_events(provider: Provider) -> None:
    """Each phase is a child of the request's span, with the times and events that the engine told."""
    tracer = provider.get_tracer("kvobs")
    parent = tracer.start_span("llm_request", start_time=90)
    _children.write(tracer, parent, _children.told(json.dumps(PHASES)), 170)
    parent.end(175)
    found = provider.spans()
    assert {name: (span.start_time, span.end_time) for name, span in found.items()} == {
        "queue": (100, 120), "prefill": (120, 150), "decode": (150, 170), "llm_request": (90, 175)}
    for name in ("queue", "prefill", "decode"):
        assert found[name].parent == parent.get_span_context()
    assert [(event.name, event.timestamp, dict(event.attributes or {})) for event in found["decode"].events] == [
        ("preempted", 160, {"cause": "blocks", "tokens": 12})]


def test_an_open_phase_never_ends_before_it_began(provider: Provider) -> None:
    """Clocks of two processes may differ: a phase that goes on has no negative length."""
    tracer = provider.get_tracer("kvobs")
    _children.write(tracer, tracer.start_span("llm_request"), _children.told('[["decode", 500, null, []]]'), 100)
    assert (provider.spans()["decode"].start_time, provider.spans()["decode"].end_time) == (500, 500)


@pytest.mark.parametrize("text", ["", "{", "7", '[["queue"]]', '[["queue", "x", null, []]]', '[["q", 1, 2, [["e"]]]]'])
def test_what_is_not_phases_is_refused(text: str) -> None:
    """Text of another form raises one of the two named errors, which the hook turns into its own end."""
    with pytest.raises((ValueError, TypeError)):
        _children.told(text)
