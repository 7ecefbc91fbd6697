"""Traces for ``kvobs trace``: read from Jaeger or the store, ordered as a tree, drawn as text."""

from kvobs.cli.traces._draw import draw, folded, line
from kvobs.cli.traces._jaeger import fetch
from kvobs.cli.traces._model import Event, Span, Trace, TraceError
from kvobs.cli.traces._rows import Row, document, duration_text, offset_text, rows, title
from kvobs.cli.traces._stored import last, read

__all__ = ["Event", "Row", "Span", "Trace", "TraceError", "document", "draw", "duration_text", "fetch", "folded",
           "last", "line", "offset_text", "read", "rows", "title"]
