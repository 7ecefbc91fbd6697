"""The middleware under programs of requests that come, end, are cancelled or leave, while levels come and go."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvobs.breaker._limits import UNLIMITED, Limits
from kvobs.sessions import PRIORITIES
from tests.asgi import SECOND, Board, Call, Clock, decision, guarded, scope, until

PLACES = 2
LEVEL = decision(limits=(UNLIMITED, Limits(max_new_tokens=100), Limits(max_new_tokens=10)))
moves = st.lists(st.one_of(
    st.tuples(st.just("come"), st.sampled_from("abc"), st.sampled_from(PRIORITIES)),
    st.tuples(st.just("come"), st.sampled_from("abc"), st.just("normal")),
    st.tuples(st.sampled_from(["cancel", "leave"]), st.integers(0, 30), st.none()),
    st.tuples(st.sampled_from(["serve", "level", "calm", "late"]), st.none(), st.none())), max_size=30)


class Counting:
    """An application that notes how many it already served when a limited request came in."""

    def __init__(self) -> None:
        self.inside = 0
        self.found: list[int] = []
        self.free = asyncio.Semaphore(0)

    async def __call__(self, given_: Any, receive: Any, send: Any) -> None:
        if dict(given_["headers"])[b"kvobs-priority"] != b"critical":
            self.found.append(self.inside)
        self.inside += 1
        try:
            await receive()
            await self.free.acquire()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.inside -= 1


async def played(program: list[tuple[str, Any, Any]]) -> None:
    app, clock, board = Counting(), Clock(), Board(LEVEL)
    made = guarded(app, None, clock, max_active=PLACES, queue_s=5.0)
    made._board = board
    calls: list[Call] = []
    running: list[asyncio.Task[Call]] = []
    for what, who, priority in program:
        if what == "come":
            calls.append(Call(made, scope(kvobs_session=who, kvobs_priority=priority)))
            running.append(calls[-1].start())
        elif what == "cancel" and running:
            running[who % len(running)].cancel()
        elif what == "leave" and calls:
            calls[who % len(calls)].leave()
        elif what == "serve" and app.inside:
            app.free.release()
        elif what in ("level", "calm"):
            board.found = LEVEL if what == "level" else None
            clock.now_ns += SECOND // 10
        elif what == "late":
            clock.now_ns += 3 * SECOND
        for _ in range(10):
            await asyncio.sleep(0)
        assert made.active == app.inside
    if not any(what == "calm" for what, *_ in program):
        assert all(inside < PLACES for inside in app.found)
    for _ in calls:
        app.free.release()
    board.found, clock.now_ns = None, clock.now_ns + SECOND
    await until(lambda: all(task.done() for task in running))
    starts = [sum(message["type"] == "http.response.start" for message in call.sent) for call in calls]
    besides = "queued", "clamped", "trimmed"
    counted = sum(number for (*_, outcome), number in made.counts.items() if outcome not in besides)
    assert set(starts) <= {0, 1}
    assert sum(starts) <= counted <= len(calls)
    assert (made.active, made.waiting, app.inside) == (0, 0, 0)
    await until(lambda: len(asyncio.all_tasks()) == 1)


@given(program=moves)
def test_places_are_taken_and_given_back_once(program: list[tuple[str, Any, Any]]) -> None:
    """While the level lasts a limited request is let in only where a place is free, the middleware counts as active who
    is served, each is answered at most once, and in the end nobody is active, waits or is left as a task.
    """
    asyncio.run(played(program))
