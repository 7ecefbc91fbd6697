"""The middleware's queue with an ASGI server in hand: who waits, for whom, until when, and places given back once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvobs import asgi
from kvobs.breaker._gate import OBSERVE
from kvobs.breaker._limits import UNLIMITED, Limits
from tests.asgi import SECOND, App, Board, Call, Clock, decision, guarded, scope, until

PATIENT = decision(limits=(UNLIMITED, Limits(max_new_tokens=100), Limits(max_new_tokens=10)))


def test_who_finds_all_places_taken_waits_its_turn() -> None:
    """With one place, sessions take turns whatever the order in which they came; critical ones do not wait."""
    async def main() -> None:
        app = App(held=True)
        made = guarded(app, PATIENT, max_active=1)
        calls = []
        for name in ("first", "a", "a", "a", "b", "c"):
            calls.append(Call(made, scope(kvobs_session=name)).start())
            await until(lambda: made.active + made.waiting == len(calls))
        calls.append(Call(made, scope(kvobs_session="vip", kvobs_priority="critical")).start())
        await until(lambda: app.serving == ["first", "vip"])
        for number in range(7):
            app.free.release()
            await until(lambda: sum(call.done() for call in calls) == number + 1)  # noqa: B023
        await asyncio.gather(*calls)
        assert app.serving == ["first", "vip", "a", "b", "c", "a", "a"]
        assert (made.active, made.waiting) == (0, 0)
        assert made.counts["act", "normal", "queued"] == 5

    asyncio.run(main())


def test_a_free_place_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a request lets the next one in; nobody waits for the moment at which the queue is looked after."""
    monkeypatch.setattr(asgi, "PUMP_S", 10**6)

    async def main() -> None:
        app = App(held=True)
        made = guarded(app, PATIENT, max_active=1)
        calls = [Call(made).start() for _ in range(3)]
        await until(lambda: made.waiting == 2)
        for _ in calls:
            app.free.release()
        await until(lambda: all(call.done() for call in calls))

    asyncio.run(main())


def test_as_many_as_were_active_when_it_began_may_be() -> None:
    """Without a number of its own, the middleware lets no more be active than were when the level began."""
    async def main() -> None:
        app, board, clock = App(held=True), Board(), Clock()
        made = guarded(app, None, clock)
        made._board = board
        calls = [Call(made, scope(kvobs_session=name)).start() for name in "abc"]
        await until(lambda: made.active == 3)
        board.found, clock.now_ns = PATIENT, clock.now_ns + SECOND
        calls += [Call(made, scope(kvobs_session=name)).start() for name in "de"]
        await until(lambda: made.waiting == 2)
        app.free.release()
        await until(lambda: made.waiting == 1)
        assert made.active == 3
        for _ in range(4):
            app.free.release()
        await asyncio.gather(*calls)

    asyncio.run(main())


def test_who_waits_is_let_in_when_the_level_ends() -> None:
    """No decision, one that limits nobody, or one in mode observe: everybody who waits goes on within a moment."""
    async def main(after: Any) -> None:
        app, clock = App(held=True), Clock()
        made = guarded(app, PATIENT, clock, max_active=1)
        calls = [Call(made).start() for _ in range(4)]
        await until(lambda: made.waiting == 3)
        made._board.found, clock.now_ns = after, clock.now_ns + SECOND  # type: ignore[union-attr]
        await until(lambda: made.active == 4)
        for _ in range(4):
            app.free.release()
        await asyncio.gather(*calls)

    for after in (None, decision(level=0, limits=(UNLIMITED,) * 3), decision(mode=OBSERVE)):
        asyncio.run(main(after))


def test_who_waits_too_long_is_refused() -> None:
    """At its deadline a request gets 503, and when to come back follows from those who wait and the drain rate."""
    async def main() -> None:
        app, clock = App(held=True), Clock()
        made = guarded(app, PATIENT, clock, max_active=1, queue_s=10.0)
        app.free.release()
        await Call(made).run()  # one request in 10 s: the drain rate when the deadline passes
        calls = [Call(made) for _ in range(2)]
        running = [call.start() for call in calls]
        await until(lambda: made.waiting == 1)
        clock.now_ns += 10 * SECOND
        await until(running[1].done)
        assert calls[1].status == 503
        assert calls[1].headers["retry-after"] == "10"
        assert b"has waited too long" in calls[1].body
        app.free.release()
        await asyncio.gather(*running)
        assert made.counts["act", "normal", "late"] == 1
        assert (made.active, made.waiting) == (0, 0)

    asyncio.run(main())


def test_who_finds_the_line_full_is_refused() -> None:
    """With no room to wait, the second request gets 503 at once."""
    async def main() -> None:
        app = App(held=True)
        made = guarded(app, PATIENT, max_active=1, max_queued=0)
        first = Call(made).start()
        await until(lambda: made.active == 1)
        second = await Call(made).run()
        assert second.status == 503
        assert b"too many requests wait" in second.body
        app.free.release()
        await first
        assert made.counts["act", "normal", "full"] == 1

    asyncio.run(main())


def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    """The application never hears of it, nothing is sent, and its place in the line is free."""
    async def main() -> None:
        app = App(held=True)
        made = guarded(app, PATIENT, max_active=1)
        first = Call(made).start()
        await until(lambda: made.active == 1)
        second = Call(made)
        leaving = second.start()
        await until(lambda: made.waiting == 1)
        second.leave()
        await leaving
        assert (made.active, made.waiting, second.sent) == (1, 0, [])
        app.free.release()
        await first
        assert len(app.seen) == 1
        assert made.counts["act", "normal", "gone"] == 1
        assert made.active == 0

    asyncio.run(main())


def test_a_client_that_leaves_while_it_sends_is_forgotten() -> None:
    """One that goes away in the middle of its body takes no place."""
    async def main() -> None:
        app = App()
        made = guarded(app, PATIENT)
        call = Call(made, None, b"{", b"}")
        call.messages.get_nowait()
        call.messages.get_nowait()
        call.messages.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        call.leave()
        await call.run()
        assert (app.seen, call.sent, made.active) == ([], [], 0)

    asyncio.run(main())


def test_the_application_still_hears_that_a_client_has_left() -> None:
    """A request that has waited and was then let in gets the disconnect that comes afterwards, once."""
    async def main() -> None:
        heard: list[str] = []
        release = asyncio.Event()

        async def app(given: Any, receive: Any, send: Any) -> None:
            heard.append((await receive())["type"])
            if len(heard) == 1:
                await release.wait()
                return
            heard.append((await receive())["type"])

        made = guarded(app, PATIENT, max_active=1)
        first = Call(made).start()
        await until(lambda: made.active == 1)
        second = Call(made)
        waiting = second.start()
        await until(lambda: made.waiting == 1)
        release.set()
        await until(lambda: len(heard) == 2)
        second.leave()
        await asyncio.gather(first, waiting)
        assert heard == ["http.request", "http.request", "http.disconnect"]
        assert second.messages.empty()
        assert made.active == 0

    asyncio.run(main())


def test_a_request_that_is_cancelled_gives_its_place_back() -> None:
    """Cancelled by the server while it waits or while it is served, it leaves nothing, and the next one goes on."""
    async def main() -> None:
        app = App(held=True)
        made = guarded(app, PATIENT, max_active=1)
        calls = [Call(made, scope(kvobs_session=name)).start() for name in "abc"]
        await until(lambda: made.waiting == 2)
        calls[1].cancel()
        await until(lambda: made.waiting == 1)
        calls[0].cancel()
        await until(lambda: app.serving == ["a", "c"])
        app.free.release()
        await calls[2]
        assert (made.active, made.waiting) == (0, 0)
        await until(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(main())


def test_each_event_loop_has_its_own_queue() -> None:
    """Requests of a second loop beside the first pass as they are; one that comes after the first has its turn."""
    app = App()
    made = guarded(app, decision())

    async def beside() -> None:
        assert (await Call(made, scope(kvobs_priority="sheddable")).run()).status == 503
        other = asyncio.new_event_loop()
        found = await asyncio.to_thread(lambda: other.run_until_complete(
            Call(made, scope(kvobs_priority="sheddable")).run()))
        other.close()
        assert found.status == 200

    asyncio.run(beside())
    assert asyncio.run(Call(made, scope(kvobs_priority="sheddable")).run()).status == 503
