"""The middleware in a real server: uvicorn, Starlette, and clients on plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from kvobs.asgi import BreakerMiddleware
from kvobs.breaker._gate import OBSERVE
from kvobs.breaker._limits import UNLIMITED, Limits
from tests.asgi import CHAT, Board, decision
from tests.support import ROOT, child_environment, wait_until

PATIENT = decision(limits=(UNLIMITED, Limits(max_new_tokens=100), Limits(max_new_tokens=10)))
PUBLISHES = """
import sys, time
from pathlib import Path
from kvobs.breaker._board import BoardWriter
from tests.asgi import decision
writer = BoardWriter(Path(sys.argv[1]), "engine")
while True:
    writer.publish(decision(expires_ns=time.monotonic_ns() + 60 * 10**9))
"""


class Served:
    """An application of three answers, whose stream goes on when the test says so."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.ended: list[str] = []
        self.app = Starlette(routes=[
            Route(CHAT, self.echo, methods=["POST"]), Route("/v1/stream", self.stream, methods=["POST"]),
            Route("/v1/fails", self.fails, methods=["POST"]), Route("/health", self.health)])

    async def echo(self, request: Request) -> JSONResponse:
        return JSONResponse({"body": (await request.body()).decode(),
                             "length": request.headers.get("content-length")}, headers={"x-own": "1"})

    async def stream(self, request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(self.chunks(), media_type="text/event-stream")

    async def chunks(self) -> Any:
        try:
            yield b"data: one\n\n"
            await asyncio.to_thread(self.go_on.wait, 30)
            yield b"data: two\n\n"
            self.ended.append("whole")
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise

    async def fails(self, request: Request) -> None:
        raise RuntimeError("mine")

    async def health(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse("well")


@contextlib.contextmanager
def serving(app: Any) -> Iterator[int]:
    """Serve on a free port of 127.0.0.1, which is returned."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, date_header=False, lifespan="off", log_level="critical",
                                           timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn")
    thread.start()
    try:
        wait_until(lambda: server.started, what="uvicorn")
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def posted(port: int, path: str = CHAT, body: Any = b'{"max_tokens": 500}', **headers: str) -> tuple[int, Any, bytes]:
    """Status, headers and body of an answer; names of headers have ``_`` for ``-``."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    given = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request("POST", path, body, given)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def raw(port: int, text: bytes) -> bytes:
    """Everything that the server sends for these bytes, until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(text)
        return b"".join(iter(lambda: client.recv(65_536), b""))


def ask(path: str, body: bytes = b"", method: str = "POST", more: bytes = b"") -> bytes:
    return (f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n").encode() + more + b"\r\n" + body


def test_a_stream_comes_through_message_by_message() -> None:
    """A degraded client reads the first part while the application has not made the second yet."""
    served = Served()
    with serving(BreakerMiddleware(served.app, board=Board(PATIENT))) as port, \
            socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(ask("/v1/stream", b"{}"))
        seen = b""
        while b"data: one" not in seen:
            seen += client.recv(4_096)
        assert b"data: two" not in seen
        served.go_on.set()
        assert b"data: two" in b"".join(iter(lambda: client.recv(4_096), b""))
    assert served.ended == ["whole"]


def test_a_client_that_goes_away_frees_its_place() -> None:
    """The application's stream is cancelled as without the middleware, and the place is free, once."""
    served = Served()
    made = BreakerMiddleware(served.app, board=Board(PATIENT), max_active=1)
    with serving(made) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(ask("/v1/stream", b"{}"))
            assert client.recv(4_096)
            assert made.active == 1
        wait_until(lambda: served.ended == ["cancelled"], what="the end of the stream")
        served.go_on.set()
        wait_until(lambda: made.active == 0, what="a free place")
        assert posted(port)[0] == 200
        wait_until(lambda: made.active == 0, what="a free place again")


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue() -> None:
    """Closing the connection of a waiting request takes it out; the application never sees it."""
    served = Served()
    made = BreakerMiddleware(served.app, board=Board(PATIENT), max_active=1)
    with serving(made) as port, socket.create_connection(("127.0.0.1", port), timeout=30) as first:
        first.sendall(ask("/v1/stream", b"{}"))
        assert first.recv(4_096)
        with socket.create_connection(("127.0.0.1", port), timeout=30) as second:
            second.sendall(ask("/v1/stream", b"{}"))
            wait_until(lambda: made.waiting == 1, what="a waiting request")
        wait_until(lambda: made.waiting == 0, what="an empty queue")
        assert made.active == 1
        served.go_on.set()
        wait_until(lambda: made.active == 0, what="a free place")
    assert served.ended == ["whole"]
    assert made.counts["act", "normal", "gone"] == 1


def test_a_refused_request_leaves_its_connection_usable() -> None:
    """After 503 with Retry-After, whatever of the body was not read, the next request on the connection is answered."""
    made = BreakerMiddleware(Served().app, board=Board(decision()))
    with serving(made) as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        for priority, status in (("sheddable", 503), ("critical", 200), ("sheddable", 503)):
            connection.request("POST", CHAT, b"x" * 200_000, {"kvobs-priority": priority})
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == status
            if status == 503:
                assert 4 <= int(answer.headers["retry-after"]) <= 6
                assert json.loads(body)["error"]["code"] == "overloaded"
        connection.close()
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b"well"
        connection.close()


def test_fewer_tokens_reach_the_application() -> None:
    """With and without a length of the body, the application reads the lowered limit and a length that fits."""
    with serving(BreakerMiddleware(Served().app, board=Board(PATIENT))) as port:
        for body in (b'{"max_tokens": 500}', iter([b'{"max_to', b'kens": 500}'])):
            status, headers, answer = posted(port, body=body)
            echoed = json.loads(answer)
            assert status == 200
            assert json.loads(echoed["body"]) == {"max_tokens": 100}
            assert echoed["length"] in (None, str(len(echoed["body"])))
            assert headers["kvobs-degraded"] == "max_tokens=100"
            assert headers["x-own"] == "1"
        assert posted(port, kvobs_priority="critical")[1]["kvobs-degraded"] is None


def test_observe_gives_the_same_bytes() -> None:
    """Answers of a server in mode observe are those of the bare application, byte for byte, also where it would have
    refused or lowered something.
    """
    requests = [ask(CHAT, b'{"max_tokens": 500}'),
                ask(CHAT, b'{"max_tokens": 500}', more=b"kvobs-priority: sheddable\r\n"),
                ask(CHAT, b"no json"), ask(CHAT, b"x" * 3_000_000), ask("/v1/stream", b"{}"), ask("/v1/nowhere"),
                ask("/v1/fails"), ask("/health", method="GET"), ask(CHAT, method="GET")]
    served = Served()
    served.go_on.set()
    made = BreakerMiddleware(served.app, board=Board(decision(mode=OBSERVE)), max_active=1)
    with serving(served.app) as bare, serving(made) as observed:
        for text in requests:
            expected = raw(bare, text)
            assert expected.startswith(b"HTTP/1.1 ")
            assert raw(observed, text) == expected
        wait_until(lambda: made.active == 0, what="the end of all requests")
    assert made.counts["observe", "normal", "clamped"] == 1
    assert made.counts["observe", "sheddable", "refused"] == 1


def test_the_board_of_another_process_decides(tmp_path: Path) -> None:
    """While the engine's process lives and says so, sheddable requests get 503; killed, it has nothing to say."""
    process = subprocess.Popen([sys.executable, "-c", PUBLISHES, str(tmp_path)], env=child_environment(), cwd=ROOT)
    try:
        with serving(BreakerMiddleware(Served().app, board=tmp_path)) as port:
            wait_until(lambda: posted(port, kvobs_priority="sheddable")[0] == 503, what="a refusal")
            process.kill()
            process.wait()
            wait_until(lambda: posted(port, kvobs_priority="sheddable")[0] == 200, what="an open gate")
    finally:
        process.kill()
        process.wait()


def test_a_long_chat_loses_its_oldest_turns() -> None:
    """The server is sent the instructions and the newest turns, the right length with them, and the client is told; a
    stream goes on as it would; critical sessions, other bodies and mode observe are left alone.
    """
    turns = [{"role": role, "content": "x" * 400} for _ in range(5) for role in ("user", "assistant")]
    chat = {"messages": [{"role": "system", "content": "be brief"}, *turns, {"role": "user", "content": "now?"}]}
    body = json.dumps(chat).encode()
    found = decision(limits=(UNLIMITED, Limits(history_tokens=450), Limits(history_tokens=0)))
    served = Served()
    served.go_on.set()
    made = BreakerMiddleware(served.app, board=Board(found))
    with serving(made) as port:
        status, headers, answer = posted(port, body=body)
        received = json.loads(answer)
        assert status == 200
        assert json.loads(received["body"]) == {"messages": [chat["messages"][0], *chat["messages"][7:]]}
        assert int(received["length"]) == len(received["body"].encode())
        assert headers["kvobs-history-dropped"] == "turns=3, messages=6, tokens=624;estimated"
        assert headers["kvobs-degraded"] == "history_tokens=450"
        _, _, least = posted(port, body=iter([body[:99], body[99:]]), kvobs_priority="sheddable")
        assert json.loads(json.loads(least)["body"])["messages"] == [chat["messages"][0], chat["messages"][-1]]
        for untouched, priority in ((body, "critical"), (b"no json", "normal"), (b"x" * 3_000_000, "normal"),
                                    (json.dumps({"messages": chat["messages"][-1:]}).encode(), "normal")):
            _, headers, answer = posted(port, body=untouched, kvobs_priority=priority)
            assert json.loads(answer)["body"].encode() == untouched
            assert "kvobs-history-dropped" not in headers
        _, _, stream = posted(port, "/v1/stream", body)
        assert stream == b"data: one\n\ndata: two\n\n"
        assert made.counts["act", "normal", "trimmed"] == made.counts["act", "sheddable", "trimmed"] == 1
    observing = BreakerMiddleware(served.app, board=Board(decision(mode=OBSERVE, limits=found.limits)))
    with serving(served.app) as bare, serving(observing) as observed:
        assert raw(observed, ask(CHAT, body)) == raw(bare, ask(CHAT, body))
        wait_until(lambda: observing.active == 0, what="the end of the request")
    assert observing.counts["observe", "normal", "trimmed"] == 1
