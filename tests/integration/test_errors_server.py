"""The middleware for errors in a real server: uvicorn, Starlette, and clients on plain sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from kvobs.asgi import ErrorMiddleware
from kvobs.errors import tally
from tests.integration.test_asgi_server import ask, posted, raw, serving
from tests.support import wait_until


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    tally.__init__()  # type: ignore[misc]
    yield
    tally.__init__()  # type: ignore[misc]


def failures() -> dict[tuple[str, str], int]:
    return {(found, phase): number for (_, found, phase), number in tally.failures().items()}


def outcomes() -> dict[str, int]:
    return {outcome: number for (_, outcome), number in tally.requests().items() if number}


class Served:
    """An application that streams when told, and fails in the ways that clients ask for."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.raised: list[BaseException] = []
        self.app = Starlette(routes=[Route(f"/{name}", getattr(self, name), methods=["POST"])
                                     for name in ("echo", "stream", "breaks", "fails", "refuses", "late")],
                             middleware=[Middleware(ErrorMiddleware)])

    async def echo(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    async def stream(self, request: Request) -> StreamingResponse:
        return StreamingResponse(self.chunks(), media_type="text/event-stream")

    async def chunks(self) -> Any:
        yield b"data: one\n\n"
        await asyncio.to_thread(self.go_on.wait, 30)
        yield b"data: two\n\n"

    async def breaks(self, request: Request) -> StreamingResponse:
        async def parts() -> Any:
            yield b"data: one\n\n"
            raise MemoryError("no more")

        return StreamingResponse(parts())

    async def fails(self, request: Request) -> None:
        raise ConnectionRefusedError("the database is away")

    async def refuses(self, request: Request) -> None:
        raise HTTPException(422)

    async def late(self, request: Request) -> None:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()


def test_each_request_is_counted_once_by_how_it_ended() -> None:
    """Answers, exceptions before and within an answer, and what the framework answers by itself, over HTTP."""
    served = Served()
    with serving(served.app) as port:
        assert posted(port, "/echo", b"x" * 100_000)[2] == b"100000"
        assert [posted(port, path)[0] for path in ("/fails", "/late", "/refuses", "/nowhere")] == [500, 500, 422, 404]
        assert b"data: one" in raw(port, ask("/breaks"))
        wait_until(lambda: sum(outcomes().values()) == 6, what="six ends")
    assert outcomes() == {"ok": 1, "refused": 2, "failed": 3}
    assert failures() == {("network_unreachable", "start"): 1, ("network_timeout", "start"): 1,
                          ("validation_failed", "start"): 1, ("refused", "start"): 1, ("out_of_memory", "stream"): 1}


def test_streams_come_through_and_are_ok_at_their_end() -> None:
    """The first part is read while the second is not made yet, and nothing is counted until the stream has ended."""
    served = Served()
    with serving(served.app) as port, socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(ask("/stream"))
        seen = b""
        while b"data: one" not in seen:
            seen += client.recv(4_096)
        assert b"data: two" not in seen
        assert outcomes() == {}
        served.go_on.set()
        assert b"data: two" in b"".join(iter(lambda: client.recv(4_096), b""))
        wait_until(lambda: outcomes() == {"ok": 1}, what="the end")
    assert failures() == {}


def test_a_client_that_leaves_a_stream_is_cancelled() -> None:
    """Closing the connection within a stream is no failure of the server."""
    served = Served()
    with serving(served.app) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(ask("/stream"))
            assert client.recv(4_096)
        wait_until(lambda: outcomes() == {"cancelled": 1}, what="the end of the stream")
        served.go_on.set()
    assert failures() == {("cancelled", "stream"): 1}


def test_a_client_that_leaves_within_its_body_is_cancelled() -> None:
    """A request whose body never comes whole is no failure of the server either."""
    with serving(Served().app) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(ask("/echo", b"x" * 100)[:-50])
        wait_until(lambda: outcomes() == {"cancelled": 1}, what="the end of the request")
    assert failures() == {("cancelled", "start"): 1}
