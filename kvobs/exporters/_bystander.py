"""The tracer of a process in which kvobs records no spans."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, NoOpTracer, Span


class Bystander(NoOpTracer):
    """Records nothing and stays out of the way: its spans stand for the caller's own span.

    The API's no-op tracer returned an invalid span before 1.39; made current, that would hide the caller's span from
    whatever runs inside.
    """

    def start_span(self, name: str, context: Context | None = None, *args: Any, **kwargs: Any) -> Span:
        """A span with the ids of the current one (invalid where there is none) that records nothing."""
        return NonRecordingSpan(trace.get_current_span(context).get_span_context())
