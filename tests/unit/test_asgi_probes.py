"""Probes at the middleware: who passes while level 3 is on probation, and what the breaker is told of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvobs.asgi import BreakerMiddleware
from kvobs.breaker._gate import OBSERVE, Probation
from tests.asgi import SECOND, App, Board, Call, Clock, decision, guarded, scope, tokens, until

TWO = Probation("one", (7, 8), 2)


def on_probation(app: Any, probation: Probation = TWO, clock: Clock | None = None,
                 **changed: object) -> tuple[BreakerMiddleware, list[tuple[str, int, bool | None]]]:
    """The middleware before an application, and what it tells the breaker."""
    made = guarded(app, decision(probation=probation, **changed), clock)
    told: list[tuple[str, int, bool | None]] = []
    made._tell = lambda process, ticket, good: told.append((process, ticket, good))
    return made, told


def test_as_many_pass_undegraded_as_there_are_tickets() -> None:
    """Of requests that come together, a normal and a sheddable one pass in full as probes; the next normal one is
    clamped, the next sheddable one refused, and a critical one needs no ticket. Those that ended well are told.
    """
    async def scene() -> None:
        app = App(held=True)
        made, told = on_probation(app)
        critical = Call(made, scope(kvobs_priority="critical"))
        calls = [Call(made, scope(kvobs_priority=priority)) for priority in ("normal", "sheddable", "normal",
                                                                             "sheddable")]
        running = [call.start() for call in (critical, *calls)]
        await until(lambda: len(app.bodies) >= 3 and calls[3].sent)
        assert told == []
        for _ in running:
            app.free.release()
        await asyncio.gather(*running)
        assert [tokens(body) for body in app.bodies] == [500, 500, 500, 100]
        assert [call.status for call in calls] == [200, 200, 200, 503]
        assert "kvobs-degraded" not in calls[0].headers
        assert sorted(told) == [("one", 7, True), ("one", 8, True)]
        assert made.counts["act", "normal", "probed"] == made.counts["act", "sheddable", "probed"] == 1
        assert made.counts["act", "sheddable", "admitted"] == made.counts["act", "sheddable", "refused"] == 1

    asyncio.run(scene())


class Answers:
    """An application that does as it is told: a status, a kind of answer, and what happens meanwhile."""

    def __init__(self, status: int = 200, kind: bytes = b"application/json", *, cut: bool = False,
                 error: BaseException | None = None, pause: tuple[Clock, int] | None = None) -> None:
        self.status, self.kind, self.cut, self.error, self.pause = status, kind, cut, error, pause

    async def __call__(self, given: Any, receive: Any, send: Any) -> None:
        await receive()
        if self.pause is not None:
            self.pause[0].now_ns += self.pause[1]
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-type", self.kind)]})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        if self.cut:
            assert (await receive())["type"] == "http.disconnect"
        if self.error is not None:
            raise self.error
        if not self.cut:
            await send({"type": "http.response.body", "body": b"two"})


LATE = Probation("one", (7,), 1, first_byte_ns=2 * SECOND)
STREAM = b"text/event-stream; charset=utf-8"


@pytest.mark.parametrize(("fields", "good"), [
    ({}, True), ({"status": 500}, False), ({"status": 503}, False), ({"status": 404}, None), ({"status": 429}, None),
    ({"cut": True}, None), ({"error": RuntimeError("broken")}, False),
    ({"cut": True, "error": OSError("client is gone")}, None), ({"error": asyncio.CancelledError()}, None),
    ({"pause": 3}, True), ({"pause": 3, "kind": STREAM}, False), ({"pause": 2, "kind": STREAM}, True)])
def test_how_a_probe_ended(fields: dict[str, Any], good: bool | None) -> None:
    """Well: whole, and in time where it streams; badly: 5xx, raised, or late; what the client did wrong or cut off says
    nothing. The application's exception passes unchanged.
    """
    async def scene() -> None:
        clock = Clock()
        given = dict(fields)
        if "pause" in given:
            given["pause"] = clock, given["pause"] * SECOND
        made, told = on_probation(Answers(**given), LATE, clock)
        call = Call(made, None, b'{"max_tokens": 500}', leave=bool(given.get("cut")))
        if "error" in given:
            with pytest.raises(type(given["error"])) as caught:
                await call.run()
            assert caught.value is given["error"]
        else:
            await call.run()
        assert told == [("one", 7, good)]
        assert made._trials.in_flight == set()
        assert made.active == 0

    asyncio.run(scene())


def test_a_ticket_is_used_once_and_a_new_one_lets_the_next_pass() -> None:
    """The first of requests one after another is the probe; once the board has another ticket, so is the next."""
    async def scene() -> None:
        app = App()
        made, told = on_probation(app, Probation("one", (7,), 1))
        for _ in range(2):
            await Call(made).run()
        board = Board(decision(probation=Probation("one", (8,), 1)))
        made._board, made._looked_ns = board, None
        await Call(made).run()
        board.found = decision(probation=Probation("other", (7,), 1))
        made._looked_ns = None
        await Call(made).run()
        assert [tokens(body) for body in app.bodies] == [500, 100, 500, 500]
        assert told == [("one", 7, True), ("one", 8, True), ("other", 7, True)]

    asyncio.run(scene())


def test_a_probe_that_hangs_keeps_its_place() -> None:
    """However many tickets come after it, no other passes beside a probe that has not ended, where one may be out."""
    async def scene() -> None:
        app = App(held=True)
        made, told = on_probation(app, Probation("one", (7,), 1))
        hanging = Call(made).start()
        await until(lambda: app.bodies)
        made._board, made._looked_ns = Board(decision(generation=9, probation=Probation("one", (8, 9), 1))), None
        second = Call(made).start()
        await until(lambda: made.waiting or len(app.bodies) > 1)
        assert [tokens(body) for body in app.bodies] == [500]
        for _ in range(2):
            app.free.release()
        await asyncio.gather(hanging, second)
        assert told == [("one", 7, True)]

    asyncio.run(scene())


def test_in_mode_observe_probes_change_nothing_and_are_told() -> None:
    """Requests pass as the very objects that they are but for being watched; two of three are told."""
    async def scene() -> None:
        app = App()
        made, told = on_probation(app, mode=OBSERVE)
        calls = [await Call(made).run() for _ in range(3)]
        assert [json.loads(body) for body in app.bodies] == [{"max_tokens": 500}] * 3
        assert [call.sent for call in calls] == [calls[0].sent] * 3
        assert app.seen[2][0] is calls[2].scope
        assert told == [("one", 7, True), ("one", 8, True)]

    asyncio.run(scene())


def test_a_server_on_probation_is_ready() -> None:
    """Where readiness follows the breaker, a server on probation is ready: nobody sends a probe to one that is not."""
    async def scene(probation: Probation | None) -> int | None:
        made = guarded(App(), decision(probation=probation), readiness=True)
        return (await Call(made, scope("/readyz", "GET"), b"").run()).status

    assert asyncio.run(scene(None)) == 503
    assert asyncio.run(scene(TWO)) == 200


def test_a_breaker_elsewhere_is_not_told() -> None:
    """Without a runtime in this process, or with another's ticket, an outcome goes nowhere and nothing fails."""
    async def scene() -> None:
        app = App()
        made = guarded(app, decision(probation=TWO))
        await Call(made).run()
        assert [tokens(body) for body in app.bodies] == [500]
        assert not made._told

    asyncio.run(scene())
