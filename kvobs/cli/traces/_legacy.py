"""What Jaeger's older query API answers, whose times are whole microseconds."""

from __future__ import annotations

import msgspec

from kvobs.cli.traces._model import Event, Span, TraceError
from kvobs.cli.traces._otlp import Whole, hex_of, nanoseconds, told


class Tag(msgspec.Struct):
    """A key and its value."""

    key: str = ""
    value: bool | int | float | str | None = None


class Log(msgspec.Struct):
    """An event; its name is the field ``event``."""

    timestamp: Whole | None = None
    fields: list[Tag] | None = None


class Reference(msgspec.Struct, rename={"kind": "refType", "trace_id": "traceID", "span_id": "spanID"}):
    """What a span is a child of, or follows."""

    kind: str = ""
    trace_id: str = ""
    span_id: str = ""


class LegacySpan(msgspec.Struct, rename={
        "trace_id": "traceID", "span_id": "spanID", "parent_id": "parentSpanID", "operation": "operationName",
        "start": "startTime", "process_id": "processID"}):
    """A span."""

    trace_id: str = ""
    span_id: str = ""
    parent_id: str | None = None
    operation: str = ""
    references: list[Reference] | None = None
    start: Whole | None = None
    duration: Whole | None = None
    tags: list[Tag] | None = None
    logs: list[Log] | None = None
    process_id: str = ""


class Process(msgspec.Struct, rename={"service": "serviceName"}):
    """Who wrote a span."""

    service: str = ""


class LegacyTrace(msgspec.Struct):
    """A trace."""

    spans: list[LegacySpan] | None = None
    processes: dict[str, Process] | None = None


class Answer(msgspec.Struct):
    """The whole answer. Without ``data`` it is none."""

    data: list[LegacyTrace] | None


def read(document: bytes) -> list[tuple[str, Span]]:
    """The spans of an answer, each with the id (hex) of its trace.

    Raises:
        TraceError: it is something else.
    """
    try:
        found = msgspec.json.decode(document, type=Answer)
        return [(_id(span.trace_id, 16), _span(span, trace.processes or {}))
                for trace in found.data or () for span in trace.spans or ()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise TraceError(f"it is not a trace: {told(error)}") from None


def _id(text: str, size: int) -> str:
    """Leading zeros may be missing."""
    return hex_of(text.zfill(2 * size), size) if text else ""


def _span(one: LegacySpan, processes: dict[str, Process]) -> Span:
    tags = {tag.key: tag.value for tag in one.tags or ()}
    begin, took = nanoseconds(one.start), nanoseconds(one.duration) or 0
    failed = tags.get("error") in (True, "true") or tags.get("otel.status_code") == "ERROR"
    process = processes.get(one.process_id)
    return Span(
        name=one.operation, service=process.service if process else "", span_id=_id(one.span_id, 8),
        parent_id=_parent(one), start_ns=None if begin is None else begin * 1_000,
        end_ns=None if begin is None else (begin + took) * 1_000,
        error=str(tags.get("otel.status_description") or "") if failed else None, attributes=dict[str, object](tags),
        events=tuple(map(_event, one.logs or ())))


def _parent(one: LegacySpan) -> str:
    """The span that it is a child of, or else follows, in the same trace."""
    if one.parent_id:
        return _id(one.parent_id, 8)
    here = [found for found in one.references or ()
            if not found.trace_id or _id(found.trace_id, 16) == _id(one.trace_id, 16)]
    for kind in ("CHILD_OF", "FOLLOWS_FROM"):
        for found in here:
            if found.kind == kind:
                return _id(found.span_id, 8)
    return ""


def _event(log: Log) -> Event:
    fields = {tag.key: tag.value for tag in log.fields or ()}
    name = next((str(fields.pop(key)) for key in ("event", "message") if key in fields), "log")
    at = nanoseconds(log.timestamp)
    return Event(None if at is None else at * 1_000, name, dict[str, object](fields))
