"""The middleware in a real vLLM server, as its option ``--middleware`` makes it."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto", reason="The OTLP exporters are not installed (extra otel).")
from kvobs.breaker._board import BoardWriter, board_directory
from kvobs.breaker._gate import Decision
from kvobs.breaker._limits import UNLIMITED, Limits
from kvobs.store import StoreReader
from tests.asgi import CHAT, SECOND
from tests.peers import http_get
from tests.support import wait_until
from tests.vllm_server import make_model, serving

pytestmark = [pytest.mark.slow, pytest.mark.peer]
ASKED, LEFT = 30, 7  # new tokens
DECISION = Decision(generation=1, level=3, mode="act", limits=(UNLIMITED, Limits(max_new_tokens=LEFT),
                                                               Limits(admit=False)), retry_after_s=4.0,
                    expires_ns=3_600 * SECOND)


def chat(url: str, priority: str, **more: Any) -> tuple[int, Any, bytes]:
    """Status, headers and body of the answer to a chat request that vLLM would answer with ``ASKED`` tokens."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": ASKED, "ignore_eos": True}
    request = urllib.request.Request(url + CHAT, json.dumps(body | more).encode(), {
        "content-type": "application/json", "kvobs-priority": priority, "kvobs-session": f"a-{priority}-one"})
    with contextlib.closing(_open(request)) as answer:
        return answer.status, answer.headers, answer.read()


def _open(request: urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=120)
    except urllib.error.HTTPError as error:
        return error


def generated(answer: bytes) -> int:
    tokens: int = json.loads(answer)["usage"]["completion_tokens"]
    return tokens


def test_vllm_obeys_the_board(tmp_path: Path) -> None:
    """While the engine's board says level 3, normal requests get fewer tokens (streamed or not), sheddable ones 503,
    critical ones everything; /health is well throughout, and without a board all is as before. The sessions that the
    headers name are those of the engine's turns.
    """
    store = tmp_path / "store"
    settings = {"KVOBS_STORE": str(store), "KVOBS_PROMETHEUS": "off"}
    with serving(make_model(tmp_path), tmp_path, "--middleware", "kvobs.asgi.BreakerMiddleware",
                 settings=settings) as server:
        assert generated(chat(server.url, "normal")[2]) == ASKED
        writer = BoardWriter(board_directory(store), "test", lambda: 0)
        writer._group = server.child.pid  # the server is a process group of its own
        writer.publish(DECISION)

        def refused() -> bool:
            writer.publish(DECISION)
            return chat(server.url, "sheddable", max_tokens=1)[0] == 503

        wait_until(refused, what="a refusal")
        writer.publish(DECISION)
        status, headers, body = chat(server.url, "normal")
        assert (status, headers["kvobs-degraded"], generated(body)) == (200, f"max_tokens={LEFT}", LEFT)
        writer.publish(DECISION)
        streamed = chat(server.url, "normal", stream=True, stream_options={"include_usage": True})[2]
        last = [line for line in streamed.decode().splitlines() if line.startswith("data: {")][-1]
        assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == LEFT
        writer.publish(DECISION)
        status, headers, body = chat(server.url, "critical")
        assert (status, headers["kvobs-degraded"], generated(body)) == (200, None, ASKED)
        writer.publish(DECISION)
        status, headers, body = chat(server.url, "sheddable")
        assert status == 503
        assert 4 <= int(headers["retry-after"]) <= 6
        assert json.loads(body)["error"]["type"] == "server_error"
        assert http_get(f"{server.url}/health")[0] == 200
        writer.close()
        wait_until(lambda: chat(server.url, "sheddable", max_tokens=1)[0] == 200, what="an open gate")
        assert server.terminate() in (0, -15, 143)
    turns = {(turn.record.session, turn.record.priority) for turn in StoreReader(store).turns()}
    assert {("a-critical-one", "critical"), ("a-normal-one", "normal"), ("a-sheddable-one", "sheddable")} <= turns
