"""Phases of a request as children of the span that vLLM itself writes for it.

The engine side tells phases as JSON: ``[name, start, end, [[event, time, {attributes}], …]]``, times in Unix
nanoseconds. ``end`` is null in a phase that had not ended when vLLM's front end ended the request (a stop string).
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.trace import Span, Tracer

from kvobs import spans

Event = tuple[str, int, dict[str, str | int | float | bool]]


class Phase(NamedTuple):
    """A phase of a request; times are Unix nanoseconds, ``end_ns`` is None while it goes on."""

    name: str
    start_ns: int
    end_ns: int | None
    events: tuple[Event, ...]


def told(text: str) -> tuple[Phase, ...]:
    """The phases of a ``kvobs-phases`` entry.

    Raises:
        ValueError, TypeError: it is none.
    """
    return tuple(Phase(str(name), int(start), None if end is None else int(end),
                       tuple((str(event), int(t_ns), dict(attributes)) for event, t_ns, attributes in events))
                 for name, start, end, events in json.loads(text))


def write(tracer: Tracer, parent: Span, phases: tuple[Phase, ...], now_ns: int) -> None:
    """Write the phases as children of ``parent``; one that goes on is written as if it ended at ``now_ns``."""
    context = trace.set_span_in_context(parent)
    for phase in phases:
        span = spans.inner(tracer).start_span(phase.name, context, start_time=phase.start_ns)
        for name, t_ns, attributes in phase.events:
            span.add_event(name, attributes, t_ns)
        span.end(max(phase.start_ns, now_ns) if phase.end_ns is None else phase.end_ns)


class _Seen:
    """``opentelemetry.trace`` as one function sees it: its tracers show the spans that they start."""

    def __init__(self, show: Callable[[Span], None]) -> None:
        self._show = show

    def __getattr__(self, name: str) -> Any:
        return getattr(trace, name)

    def get_tracer(self, *args: Any, **kwargs: Any) -> _SeenTracer:
        return _SeenTracer(trace.get_tracer(*args, **kwargs), self._show)


class _SeenTracer:
    def __init__(self, tracer: Tracer, show: Callable[[Span], None]) -> None:
        self._tracer = tracer
        self._show = show

    def start_span(self, *args: Any, **kwargs: Any) -> Span:
        span = self._tracer.start_span(*args, **kwargs)
        self._show(span)
        return span


def showing(function: Any, show: Callable[[Span], None]) -> Callable[..., Any]:
    """The engine's own code for writing a span, but ``show`` is told of the span: nothing else would tell its id.

    It is the same code with another global name ``trace``; vLLM's function and module stay as they are.

    Raises:
        AttributeError: it is not a Python function that takes its tracer from ``trace``.
    """
    if not isinstance(function, types.FunctionType) or not {"trace", "get_tracer"} <= set(function.__code__.co_names):
        raise AttributeError(f"{getattr(function, '__name__', function)} does not make its span as kvobs knows it")
    seen = types.FunctionType(function.__code__, {**function.__globals__, "trace": _Seen(show)}, function.__name__,
                              function.__defaults__, function.__closure__)
    seen.__kwdefaults__ = function.__kwdefaults__
    return seen
