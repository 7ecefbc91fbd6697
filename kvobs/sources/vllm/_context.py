"""What of a request's context travels from vLLM's front end into its engine core: entries of ``trace_headers``.

vLLM carries that mapping with every request and back with every output, but fills it only while its own tracing is
on. kvobs adds the caller's trace (``traceparent``, ``tracestate``) and session, whether it is on or not:
``kvobs-session`` and ``kvobs-priority``. Where vLLM's tracing is on, ``kvobs-spans`` says that the front end writes
the spans; then the engine side puts the phases of the request into ``kvobs-phases``, for its way back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar

from opentelemetry import context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvobs import sessions

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
SESSION, PRIORITY = "kvobs-session", "kvobs-priority"
SPANS, PHASES = "kvobs-spans", "kvobs-phases"
FRONT_END = "frontend"  # the value of SPANS
MOST_CHARACTERS = 256  # of a session id: it comes from anybody, and travels with every token
_WANTED = {name.encode(): name for name in (TRACEPARENT, TRACESTATE, "baggage")}

_trace_context = TraceContextTextMapPropagator()
_baggage = W3CBaggagePropagator()
_call: ContextVar[Context | None] = ContextVar("kvobs_vllm_call", default=None)


def call_of(headers: Iterable[tuple[bytes, bytes]]) -> Context | None:
    """What an HTTP request says of its trace and session; None if nothing.

    Args:
        headers: as in an ASGI scope: lower-case names, raw values.
    """
    found = {_WANTED[name]: value.decode("latin-1") for name, value in headers if name in _WANTED}
    return _baggage.extract(found, _trace_context.extract(found, Context())) if found else None


@contextlib.contextmanager
def within(call: Context) -> Iterator[None]:
    """Within the block, and in the tasks that begin there, requests are of this call."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


def headers_of(given: Mapping[str, str] | None, *, tracing: bool) -> dict[str, str] | None:
    """The ``trace_headers`` of a request that is about to be sent to the engine core.

    Args:
        given: those that vLLM made; never changed, and what they say is never replaced.
        tracing: vLLM's own tracing is on. Then the parent of its span is its own affair.
    """
    headers = dict(given or {})
    call = _call.get()
    if not tracing and TRACEPARENT not in headers:
        current = context.get_current()  # a server span of this process is nearer than the caller's
        known = trace.get_current_span(current).get_span_context().is_valid
        _trace_context.inject(headers, current if known or call is None else call)
    scope = sessions.current() or _scope_of(call)
    if scope is not None:
        # vLLM sends it as UTF-8 and would refuse a request whose headers are none.
        shown = scope.id[:MOST_CHARACTERS].encode("utf-8", "backslashreplace").decode()
        headers[SESSION], headers[PRIORITY] = shown, scope.priority
    if tracing:
        headers[SPANS] = FRONT_END
    return headers or None


def own_headers(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    """What vLLM itself had put into ``trace_headers``: those of a traced request without kvobs's entries."""
    return {name: value for name, value in (headers or {}).items() if not name.startswith("kvobs-")} or None


def _scope_of(call: Context | None) -> sessions.Scope | None:
    if call is None:
        return None
    token = context.attach(call)
    try:
        return sessions.current()
    finally:
        context.detach(token)
