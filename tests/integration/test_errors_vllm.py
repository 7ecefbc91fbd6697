"""The middleware for errors in a real vLLM server, as its option ``--middleware`` makes it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("opentelemetry.proto", reason="The OTLP exporters are not installed (extra otel).")
from kvobs.catalog import BY_NAME
from kvobs.store import StoreReader
from tests.asgi import CHAT
from tests.integration.test_asgi_vllm import chat, generated
from tests.support import wait_until
from tests.vllm_server import make_model, serving

pytestmark = [pytest.mark.slow, pytest.mark.peer]


def counted(store: Path, metric: str) -> dict[tuple[str, ...], float]:
    """The latest value of each point of a counter, health checks and scrapes included."""
    names = BY_NAME[metric].attributes
    return {tuple(point.attributes[name] for name in names): point.value
            for point in StoreReader(store).points(metric) if point.value}


def test_vllm_counts_how_requests_end(tmp_path: Path) -> None:
    """Answers, a body that is not valid, a path that is not there and a client that leaves its stream, as metrics."""
    store = tmp_path / "store"
    with serving(make_model(tmp_path), tmp_path, "--middleware", "kvobs.asgi.ErrorMiddleware",
                 settings={"KVOBS_STORE": str(store), "KVOBS_PROMETHEUS": "off"}) as server:
        assert generated(chat(server.url, "normal")[2]) > 0
        assert chat(server.url, "normal", stream=True)[0] == 200
        assert chat(server.url, "normal", max_tokens="many")[0] == 400
        host = urlsplit(server.url)
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400,
                           "ignore_eos": True, "stream": True}).encode()
        with socket.create_connection((str(host.hostname), host.port or 0), timeout=60) as client:
            client.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                           f"content-length: {len(body)}\r\n\r\n".encode() + body)
            assert client.recv(4_096).startswith(b"HTTP/1.1 200")
        wait_until(lambda: counted(store, "kvobs.http.requests").get(("asgi", "cancelled")) == 1, what="the count")
        assert server.terminate() in (0, -15, 143)
    requests = counted(store, "kvobs.http.requests")
    assert requests["asgi", "ok"] >= 2
    assert requests["asgi", "refused"] == 1
    assert ("asgi", "failed") not in requests
    assert counted(store, "kvobs.http.failures") == {("asgi", "validation_failed", "start"): 1,
                                                     ("asgi", "cancelled", "stream"): 1}
