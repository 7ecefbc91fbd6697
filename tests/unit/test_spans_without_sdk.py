"""Spans where only the OpenTelemetry API is installed."""

from __future__ import annotations

from opentelemetry import trace

from kvobs import spans
from tests.events import turn


def test_without_a_sdk_there_are_no_ids() -> None:
    """With the API alone a turn opens and closes, has no ids, and leaves the context as it was."""
    opened = spans.open_turn(trace.NoOpTracer(), "", 0, {})
    opened.leave()
    opened.close(turn(), (), {}, None)
    assert opened.ids == ("", "", False)
    assert not trace.get_current_span().get_span_context().is_valid
