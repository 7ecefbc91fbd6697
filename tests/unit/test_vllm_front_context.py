"""What of a request's context vLLM's front end sends along: the caller's trace and session, and nothing invented."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

import kvobs
from kvobs.sources.vllm._context import MOST_CHARACTERS, call_of, headers_of, own_headers, within

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-11111111111111111111111111111111-2222222222222222-00"


def call(**headers: str) -> Context:
    """The context of an HTTP request, which must say something."""
    found = call_of([(b"host", b"x"), *((name.encode(), value.encode()) for name, value in headers.items())])
    assert found is not None
    return found


def test_a_request_of_nobody_has_no_headers() -> None:
    """Without a caller's trace or session nothing is sent, and an HTTP request without either has no context."""
    assert headers_of(None, tracing=False) is None
    assert call_of([(b"host", b"x"), (b"authorization", b"secret")]) is None


def test_the_callers_trace_and_session_are_sent() -> None:
    """The headers of the HTTP request arrive as they were said, the session with its priority."""
    said = {"traceparent": PARENT, "tracestate": "a=b", "baggage": "session.id=alice,session.priority=critical,x=y"}
    with within(call(**said)):
        assert headers_of(None, tracing=False) == {
            "traceparent": PARENT, "tracestate": "a=b", "kvobs-session": "alice", "kvobs-priority": "critical"}
    assert headers_of(None, tracing=False) is None


def test_a_span_of_this_process_is_nearer_than_the_caller() -> None:
    """Where the process's own server span is current, that span is the parent; a session block wins over baggage."""
    span = NonRecordingSpan(SpanContext(3, 4, is_remote=False, trace_flags=TraceFlags(1)))
    with within(call(traceparent=PARENT, baggage="session.id=alice")), kvobs.session("bob", priority="sheddable"):
        token = context.attach(trace.set_span_in_context(span))
        try:
            found = headers_of(None, tracing=False)
        finally:
            context.detach(token)
    assert found == {"traceparent": f"00-{3:032x}-{4:016x}-01", "kvobs-session": "bob", "kvobs-priority": "sheddable"}


def test_what_vllm_has_put_there_is_never_replaced() -> None:
    """Headers that vLLM made stay as they are, and its mapping is not changed."""
    theirs = {"traceparent": OTHER}
    with within(call(traceparent=PARENT)):
        assert headers_of(theirs, tracing=False) == {"traceparent": OTHER}
        assert headers_of(theirs, tracing=True) == {"traceparent": OTHER, "kvobs-spans": "frontend"}
    assert theirs == {"traceparent": OTHER}


def test_with_vllms_tracing_on_its_parent_is_its_own_affair() -> None:
    """kvobs adds no parent to a span that vLLM writes; what it added is taken out before vLLM looks."""
    with within(call(traceparent=PARENT, baggage="session.id=alice")):
        found = headers_of(None, tracing=True)
    assert found == {"kvobs-session": "alice", "kvobs-priority": "normal", "kvobs-spans": "frontend"}
    assert own_headers(found) is None
    assert own_headers({**found, "traceparent": OTHER, "kvobs-phases": "[]"}) == {"traceparent": OTHER}
    assert own_headers(None) is None


def test_the_context_reaches_tasks_that_outlive_the_handler() -> None:
    """A task that began within a request is of that request, also after it; two requests at once are not mixed up."""
    async def handler(number: int, gate: asyncio.Event) -> asyncio.Task[dict[str, str] | None]:
        async def later() -> dict[str, str] | None:
            await gate.wait()
            return headers_of(None, tracing=False)

        with within(call(baggage=f"session.id=s{number}")):
            await asyncio.sleep(0)
            return asyncio.create_task(later())

    async def serve() -> list[dict[str, str] | None]:
        gate = asyncio.Event()
        tasks = await asyncio.gather(*(handler(number, gate) for number in range(3)))
        gate.set()
        return list(await asyncio.gather(*tasks))

    assert [found and found["kvobs-session"] for found in asyncio.run(serve())] == ["s0", "s1", "s2"]


def test_a_session_id_that_is_no_utf8_can_be_sent() -> None:
    """Half a surrogate pair, which no UTF-8 has, does not make vLLM's message of the request fail."""
    with kvobs.session("a\ud800b"):
        found = headers_of(None, tracing=False)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == found
    assert found is not None
    assert found["kvobs-session"] == "a\\ud800b"


def test_a_long_session_id_is_cut() -> None:
    """A session id comes from anybody and travels with every token of a traced request: it is bounded."""
    with kvobs.session("x" * 5000):
        found = headers_of(None, tracing=False)
    assert found is not None
    assert found["kvobs-session"] == "x" * MOST_CHARACTERS


@pytest.mark.parametrize("value", [b"", b"00-0-0-01", b"\xff\xfe", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"])
def test_a_traceparent_that_is_none_is_not_sent(value: bytes) -> None:
    """A malformed or all-zero traceparent is no parent."""
    found = call_of([(b"traceparent", value)])
    assert found is not None
    with within(found):
        assert headers_of(None, tracing=False) is None


NAMES = st.sampled_from([b"traceparent", b"tracestate", b"baggage", b"other"])


@given(st.lists(st.tuples(NAMES, st.binary(max_size=90))))
def test_hostile_headers_never_raise(headers: list[tuple[bytes, bytes]]) -> None:
    """Whatever bytes the three headers hold, there is a context or none, and what is sent are texts."""
    found = call_of(headers)
    with within(found if found is not None else Context()):
        sent = headers_of(None, tracing=False) or {}
    assert all(isinstance(text, str) for pair in sent.items() for text in pair)
