"""What stands between kvobs's sources and a tracer: less depth, and masks where the provider is the application's.

The application's processors see spans as they are and cannot change them, so there kvobs masks its own spans while
they are written; spans of others are the application's.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, Tracer, use_span
from opentelemetry.util.types import AttributeValue

from kvobs.exporters._bystander import Bystander
from kvobs.exporters._deny import Rules


class _Wrapped(Tracer):
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def start_span(self, name: str, context: Context | None = None, *args: Any, **kwargs: Any) -> Span:
        """Start a span with the tracer within."""
        return self._tracer.start_span(name, context, *args, **kwargs)

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
        """Start a span and make it current."""
        ways = {name: kwargs.pop(name, True) for name in ("end_on_exit", "record_exception", "set_status_on_exception")}
        return use_span(self.start_span(*args, **kwargs), **ways)


class EdgeTracer(_Wrapped):
    """Writes turns and what the breaker does; ``inner``, with which all below is written, writes nothing."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(tracer)
        self.inner = Bystander()


class MaskedTracer(_Wrapped):
    """Its spans are masked while they are written. The application's sampler sees what is masked too."""

    def __init__(self, tracer: Tracer, rules: Rules) -> None:
        super().__init__(tracer)
        self._rules = rules

    def start_span(self, name: str, context: Context | None = None, *args: Any, **kwargs: Any) -> Span:
        """Start a span with masked name, attributes and links. Attributes and links are taken by name only."""
        rules = self._rules
        if attributes := kwargs.get("attributes"):
            kwargs["attributes"] = _masked(attributes, rules)
        if links := kwargs.get("links"):
            kwargs["links"] = [Link(link.context, _masked(link.attributes, rules)) for link in links]
        span = super().start_span(rules.text(name), context, *args, **kwargs)
        return _MaskedSpan(span, rules) if span.is_recording() else span


def _masked(attributes: Mapping[str, Any] | None, rules: Rules) -> Mapping[str, Any] | None:
    found = rules.attributes(attributes) if attributes else None
    return attributes if found is None else found


class _MaskedSpan(Span):
    def __init__(self, span: Span, rules: Rules) -> None:
        self._span, self._rules = span, rules

    def __getattr__(self, name: str) -> Any:
        return getattr(self._span, name)  # what a readable span tells, to who looks at the current one

    def end(self, end_time: int | None = None) -> None:
        self._span.end(end_time)

    def get_span_context(self) -> SpanContext:
        return self._span.get_span_context()

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        self._span.set_attributes({key: self._rules.value(key, value) for key, value in attributes.items()})

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        self._span.set_attribute(key, self._rules.value(key, value))

    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None) -> None:
        self._span.add_event(self._rules.text(name), _masked(attributes, self._rules), timestamp)

    def add_link(self, context: SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        self._span.add_link(context, _masked(attributes, self._rules))

    def update_name(self, name: str) -> None:
        self._span.update_name(self._rules.text(name))

    def is_recording(self) -> bool:
        return self._span.is_recording()

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if isinstance(status, Status):
            code, description = status.status_code, status.description
        else:
            code = status
        self._span.set_status(code, None if description is None else self._rules.text(description))

    def record_exception(self, exception: BaseException, attributes: Mapping[str, Any] | None = None,
                         timestamp: int | None = None, escaped: bool = False) -> None:
        # The SDK lets given attributes win over those that it takes from the exception.
        said = {"exception.message": str(exception), "exception.stacktrace": "".join(
            traceback.format_exception(type(exception), exception, exception.__traceback__)), **(attributes or {})}
        self._span.record_exception(exception, _masked(said, self._rules), timestamp, escaped)
