"""The middleware with an ASGI server in hand: what passes, what is refused, what is changed."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvobs import sessions
from kvobs.asgi import BreakerMiddleware, totals
from kvobs.breaker import _http
from kvobs.breaker._board import BoardWriter, board_directory
from kvobs.breaker._gate import OBSERVE
from kvobs.breaker._http import MOST_BODY, whose
from tests.asgi import CHAT, App, Call, Clock, decision, guarded, scope, tokens, until


def run(call: Call) -> Call:
    return asyncio.run(call.run())


@pytest.mark.parametrize("request_", [
    {"type": "lifespan"}, {"type": "websocket", "path": CHAT, "headers": []}, scope(method="GET"),
    scope("/metrics"), scope("/health"), scope("/healthz"), scope("/livez"), scope("/ping"), scope("/readyz")],
    ids=lambda found: f"{found['type']} {found.get('method')} {found.get('path')}")
def test_what_is_not_judged_passes_as_it_is(request_: dict[str, Any]) -> None:
    """Other paths, methods and protocols, and liveness even if its path was asked for, reach the application as the
    very objects that the server gave.
    """
    seen: list[Any] = []

    async def app(*given: Any) -> None:
        seen.append(given)

    every = ("/",) if request_.get("path") in ("/health", "/healthz", "/livez", "/ping") else ("/v1/",)
    call = Call(guarded(app, decision(), paths=every), request_)
    run(call)
    assert [given[0] is call.scope and given[1] == call.receive and given[2] == call.send for given in seen] == [True]


@pytest.mark.parametrize("found", [None, decision(mode="off"), decision(expires_ns=0)], ids=["none", "off", "expired"])
@pytest.mark.parametrize("priority", ["critical", "normal", "sheddable"])
def test_without_a_decision_everything_passes_as_it_is(found: Any, priority: str) -> None:
    """Then nothing is wrapped: scope, receive and send are the server's own."""
    app = App()
    call = run(Call(guarded(app, found), scope(kvobs_priority=priority)))
    (seen,) = app.seen
    assert seen[0] is call.scope
    assert seen[1:] == (call.receive, call.send)
    assert (call.status, call.body) == (200, b"onetwo")


def test_critical_requests_pass_as_they_are_at_level_3() -> None:
    """Whoever is not limited is neither read ahead nor changed."""
    app = App()
    call = run(Call(guarded(app, decision()), scope(kvobs_priority="critical")))
    assert app.seen[0][1:] == (call.receive, call.send)
    assert app.bodies == [b'{"max_tokens": 500}']


def test_sheddable_requests_are_refused() -> None:
    """They get 503 with the breaker's Retry-After and an error as OpenAI's clients read it; the application sees
    nothing of it.
    """
    app = App()
    made = guarded(app, decision())
    call = run(Call(made, scope(kvobs_priority="sheddable")))
    assert app.seen == []
    assert call.status == 503
    assert call.headers["retry-after"] == "4"
    assert call.headers["content-length"] == str(len(call.body))
    error = json.loads(call.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] == ("The server is degraded: requests of priority sheddable are not taken now. "
                                "Try again in 4 s.")
    assert made.counts == {("act", "sheddable", "refused"): 1}
    assert made.active == 0


def test_normal_requests_get_fewer_tokens() -> None:
    """Their limit is lowered, the length of the body follows, the answer says so and is otherwise the application's."""
    app = App()
    made = guarded(app, decision())
    body = b'{"messages":[], "max_tokens": 500}'
    call = run(Call(made, scope(content_length=str(len(body))), body[:20], body[20:], b""))
    assert tokens(app.bodies[0]) == 100
    assert dict(app.seen[0][0]["headers"])[b"content-length"] == str(len(app.bodies[0])).encode()
    assert dict(call.scope["headers"])[b"content-length"] == str(len(body)).encode()
    assert call.headers == {"x": "y", "kvobs-degraded": "max_tokens=100"}
    assert [message.get("body") for message in call.sent] == [None, b"one", b"two"]
    assert made.counts == {("act", "normal", "admitted"): 1, ("act", "normal", "clamped"): 1}


@pytest.mark.parametrize(("headers", "bodies"), [
    ({}, (b'{"max_tokens": 50}',)), ({}, (b"no", b" json")),
    ({"content_type": "text/plain"}, (b'{"max_tokens": 500}',)),
    ({"content_encoding": "gzip"}, (b'{"max_tokens": 500}',)),
    ({}, (b'{"max_tokens": 500, "x": "', b"x" * MOST_BODY, b'"', b"}"))],
    ids=["low enough", "no JSON", "text", "compressed", "too long"])
def test_what_cannot_or_need_not_be_lowered_is_passed_on(headers: dict[str, str], bodies: tuple[bytes, ...]) -> None:
    """The application gets the same messages, and the answer is not marked."""
    app = App()
    call = Call(guarded(app, decision()), scope(**headers), *bodies)
    expected = list(call.messages._queue)  # type: ignore[attr-defined]
    run(call)
    assert app.messages == expected
    assert app.seen[0][0] is call.scope
    assert call.headers == {"x": "y"}


def test_a_long_body_is_not_kept() -> None:
    """No more is read ahead than the bound and one message; the rest is read when the application asks."""
    left: list[int] = []
    chunk = b"x" * (MOST_BODY // 4)

    async def app(given: Any, receive: Any, send: Any) -> None:
        left.append(call.messages.qsize())

    call = Call(guarded(app, decision()), None, *[chunk] * 20)
    run(call)
    assert left == [15]


def test_observe_changes_nothing_and_counts() -> None:
    """In mode observe every object is the server's own but for a receive that gives the same messages, and it is
    counted what would have become of the request.
    """
    app = App()
    made = guarded(app, decision(mode=OBSERVE), max_active=1)
    for priority in ("critical", "normal", "sheddable"):
        call = Call(made, scope(kvobs_priority=priority))
        messages = list(call.messages._queue)  # type: ignore[attr-defined]
        run(call)
        assert app.seen[-1][0] is call.scope
        assert app.seen[-1][2] == call.send
        assert app.messages[-1] is messages[-1]
        assert call.headers == {"x": "y"}
    run(Call(made, None, b'{"max_tokens": 50}'))
    run(Call(made, None, b"no json"))
    assert made.counts == {("observe", "critical", "admitted"): 1, ("observe", "normal", "admitted"): 3,
                           ("observe", "normal", "clamped"): 1, ("observe", "sheddable", "refused"): 1}
    assert made.active == 0


def test_observe_counts_who_would_have_waited() -> None:
    """A request that finds as many active as may be is let in, and counted."""
    async def main() -> Any:
        app = App(held=True)
        made = guarded(app, decision(mode=OBSERVE), max_active=1)
        calls = [Call(made).start() for _ in range(2)]
        await until(lambda: len(app.bodies) == 2)
        app.free.release()
        app.free.release()
        await asyncio.gather(*calls)
        return made.counts

    assert asyncio.run(main())["observe", "normal", "queued"] == 1


@pytest.mark.parametrize(("option", "found", "status"), [
    (True, decision(), 503), (False, decision(), 200), (True, decision(level=2), 200), (True, None, 200),
    (True, decision(mode=OBSERVE), 200)])
def test_readiness_may_follow_the_breaker(option: bool, found: Any, status: int) -> None:
    """Only where it is asked for, in mode act and at level 3, /ready and /readyz say 503; liveness never does."""
    made = guarded(App(), found, readiness=option)
    for path in ("/readyz", "/ready"):
        assert run(Call(made, scope(path, method="GET"))).status == status
    assert run(Call(made, scope("/healthz", method="GET"))).status == 200
    assert made.active == 0


@pytest.mark.parametrize(("headers", "expected"), [
    ({}, (None, "normal")), ({"kvobs_session": "s", "kvobs_priority": "critical"}, ("s", "critical")),
    ({"kvobs_priority": "urgent"}, (None, "normal")), ({"kvobs_session": "ä" * 999}, ("ä" * 256, "normal")),
    ({"baggage": "session.id=b,session.priority=sheddable"}, ("b", "sheddable")),
    ({"baggage": "session.id=b,session.priority=sheddable", "kvobs_session": "s"}, ("s", "sheddable")),
    ({"baggage": ";;=,,%%"}, (None, "normal"))])
def test_headers_say_whose_request_it_is(headers: dict[str, str], expected: tuple[str | None, str]) -> None:
    """The headers of kvobs come before the baggage, a priority that nobody knows is normal, and names are bounded."""
    assert whose(scope(**headers)) == expected


def test_the_session_is_known_inside() -> None:
    """What runs in the application is of the session that the header names, and of none afterwards."""
    seen: list[Any] = []

    async def app(*_: Any) -> None:
        seen.append(sessions.current())

    run(Call(guarded(app, None), scope(kvobs_session="s", kvobs_priority="critical")))
    run(Call(guarded(app, None), scope()))
    assert seen == [sessions.Scope("s", "critical"), None]


@pytest.mark.parametrize("options", [{"max_active": 0}, {"max_queued": -1}, {"queue_s": -1.0}, {"queue_s": 1e9},
                                     {"queue_s": float("nan")}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    """One sentence says what is allowed."""
    with pytest.raises(ValueError, match=r"^BreakerMiddleware takes .*\.$"):
        BreakerMiddleware(App(), board="x", **options)


def test_with_the_application_only_the_configuration_says_where_boards_are(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM makes it, it reads the boards of its process group beside the configured store."""
    monkeypatch.setenv("KVOBS_STORE", str(tmp_path))
    clock = Clock()
    writer = BoardWriter(board_directory(tmp_path), "engine", clock)
    writer.publish(decision())
    app = App()
    made = BreakerMiddleware(app)
    assert run(Call(made, scope(kvobs_priority="sheddable"))).status == 503
    writer.close()
    assert run(Call(BreakerMiddleware(app), scope(kvobs_priority="sheddable"))).status == 200
    assert totals()["act", "sheddable", "refused"] >= made.counts["act", "sheddable", "refused"] == 1


@pytest.mark.parametrize("settings", [{"KVOBS_STORE": "off"}, {"KVOBS_WINDOW_MS": "never"}])
def test_without_a_usable_configuration_everything_passes(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    """A store that is off, or a setting that is refused, is said in one sentence, and requests pass."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert run(Call(BreakerMiddleware(App()), scope(kvobs_priority="sheddable"))).status == 200
    assert [record.message.startswith("kvobs: the breaker's middleware lets everything pass: ")
            for record in caplog.records] == [True]


class Broken:
    """Raises at whatever is asked of it."""

    def decision(self) -> Any:
        raise RuntimeError("no")


def test_a_board_that_raises_lets_everything_pass(caplog: pytest.LogCaptureFixture) -> None:
    """Its failure reaches nobody, and is logged once."""
    app, clock = App(), Clock()
    made = BreakerMiddleware(app, board=Broken(), clock=clock)
    for _ in range(3):
        clock.now_ns += 10**9
        assert run(Call(made, scope(kvobs_priority="sheddable"))).status == 200
    assert [record.message for record in caplog.records] == [
        "kvobs: the breaker's middleware failed (RuntimeError: no); requests pass it instead."]


@pytest.mark.parametrize("part", ["degrade", "read_ahead", "__init__", "stays_until"])
def test_a_failure_of_its_own_lets_the_request_pass(part: str, monkeypatch: pytest.MonkeyPatch,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    """Whatever part fails, the application gets the whole request, once, and places are free afterwards."""
    def fail(*_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(_http.Visit, part, fail)

    async def main() -> None:
        app = App(held=True)
        made = guarded(app, decision(), max_active=1)
        calls = [Call(made, None, b'{"max_tokens":', b" 500}") for _ in range(2)]
        running = [call.start() for call in calls]
        await until(lambda: len(app.bodies) + made.waiting == 2)
        app.free.release()
        app.free.release()
        await asyncio.gather(*running)
        assert [call.status for call in calls] == [200, 200]
        assert sorted(map(tokens, app.bodies)) == ([100, 500] if part == "stays_until" else [500, 500])
        assert (made.active, made.waiting) == (0, 0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert len(caplog.records) == 1


def test_errors_of_the_application_are_its_own() -> None:
    """An exception passes as the same object, and the place is free again."""
    error = KeyError("mine")

    async def app(*_: Any) -> None:
        raise error

    made = guarded(app, decision())
    for priority in ("critical", "normal"):
        with pytest.raises(KeyError) as caught:
            run(Call(made, scope(kvobs_priority=priority)))
        assert caught.value is error
    assert made.active == 0


def test_what_became_of_requests_is_a_metric() -> None:
    """A source tells the middleware's counts of this process, which grow by one for a request that is refused."""
    from kvobs.metrics import Metrics
    from kvobs.sources._admission import AdmissionSource

    def refused() -> float:
        metrics = Metrics()
        metrics.fold(AdmissionSource().sample(1))
        values = {row.name: values for row, values in metrics.collect()}.get("kvobs.admission.requests", {})
        return sum(float(count) for key, count in values.items()  # type: ignore[arg-type]
                   if key == ("act", "sheddable", "refused"))

    before = refused()
    made = guarded(App(), decision())
    call = run(Call(made, scope(kvobs_priority="sheddable")))
    assert (call.status, refused()) == (503, before + 1)
