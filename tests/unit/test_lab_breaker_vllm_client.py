"""The experiment's client against a server that refuses once and then streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvobs.lab.breaker_vllm import _client
from kvobs.lab.breaker_vllm._plan import Session, Turn

USER = Session("u", "sheddable", 0.0, (Turn("one", 3, 0.0), Turn("two", 2, 0.0)))


class Peer:
    """What a server was asked, and how often it refuses at first."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[tuple[str | None, str | None]] = []
        self.refuse = 1
        self.port = 0


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A server on a free port of the loopback."""
    found = Peer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if found.refuse:
                found.refuse -= 1
                self.send_response(503)
                self.send_header("Retry-After", "0")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            found.bodies.append(body)
            found.headers.append((self.headers["kvobs-session"], self.headers["kvobs-priority"]))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            texts = [f"w{number} " for number in range(body["max_tokens"])]
            events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
            events += [{"choices": [{"delta": {"content": text}}]} for text in texts]
            events += [{"choices": [], "usage": {"completion_tokens": len(texts)}}]
            for event in events:
                self.chunk(f"data: {json.dumps(event)}\n\n".encode())
            self.chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")

        def chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    found.port = server.server_address[1]
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def test_a_session_goes_on_after_a_refusal(peer: Peer) -> None:
    """A refused turn is sent again; every turn carries what was said before, and the tokens are the server's count."""
    told, seconds = _client.talk(peer.port, [USER])
    assert [(one.tokens, one.wanted, one.refusals) for one in told] == [(3, 3, 1), (2, 2, 0)]
    assert all(one.first_s is not None and 0 < one.first_s <= one.last_s <= seconds for one in told)
    assert peer.headers == [("u", "sheddable")] * 2
    assert [one["content"] for one in peer.bodies[1]["messages"]] == ["one", "w0 w1 w2 ", "two"]


def test_a_user_who_is_always_refused_goes_away(peer: Peer) -> None:
    """After so many refusals the turn has no first token, and the session's later turns are not sent."""
    peer.refuse = _client.ATTEMPTS
    told, _ = _client.talk(peer.port, [USER])
    assert [(one.first_s, one.tokens, one.refusals) for one in told] == [(None, 0, _client.ATTEMPTS)]
    assert not peer.bodies
