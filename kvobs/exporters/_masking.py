"""Masking ended spans, as a span processor in front of another one.

An ended span is shared by all processors of a provider and must not be changed, so the next processor is given a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import Link, Status

from kvobs.exporters._deny import Rules

_log = logging.getLogger("kvobs")


class _Copy(ReadableSpan):
    """A span with other contents, which lost as much to the SDK's limits as the original."""

    def __init__(self, original: ReadableSpan, **contents: Any) -> None:
        super().__init__(context=original.context, parent=original.parent, kind=original.kind,
                         start_time=original.start_time, end_time=original.end_time,
                         instrumentation_scope=original.instrumentation_scope, **contents)
        self._original = original

    @property
    def dropped_attributes(self) -> int:
        return self._original.dropped_attributes

    @property
    def dropped_events(self) -> int:
        return self._original.dropped_events

    @property
    def dropped_links(self) -> int:
        return self._original.dropped_links


def masked_span(span: ReadableSpan, rules: Rules) -> ReadableSpan:
    """The span as it may be exported: name, attributes, events, links and the status's description are searched. The
    very same object where nothing is masked.
    """
    name, status = rules.text(span.name), span.status
    if status.description is not None:
        said = rules.text(status.description)
        status = status if said is status.description else Status(status.status_code, said)
    attributes = rules.attributes(span.attributes or {})
    events, links = span.events, span.links
    new_events = tuple(_event(event, rules) for event in events)
    new_links = tuple(_link(link, rules) for link in links)
    if (attributes is None and name is span.name and status is span.status and all(map(_same, new_events, events))
            and all(map(_same, new_links, links))):
        return span
    return _Copy(span, name=name, status=status, resource=span.resource, events=new_events, links=new_links,
                 attributes=span.attributes if attributes is None else attributes)


def masked_resource(resource: Resource, rules: Rules) -> Resource:
    """The resource (a process's command line may hold a password)."""
    attributes = rules.attributes(resource.attributes)
    return resource if attributes is None else Resource(attributes, resource.schema_url)


def _same(one: object, other: object) -> bool:
    return one is other


def _event(event: Event, rules: Rules) -> Event:
    attributes, name = rules.attributes(event.attributes or {}), rules.text(event.name)
    if attributes is None and name is event.name:
        return event
    return Event(name, event.attributes if attributes is None else _bounded(attributes, event.dropped_attributes),
                 event.timestamp)


def _link(link: Link, rules: Rules) -> Link:
    attributes = rules.attributes(link.attributes or {})
    return link if attributes is None else Link(link.context, _bounded(attributes, link.dropped_attributes))


def _bounded(attributes: Mapping[str, Any], dropped: int) -> BoundedAttributes:
    found = BoundedAttributes(attributes=dict(attributes))
    found.dropped = dropped
    return found


class MaskingProcessor(SpanProcessor):
    """Gives the processor after it masked spans: ``add_span_processor(MaskingProcessor(BatchSpanProcessor(…)))``.

    It protects only what goes through it: other processors of the provider get the spans as they are. A span that
    cannot be searched is not passed on: ``dropped`` counts them, and the first is logged.
    """

    def __init__(self, after: SpanProcessor, *, payloads: bool = True) -> None:
        """``payloads``: also mask message contents, token ids, headers and parameters of queries."""
        self._after, self._rules = after, Rules(payloads=payloads)
        self.dropped = 0

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Pass it on."""
        self._after.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Pass a masked copy on. What the next processor raises is the application's, as it is without the mask."""
        try:
            masked = masked_span(span, self._rules)
        except Exception as error:  # what cannot be searched may hold anything, and so may the error's text
            self.dropped += 1
            if self.dropped == 1:
                _log.warning("kvobs: a span could not be masked (%s) and is dropped, as are further ones; the "
                             "application is not affected.", type(error).__name__)
            return
        self._after.on_end(masked)

    def shutdown(self) -> None:
        """Pass it on."""
        self._after.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Pass it on."""
        return self._after.force_flush(timeout_millis)
