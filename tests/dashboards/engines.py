"""Serving engines before the same Prometheus: a bridge to a recorded one, and a real vLLM where there is one."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

from tests.served_page import Answer, Page, served, text
from tests.support import ROOT, child_environment, free_port, wait_until
from tests.vllm_server import Server as Engine
from tests.vllm_server import make_model, serving

RECORDED = ROOT / "tests" / "data" / "serving" / "vllm_0.29_metrics_under_load.txt"
GROWS = re.compile(r"^(\S+_(?:total|sum|count|bucket)(?:\{.*\})?) (\S+)$", re.MULTILINE)
DOWN = text("", status=503)
TEXT = "The quick brown fox jumps over the lazy dog. "


def growing(recorded: str) -> Answer:
    """A recorded page whose counters have grown by a hundredth of themselves at each look."""
    looks = iter(range(100, 1_000_000))

    def answer(request: BaseHTTPRequestHandler) -> None:
        factor = next(looks) / 100
        text(GROWS.sub(lambda found: f"{found[1]} {float(found[2]) * factor:.6f}", recorded))(request)

    return answer


@contextlib.contextmanager
def bridged(directory: Path) -> Iterator[tuple[Page, int]]:
    """``kvobs bridge`` before a recorded vLLM: the page, which may be made to fail, and the bridge's port."""
    port, log = free_port(), directory / "bridge.log"
    with served(growing(RECORDED.read_text(encoding="utf-8"))) as page, log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "kvobs", "bridge", "--scrape", f"{page.url}/metrics", "--every", "1", "--store",
             "off", "--prometheus", f"127.0.0.1:{port}"], stdin=subprocess.DEVNULL, stdout=output, cwd=ROOT,
            stderr=subprocess.STDOUT, env=child_environment())
        try:
            wait_until(lambda: "metrics at " in log.read_text(), 60, "the bridge serves")
            yield page, port
        finally:
            child.terminate()
            child.wait(timeout=20)


@contextlib.contextmanager
def vllm(directory: Path, objectives: Path, store: Path) -> Iterator[Engine]:
    """A real vLLM under kvobs; its processes tell Prometheus their addresses beside the store."""
    settings = {"KVOBS_STORE": str(store), "KVOBS_PROMETHEUS": "127.0.0.1:0", "VLLM_PLUGINS": "kvobs",
                "KVOBS_CONFIG": str(objectives), "KVOBS_BREAKER": "observe", "KVOBS_OVERHEAD_PERCENT": "100",
                "OTEL_SERVICE_NAME": "vllm", "PYTHONPATH": str(ROOT)}
    with serving(make_model(directory), directory, "--middleware", "kvobs.asgi.BreakerMiddleware",
                 settings=settings) as server:
        yield server


class Clients:
    """So many threads that ask one request after the other; their number may be changed while they do."""

    def __init__(self, server: Engine) -> None:
        self._where = urlsplit(server.url).netloc
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self.failures: list[str] = []

    def ask(self, threads: int, tokens: int) -> None:
        """From now on so many threads that want so many tokens each; those before end with their request."""
        self._stop.set()
        self._stop = stop = threading.Event()
        for number in range(threads):
            thread = threading.Thread(target=self._loop, args=(stop, number, tokens), daemon=True)
            self._threads.append(thread)
            thread.start()

    def end(self) -> None:
        """No more requests; waits for the last answers."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def _loop(self, stop: threading.Event, number: int, tokens: int) -> None:
        body = json.dumps({"model": "tiny", "prompt": TEXT * 2 + str(number), "max_tokens": tokens, "seed": 1,
                           "ignore_eos": True})
        while not stop.is_set():
            connection = http.client.HTTPConnection(self._where, timeout=60)
            try:
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    self.failures.append(f"status {answer.status}")
            except OSError as error:
                self.failures.append(str(error))
            finally:
                connection.close()
            stop.wait(0.3)
