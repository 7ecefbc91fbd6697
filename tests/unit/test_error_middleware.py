"""The ASGI middleware for errors, message by message: what it counts, and that it changes nothing."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext

from kvobs.errors import tally
from kvobs.errors._asgi import ErrorMiddleware
from kvobs.metrics import Metrics
from kvobs.sources._failures import ABSENT, FailureSource

REQUEST = {"type": "http.request", "body": b"x", "more_body": False}
GONE = {"type": "http.disconnect"}
START = {"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]}
PART = {"type": "http.response.body", "body": b"one", "more_body": True}
END = {"type": "http.response.body", "body": b"two", "more_body": False}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    tally.__init__()  # type: ignore[misc]
    yield
    tally.__init__()  # type: ignore[misc]


class Span(NonRecordingSpan):
    """A span that takes down its attributes."""

    def __init__(self) -> None:
        super().__init__(SpanContext(1, 1, is_remote=False))
        self.found: dict[str, object] = {}

    def is_recording(self) -> bool:
        return True

    def set_attribute(self, key: str, value: object) -> None:
        self.found[key] = value


def run(app: Any, *messages: Any, fails_at: int | None = None, kind: str = "http") -> tuple[Any, list[Any], Span]:
    """What a request through the middleware raised, what was sent, and its span."""
    waiting, sent, span = list(messages), list[Any](), Span()

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        if fails_at == len(sent):
            raise ConnectionResetError("the client is gone")
        sent.append(message)

    raised = None
    with trace.use_span(span, record_exception=False, set_status_on_exception=False):
        try:
            asyncio.run(ErrorMiddleware(app)({"type": kind}, receive, send))
        except BaseException as error:
            raised = error
    return raised, sent, span


def answers(*messages: Any, error: BaseException | None = None, reads: int = 0) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(reads):
            await receive()
        for message in messages:
            await send(message)
        if error is not None:
            raise error

    return app


def counts() -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """Outcomes that happened, and failures by class and phase."""
    return ({outcome: number for (_, outcome), number in tally.requests().items() if number},
            {(found, phase): number for (_, found, phase), number in tally.failures().items()})


LOST = TimeoutError("late")
CASES = {
    "a whole answer": (answers(START, PART, END), {}, "ok", None),
    "an answer that redirects": (answers({**START, "status": 307}, END), {}, "ok", None),
    "an answer with trailers": (answers({**START, "trailers": True}, END, {"type": "http.response.trailers"}), {}, "ok",
                                None),
    "a file by its path": (answers(START, {"type": "http.response.pathsend", "path": "/x"}), {}, "ok", None),
    "what was not valid": (answers({**START, "status": 422}, END), {}, "refused", ("validation_failed", "start")),
    "what is not there": (answers({**START, "status": 404}, END), {}, "refused", ("refused", "start")),
    "an answer of 500": (answers({**START, "status": 500}, END), {}, "failed", ("internal", "start")),
    "an exception before the answer": (answers(error=LOST), {}, "failed", ("network_timeout", "start")),
    "one within the answer": (answers(START, PART, error=LOST), {}, "failed", ("network_timeout", "stream")),
    "one after the answer": (answers(START, END, error=LOST), {}, "failed", ("network_timeout", "stream")),
    "no answer at all": (answers(), {}, "failed", ("internal", "start")),
    "an answer without an end": (answers(START, PART), {}, "failed", ("internal", "stream")),
    "a client that left before": (answers(START, END, reads=1), {"messages": [GONE]}, "cancelled",
                                  ("cancelled", "stream")),
    "a client that left, and an application that fails of it": (
        answers(START, error=RuntimeError("gone"), reads=2), {"messages": [REQUEST, GONE]}, "cancelled",
        ("cancelled", "stream")),
    "a server that cannot send": (answers(START, PART, END), {"fails_at": 2}, "cancelled", ("cancelled", "stream")),
    "a server that cannot begin": (answers(START, END), {"fails_at": 0}, "cancelled", ("cancelled", "start")),
    "a request that is cancelled": (answers(START, error=asyncio.CancelledError()), {}, "cancelled",
                                    ("cancelled", "stream")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_request_has_one_outcome(name: str) -> None:
    """Each way to end is one outcome, of one class where it is not ok; what began and did not end well is a stream."""
    app, how, outcome, failure = CASES[name]
    run(app, *how.get("messages", []), fails_at=how.get("fails_at"))
    assert counts() == ({outcome: 1}, {} if failure is None else {failure: 1})


def test_a_client_that_leaves_after_the_end_is_served() -> None:
    """What receive says after the last part, also to a task that waits since before, is no cancellation."""
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(END)
        assert (await receive()) is GONE

    run(app, GONE)
    assert counts() == ({"ok": 1}, {})


def test_the_span_is_told() -> None:
    """A failure's class is error.type of the current span; what is no failure of the server has only an outcome."""
    assert run(answers(error=LOST))[2].found == {"error.type": "network_timeout", "kvobs.outcome": "failed"}
    assert run(answers({**START, "status": 503}, END))[2].found == {"error.type": "unavailable",
                                                                     "kvobs.outcome": "failed"}
    assert run(answers(START, reads=1), GONE)[2].found == {"kvobs.outcome": "cancelled"}
    assert run(answers({**START, "status": 404}, END))[2].found == {"kvobs.outcome": "refused"}
    assert run(answers(START, END))[2].found == {}


def test_nothing_is_changed() -> None:
    """The same exception object, uncaught and without a new context; the same messages, none read but by the app."""
    raised, sent, _ = run(answers(START, PART, error=LOST, reads=1), REQUEST, GONE)
    assert raised is LOST
    assert (LOST.__cause__, LOST.__context__) == (None, None)
    assert sent[0] is START
    assert sent[1] is PART
    group = BaseExceptionGroup("both", [LOST, KeyboardInterrupt()])
    assert run(answers(error=group))[0] is group


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_what_is_no_request_passes(kind: str) -> None:
    """Of lifespan and WebSockets nothing is counted, and the application gets the server's own callables."""
    assert run(answers(error=LOST), kind=kind)[0] is LOST
    assert counts() == ({}, {})


def test_a_failing_tally_costs_nobody_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in counting is not seen by server or application."""
    monkeypatch.setattr(tally, "count", None)
    raised, sent, _ = run(answers(START, END))
    assert raised is None
    assert sent == [START, END]


def test_the_counts_become_metrics() -> None:
    """Both counters carry the counts; outcomes stand at 0 from the start, and without middleware there is no point."""
    source, metrics = FailureSource(), Metrics()
    assert list(source.sample(1)) == []
    (fact,) = source.availability()
    assert (fact.available, fact.reason) == (False, ABSENT)
    run(answers(START, END))
    run(answers(START, error=LOST))
    metrics.fold(source.sample(2))
    found = {row.name: values for row, values in metrics.collect()}
    assert found["kvobs.http.requests"] == {("asgi", "ok"): 1, ("asgi", "failed"): 1, ("asgi", "refused"): 0,
                                            ("asgi", "cancelled"): 0}
    assert found["kvobs.http.failures"] == {("asgi", "network_timeout", "stream"): 1}
    assert [fact.available for fact in source.availability()] == [True]


def test_a_forked_child_counts_anew() -> None:
    """The parent's requests are not counted twice."""
    run(answers(START, END))
    run(answers(error=LOST))
    tally.after_fork_in_child()
    assert counts() == ({}, {})
    assert tally.requests() == dict.fromkeys([("asgi", name) for name in ("ok", "refused", "failed", "cancelled")], 0)


def test_the_other_middleware_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """That kvobs.asgi was imported for this middleware does not mean that requests pass the breaker's."""
    from kvobs import asgi
    from kvobs.sources._admission import AdmissionSource

    monkeypatch.setattr(asgi, "_living", weakref.WeakSet())

    def there() -> bool:
        gc.collect()
        (fact,) = AdmissionSource().availability()
        return fact.available

    assert not there()
    made = asgi.BreakerMiddleware(answers(START, END), board="/nowhere")
    assert there()
    del made
    assert not there()
