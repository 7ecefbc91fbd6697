"""A trace as rows of text: offset from the first beginning, duration, and the tree. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from kvobs.cli.traces import _tree
from kvobs.cli.traces._model import Event, Span, Trace

MOST_DEPTH = 30  # deeper spans show the number of their level
NAME_LIMIT, VALUE_LIMIT, ATTRIBUTES_LIMIT = 200, 120, 64  # characters, characters, attributes of one event or span
Kind = Literal["span", "failed", "event", "attribute"]


class Row(msgspec.Struct, frozen=True, gc=False):
    """One line. ``guide`` draws the tree before the first line of ``label``, ``rest`` before its continuations."""

    kind: Kind
    depth: int
    guide: str
    rest: str
    label: str
    offset_ns: int | None = None
    duration_ns: int | None = None


def rows(trace: Trace, most: int = 0, *, attributes: bool = False) -> Iterator[Row]:
    """The rows of at most ``most`` spans (0: of all), each followed by its attributes, if wanted, and its events."""
    begin = _tree.begin_of(trace.spans)
    bars: list[str] = []
    for number, node in enumerate(_tree.walk(trace.spans)):
        if most and number >= most:
            return
        del bars[max(node.depth - 1, 0):]
        before = "".join(bars) if node.depth <= MOST_DEPTH else f"[{node.depth}] "
        own = "" if node.depth == 0 else "└─ " if node.last else "├─ "
        if node.depth:
            bars.append("   " if node.last else "│  ")
        after = before + (bars[-1] if node.depth else "") if node.depth <= MOST_DEPTH else " " * len(before)
        below = after + ("│  " if node.children else "   ")
        kind: Kind = "span" if node.span.error is None else "failed"
        yield Row(kind, node.depth, before + own, below, _label(node, trace.spans), _since(begin, node.span.start_ns),
                  node.span.duration_ns)
        if attributes:
            for words in _words(node.span.attributes):
                yield Row("attribute", node.depth, below, below, words)
        for event in node.span.events:
            yield Row("event", node.depth, below, below, _told(event), _since(begin, event.t_ns))


def document(trace: Trace) -> dict[str, object]:
    """The whole trace for JSON, in the tree's order; times are Unix nanoseconds, what is unknown is null."""
    begin = _tree.begin_of(trace.spans)
    nodes = list(_tree.walk(trace.spans))
    places = {node.at: place for place, node in enumerate(nodes)}
    return {"trace_id": trace.trace_id, "source": trace.source, "notes": list(trace.notes),
            "spans": [_entry(node, places, begin) for node in nodes]}


def _entry(node: _tree.Node, places: Mapping[int, int], begin: int | None) -> dict[str, object]:
    span = node.span
    return {"name": span.name, "service": span.service or None, "span_id": span.span_id or None,
            "parent_span_id": span.parent_id or None, "depth": node.depth,
            "parent": None if node.parent is None else places[node.parent],
            "start_ns": span.start_ns, "offset_ns": _since(begin, span.start_ns), "duration_ns": span.duration_ns,
            "error": span.error, "note": node.note or None, "attributes": span.attributes,
            "events": [{"name": event.name, "t_ns": event.t_ns, "offset_ns": _since(begin, event.t_ns),
                        "attributes": event.attributes} for event in span.events]}


def duration_text(ns: int | None) -> str:
    """A time in the largest unit of which there is one; empty where it is unknown."""
    if ns is None:
        return ""
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("µs", 1_000)):
        if abs(ns) >= size:
            return f"{ns / size:,.3f} {unit}"
    return f"{ns} ns" if ns else "0 s"


def offset_text(ns: int | None) -> str:
    """As ``duration_text``, with its sign."""
    return duration_text(ns) if ns is None or ns < 0 else f"+{duration_text(ns)}"


def clip(text: str, limit: int) -> str:
    """The text, or its beginning."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def _since(begin: int | None, t_ns: int | None) -> int | None:
    return None if begin is None or t_ns is None else t_ns - begin


def _label(node: _tree.Node, spans: Sequence[Span]) -> str:
    """The name; the service where it is not the parent's; what went wrong."""
    span = node.span
    parts = [clip(span.name, NAME_LIMIT) or "(without a name)"]
    if span.service and (node.parent is None or spans[node.parent].service != span.service):
        parts.append(f"[{clip(span.service, VALUE_LIMIT)}]")
    if span.error is not None:
        parts.append("failed" + (f": {clip(span.error, NAME_LIMIT)}" if span.error else ""))
    said = [word for word, wanted in ((node.note, node.note), ("its beginning is unknown", span.start_ns is None),
                                      ("its end is unknown", span.end_ns is None)) if wanted]
    return " ".join(parts) + (f" ({'; '.join(said)})" if said else "")


def _told(event: Event) -> str:
    return " ".join(["•", clip(event.name, NAME_LIMIT) or "(without a name)", *_words(event.attributes)])


def _words(attributes: Mapping[str, object]) -> list[str]:
    found = [f"{clip(key, NAME_LIMIT)}={clip(_shown(value), VALUE_LIMIT)}"
             for key, value in list(attributes.items())[:ATTRIBUTES_LIMIT]]
    return found + (["…"] if len(attributes) > ATTRIBUTES_LIMIT else [])


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def title(trace: Trace) -> str:
    """The trace in one sentence."""
    spans: tuple[Span, ...] = trace.spans
    begin, end = _tree.begin_of(spans), max((one.end_ns for one in spans if one.end_ns is not None), default=None)
    services = {one.service for one in spans if one.service}
    parts = [f"{len(spans):,} {'span' if len(spans) == 1 else 'spans'}"]
    if len(services) > 1:
        parts.append(f"{len(services)} services")
    if begin is not None and end is not None:
        parts.append(duration_text(end - begin))
    return f"Trace {trace.trace_id}: {', '.join(parts)}, from {trace.source}."
