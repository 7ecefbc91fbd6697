"""A trace as it is read, wherever from. Times are Unix nanoseconds; None where the source does not say."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened within a span."""

    t_ns: int | None
    name: str
    attributes: dict[str, object] = {}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A span. ``span_id`` and ``parent_id`` are hex, empty where unknown or none; ``error`` is what a failed one says.

    A span of the store names its parent by ``parent_at``, its place in the trace.
    """

    name: str
    service: str = ""
    span_id: str = ""
    parent_id: str = ""
    parent_at: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    error: str | None = None
    attributes: dict[str, object] = {}
    events: tuple[Event, ...] = ()

    @property
    def duration_ns(self) -> int | None:
        """How long it took; negative where it ends before it begins."""
        return None if self.start_ns is None or self.end_ns is None else self.end_ns - self.start_ns


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of one trace; ``source`` says where they are from, ``notes`` are whole sentences on what is missing."""

    trace_id: str
    source: str
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()


class TraceError(Exception):
    """A trace cannot be had; ``str()`` is one whole sentence."""
