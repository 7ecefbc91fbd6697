"""What Jaeger's query API v3 answers: OTLP as JSON, in a ``result`` envelope or several, one a line.

The published description has ids as base64 and enumerations as numbers, OTLP's own JSON has hex, and JSON of protocol
buffers may name enumerations: all are read.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

from kvobs.cli.traces._model import Event, Span, TraceError

Whole = int | str
MOST_NS = 2**64
_DEEPEST = 8  # of values in values


class Value(msgspec.Struct, rename="camel"):
    """An attribute's value: one of its fields is there."""

    string_value: str | None = None
    bool_value: bool | None = None
    int_value: Whole | None = None
    double_value: float | str | None = None
    bytes_value: str | None = None
    array_value: Values | None = None
    kvlist_value: Attributes | None = None


class Values(msgspec.Struct):
    """A list of values."""

    values: list[Value] | None = None


class Attribute(msgspec.Struct):
    """A key and its value."""

    key: str = ""
    value: Value | None = None


class Attributes(msgspec.Struct):
    """A mapping as a value."""

    values: list[Attribute] | None = None


class SpanEvent(msgspec.Struct, rename="camel"):
    """``Span.Event``."""

    time_unix_nano: Whole | None = None
    name: str = ""
    attributes: list[Attribute] | None = None


class Status(msgspec.Struct):
    """``Status``: code 2 is an error."""

    code: Whole | None = None
    message: str | None = None


class OtlpSpan(msgspec.Struct, rename="camel"):
    """``Span``."""

    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str | None = None
    name: str = ""
    start_time_unix_nano: Whole | None = None
    end_time_unix_nano: Whole | None = None
    attributes: list[Attribute] | None = None
    events: list[SpanEvent] | None = None
    status: Status | None = None


class ScopeSpans(msgspec.Struct):
    """``ScopeSpans``."""

    spans: list[OtlpSpan] | None = None


class Resource(msgspec.Struct):
    """``Resource``."""

    attributes: list[Attribute] | None = None


class ResourceSpans(msgspec.Struct, rename="camel"):
    """``ResourceSpans``."""

    resource: Resource | None = None
    scope_spans: list[ScopeSpans] | None = None


class Envelope(msgspec.Struct, rename="camel"):
    """An answer, or a part of one."""

    result: Envelope | None = None
    resource_spans: list[ResourceSpans] | None = None


_RAWS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENVELOPES = msgspec.json.Decoder(Envelope)
_KNOWN = {"result", "resourceSpans"}


def read(document: bytes) -> list[tuple[str, Span]]:
    """The spans of an answer, each with the id (hex) of its trace.

    Raises:
        TraceError: it is something else.
    """
    try:
        parts = _parts(document)
        return [found for part in parts for group in _groups(part) for found in _spans(group)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, binascii.Error, ValueError) as error:
        raise TraceError(f"it is not a trace of the API v3: {told(error)}") from None


def told(error: Exception) -> str:
    """What a parser says, short."""
    return str(error)[:200] or type(error).__name__


def _parts(document: bytes) -> list[Envelope]:
    try:
        raws = [msgspec.json.decode(document, type=dict[str, msgspec.Raw])]
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        raws = _RAWS.decode_lines(document)
        if not raws:
            raise ValueError("it is empty") from None
    for raw in raws:
        if raw and not _KNOWN & raw.keys():
            raise ValueError("neither result nor resourceSpans is in it")
    if len(raws) == 1:
        return [msgspec.json.decode(document, type=Envelope)]
    return _ENVELOPES.decode_lines(document)


def _groups(part: Envelope) -> list[ResourceSpans]:
    inner = part if part.result is None else part.result
    return inner.resource_spans or []


def _spans(group: ResourceSpans) -> list[tuple[str, Span]]:
    named = attributes_of((group.resource and group.resource.attributes) or [])
    service = str(named.get("service.name", ""))
    return [(hex_of(one.trace_id, 16), _span(one, service))
            for scope in group.scope_spans or () for one in scope.spans or ()]


def _span(one: OtlpSpan, service: str) -> Span:
    status = one.status or Status()
    failed = status.code in (2, "2", "STATUS_CODE_ERROR")
    return Span(
        name=one.name, service=service, span_id=hex_of(one.span_id, 8), parent_id=hex_of(one.parent_span_id or "", 8),
        start_ns=nanoseconds(one.start_time_unix_nano), end_ns=nanoseconds(one.end_time_unix_nano),
        error=(status.message or "") if failed else None, attributes=attributes_of(one.attributes or []),
        events=tuple(Event(nanoseconds(event.time_unix_nano), event.name, attributes_of(event.attributes or []))
                     for event in one.events or ()))


def hex_of(text: str, size: int) -> str:
    """An id of ``size`` bytes as lower-case hex, from hex or base64; empty where it is missing or all zeros.

    Raises:
        ValueError: it is neither.
    """
    if not text:
        return ""
    if len(text) == 2 * size or (size == 16 and len(text) == 16):  # also a trace id of 64 bits
        found = bytes.fromhex(text)
    else:
        found = base64.b64decode(text, validate=True)
        if len(found) not in (size, 8):
            raise ValueError(f"an id of {len(found)} bytes, not {size}")
    return found.hex().zfill(2 * size) if any(found) else ""


def nanoseconds(value: Whole | None) -> int | None:
    """A time; None where it is missing or zero, which in protocol buffers is the same.

    Raises:
        ValueError: it is no whole number of 64 bits.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str) and (len(value) > 20 or not value.isascii() or not value.isdigit()):
        raise ValueError("a time that is no whole number")
    number = int(value)
    if not 0 <= number < MOST_NS:
        raise ValueError("a time beyond 64 bits")
    return number or None


def attributes_of(found: list[Attribute], depth: int = 0) -> dict[str, object]:
    """Attributes by key; one without a value is None."""
    return {one.key: _value(one.value, depth) for one in found}


def _value(value: Value | None, depth: int) -> object:
    if value is None or depth > _DEEPEST:
        return None
    if value.int_value is not None:
        number = str(value.int_value)
        return int(number) if len(number) <= 20 and number.lstrip("-").isdigit() else number
    if value.array_value is not None:
        return [_value(one, depth + 1) for one in value.array_value.values or ()]
    if value.kvlist_value is not None:
        return attributes_of(value.kvlist_value.values or [], depth + 1)
    plain = (value.string_value, value.bool_value, value.double_value, value.bytes_value)
    return next((one for one in plain if one is not None), None)
