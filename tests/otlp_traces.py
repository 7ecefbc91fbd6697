"""Traces of kvobs as OpenTelemetry's SDK exports them, and the documents in which Jaeger would give them back."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvobs import spans
from kvobs.spans import LayerCall, Mark
from tests.events import turn

WALL = 1_700_000_000_000_000_000


def exported(*exporters: SpanExporter) -> list[ReadableSpan]:
    """The spans of a caller with two turns: one with events and a sampled step, and one that fails.

    They go to the ``exporters`` too.
    """
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "chat"}))
    for exporter in (memory, *exporters):
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("kvobs")
    with tracer.start_as_current_span("POST /chat", start_time=WALL - 7_000_000, end_on_exit=False) as caller:
        opened = spans.open_turn(tracer, "tiny", WALL, {})
        spans.layer_spans(tracer, opened.span, WALL - 1_000_000_000, [
            LayerCall(0, "full", "sdpa", 1_500_000_000, 1_500_090_000),
            LayerCall(1, "full", "sdpa", 1_500_100_000, 1_500_100_700)], {0: 4_000})
        opened.leave()
        opened.close(turn(), [Mark(1_250_000_000, "kvobs.migration", {"src": "cpu", "dst": "meta", "bytes": 64}),
                              Mark(2_000_000_500, "kvobs.reallocation_burst", {"steps": 3, "copied_bytes": 900})],
                     {"kvobs.list": ["a", "b"]}, None)
        failing = spans.open_turn(tracer, "tiny", WALL + 3_000_000_000, {})
        failing.leave()
        failing.close(turn(wall_start_ns=WALL + 3_000_000_000, outcome="out_of_memory", prefill_ns=None), [], {},
                      MemoryError("no room\x1b[2J"))
    caller.end(WALL + 5_500_000_000)
    provider.shutdown()
    return list(memory.get_finished_spans())


def trace_id(found: Sequence[ReadableSpan]) -> str:
    (only,) = {span.context.trace_id for span in found if span.context}
    return trace.format_trace_id(only)


def span_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return trace.format_span_id(span.context.span_id)


def v3(found: Sequence[ReadableSpan], *, as_hex: bool = False) -> dict[str, Any]:
    """TracesData as protocol buffers' own JSON has it (ids in base64), or as OTLP does (ids in hex)."""
    document: dict[str, Any] = MessageToDict(encode_spans(found), use_integers_for_enums=True)
    for group in document["resourceSpans"] if as_hex else ():
        for scope in group["scopeSpans"]:
            for span in scope["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    if key in span:
                        span[key] = base64.b64decode(span[key]).hex()
    return document


def envelope(*documents: dict[str, Any]) -> str:
    """The answer of the API v3: each document in its envelope, one a line."""
    return "\n".join(json.dumps({"result": one}) for one in documents) + "\n"


def legacy(found: Sequence[ReadableSpan]) -> dict[str, Any]:
    """The answer of the older API, whose ids may lack leading zeros and whose times are whole microseconds."""
    return {"data": [{"traceID": trace_id(found).lstrip("0"), "spans": [_legacy_span(span) for span in found],
                      "processes": {"p1": {"serviceName": "chat", "tags": []}}, "warnings": None}], "errors": None}


def _legacy_span(span: ReadableSpan) -> dict[str, Any]:
    begin, end = span.start_time or 0, span.end_time or 0
    failed = not (span.status.is_ok or span.status.is_unset)
    return {
        "traceID": trace_id([span]).lstrip("0"), "spanID": span_id(span).lstrip("0"), "operationName": span.name,
        "references": [] if span.parent is None else [{
            "refType": "CHILD_OF", "traceID": trace_id([span]).lstrip("0"),
            "spanID": trace.format_span_id(span.parent.span_id).lstrip("0")}],
        "startTime": begin // 1_000, "duration": end // 1_000 - begin // 1_000, "processID": "p1", "warnings": None,
        "tags": [{"key": "error", "type": "bool", "value": True}] if failed else None,
        "logs": [{"timestamp": event.timestamp // 1_000, "fields": [
            {"key": "event", "type": "string", "value": event.name},
            *({"key": key, "type": "string", "value": str(value)} for key, value in (event.attributes or {}).items())]}
            for event in span.events]}
