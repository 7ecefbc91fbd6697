"""Spans of turns, read back from the SDK's in-memory exporter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace

from kvobs import spans
from tests.events import turn

pytest.importorskip("opentelemetry.sdk.trace", reason="The OpenTelemetry SDK is missing: pip install 'kvobs[otel]'.")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

WALL = 1_700_000_000_000_000_000


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exported: InMemorySpanExporter) -> Iterator[trace.Tracer]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    yield provider.get_tracer("test")
    provider.shutdown()


def by_name(exported: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exported.get_finished_spans()}


def run(tracer: trace.Tracer, **fields: object) -> spans.OpenTurn:
    """A whole turn: opened, left and closed."""
    error = fields.pop("error", None)
    marks = fields.pop("marks", ())
    opened = spans.open_turn(tracer, "tiny", WALL, {"kvobs.streaming": False})
    opened.leave()
    opened.close(turn(**fields), marks, {"gen_ai.request.max_tokens": 5}, error)  # type: ignore[arg-type]
    return opened


def test_a_turn_is_named_and_timed(tracer: trace.Tracer, exported: InMemorySpanExporter) -> None:
    """The span is ``{operation} {model}``, starts at the call's wall time and lasts the turn's monotonic duration."""
    run(tracer)
    span = by_name(exported)["text_completion tiny"]
    assert (span.start_time, span.end_time) == (WALL, WALL + 2_000_000_000)
    assert span.kind is trace.SpanKind.INTERNAL
    assert span.status.is_unset


def test_prefill_and_decode_divide_the_turn(tracer: trace.Tracer, exported: InMemorySpanExporter) -> None:
    """Two children share the turn without gap or overlap: prefill until its time, decode to the end."""
    run(tracer)
    found = by_name(exported)
    root, prefill, decode = found["text_completion tiny"], found["prefill"], found["decode"]
    assert (prefill.start_time, prefill.end_time) == (WALL, WALL + 400_000_000)
    assert (decode.start_time, decode.end_time) == (WALL + 400_000_000, WALL + 2_000_000_000)
    assert {prefill.parent.span_id, decode.parent.span_id} == {root.context.span_id}


@pytest.mark.parametrize(("fields", "names"), [
    ({"steps": 1}, {"text_completion tiny", "prefill"}),
    ({"prefill_ns": None}, {"text_completion tiny"}),
])
def test_children_that_did_not_happen_are_absent(tracer: trace.Tracer, exported: InMemorySpanExporter,
                                                 fields: dict[str, object], names: set[str]) -> None:
    """One step has no decode; a turn that never finished its prefill has no children."""
    run(tracer, **fields)
    assert set(by_name(exported)) == names


def test_the_totals_of_a_turn(tracer: trace.Tracer, exported: InMemorySpanExporter) -> None:
    """Every attribute equals the figure worked out by hand from the turn."""
    run(tracer)
    assert dict(by_name(exported)["text_completion tiny"].attributes) == {
        "gen_ai.operation.name": "text_completion", "gen_ai.request.model": "tiny", "kvobs.streaming": False,
        "gen_ai.request.max_tokens": 5, "gen_ai.provider.name": "transformers", "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 5, "gen_ai.usage.cache_read.input_tokens": 4, "gen_ai.conversation.id": "anna",
        "kvobs.session.priority": "normal", "kvobs.turn": 2, "kvobs.steps": 5, "kvobs.cache": "DynamicCache",
        "kvobs.device": "cpu", "kvobs.dtype": "float32", "kvobs.kv.bytes": 1_000, "kvobs.kv.reserved_bytes": 1_600,
        "kvobs.kv.largest_bytes": 400, "kvobs.kv.fragmentation.article": 0.75, "kvobs.kv.reallocations": 20,
        "kvobs.kv.written_bytes": 500, "kvobs.kv.copied_bytes": 1_500, "kvobs.kv.write_amplification": 4.0,
        "kvobs.migrations": 2, "kvobs.migrated_bytes": 64, "kvobs.ttft_s": 0.5, "kvobs.tpot_s": 0.375,
        "kvobs.outcome": "ok"}


def test_what_is_absent_is_not_zero(tracer: trace.Tracer, exported: InMemorySpanExporter) -> None:
    """No session, no token and nothing reserved or written: those attributes do not exist."""
    run(tracer, session="", ttft_ns=None, tpot_ns=None, kv_reserved_bytes=0, kv_largest_bytes=0, bytes_written=0)
    attributes = by_name(exported)["text_completion tiny"].attributes
    assert not {"gen_ai.conversation.id", "kvobs.ttft_s", "kvobs.tpot_s", "kvobs.kv.fragmentation.article",
                "kvobs.kv.write_amplification"} & set(attributes)


def test_marks_become_events_at_their_wall_time(tracer: trace.Tracer, exported: InMemorySpanExporter) -> None:
    """An event's monotonic time is shifted like the span's."""
    run(tracer, marks=[spans.Mark(1_250_000_000, "kvobs.migration", {"src": "cpu"})])
    (event,) = by_name(exported)["text_completion tiny"].events
    assert (event.name, event.timestamp, dict(event.attributes)) == (
        "kvobs.migration", WALL + 250_000_000, {"src": "cpu"})


def test_an_error_is_recorded(tracer: trace.Tracer, exported: InMemorySpanExporter) -> None:
    """The status is ERROR with a bounded text, ``error.type`` names the class, the exception is an event."""
    run(tracer, error=MemoryError("x" * 1_000), outcome="out_of_memory")
    span = by_name(exported)["text_completion tiny"]
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.status.description == "x" * 200
    assert span.attributes["error.type"] == "MemoryError"
    assert span.attributes["kvobs.outcome"] == "out_of_memory"
    assert [event.name for event in span.events] == ["exception"]


def test_the_caller_s_span_is_the_parent(tracer: trace.Tracer, exported: InMemorySpanExporter) -> None:
    """A turn inside a web framework's span becomes its child, and that span is current again afterwards."""
    with tracer.start_as_current_span("POST /chat") as request:
        opened = spans.open_turn(tracer, "tiny", WALL, {})
        assert trace.get_current_span() is opened.span
        with tracer.start_as_current_span("inside"):
            pass
        opened.leave()
        assert trace.get_current_span() is request
        opened.close(turn(), (), {}, None)
    found = by_name(exported)
    root = found["text_completion tiny"]
    assert root.parent.span_id == found["POST /chat"].context.span_id
    assert found["inside"].parent.span_id == root.context.span_id
    assert {span.context.trace_id for span in found.values()} == {root.context.trace_id}


def test_ids_are_those_that_arrive(tracer: trace.Tracer, exported: InMemorySpanExporter) -> None:
    """The ids that events and exemplars carry are the exported span's, in lower-case hex of full length."""
    opened = run(tracer)
    span = by_name(exported)["text_completion tiny"]
    assert opened.ids == (f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", True)


def test_a_span_that_is_not_sampled_says_so() -> None:
    """An unsampled trace has ids but is not sampled, and closing it exports nothing and raises nothing."""
    exported = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    opened = run(provider.get_tracer("test"))
    assert opened.ids[2] is False
    assert exported.get_finished_spans() == ()
    provider.shutdown()


def test_an_unnamed_model_is_not_in_the_name(tracer: trace.Tracer, exported: InMemorySpanExporter) -> None:
    """Without a model's name the span is called by its operation alone."""
    opened = spans.open_turn(tracer, "", WALL, {})
    opened.leave()
    opened.close(turn(prefill_ns=None), (), {}, None)
    assert set(by_name(exported)) == {"text_completion"}
