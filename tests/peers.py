"""Real programs and deliberately bad ones that the exporters talk to; each is a context manager that ends its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvobs.model import Origin, Turn
from tests.support import ROOT, child_environment, free_port, program, wait_until


def http_get(url: str, headers: Mapping[str, str] | None = None, method: str = "GET",
             timeout: float = 10.0) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower-case names) and body of one request; refusals come back as their status."""
    request = urllib.request.Request(url, headers=dict(headers or {}), method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()


def listening(port: int) -> bool:
    """Whether somebody accepts connections on 127.0.0.1:port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def running(command: list[str], log: Path, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program with its output in ``log``; interrupted, then killed, at the end."""
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                 env=child_environment(**settings))
        try:
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(timeout=10)


class Rotel:
    """A running rotel agent. What it received is read from its detailed debug log."""

    def __init__(self, grpc_port: int, http_port: int, log: Path) -> None:
        self.grpc = f"http://127.0.0.1:{grpc_port}"
        self.http = f"http://127.0.0.1:{http_port}"
        self._log = log

    def text(self) -> str:
        """The log so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def endpoint(self, protocol: str) -> str:
        """The address for an ``OTEL_EXPORTER_OTLP_PROTOCOL``."""
        return self.grpc if protocol == "grpc" else self.http

    def spans(self) -> dict[str, str]:
        """Trace ids (hex) by the names of the spans received."""
        found = re.findall(r"^ +Trace ID +: (\w+)$.*?^ +Name +: (.*?)$", self.text(), re.MULTILINE | re.DOTALL)
        return {name.strip(): trace_id for trace_id, name in found}

    def metrics(self) -> dict[str, str]:
        """The latest description, as rotel prints it, of each metric received."""
        parts = re.split(r"^Metric #\d+$", self.text(), flags=re.MULTILINE)[1:]
        named = ((re.search(r"-> Name: (\S+)", part), part) for part in parts)
        return {name[1]: part for name, part in named if name}


@contextlib.contextmanager
def rotel(directory: Path) -> Iterator[Rotel]:
    """A rotel agent on free ports, or a skip."""
    spec = importlib.util.find_spec("rotel")
    if spec is None or spec.origin is None:
        pytest.skip("rotel is not installed; the extra dev brings it.")
    grpc_port, http_port = free_port(), free_port()
    log = directory / "rotel.txt"
    command = [str(Path(spec.origin).with_name("rotel-agent")), "start",
               "--otlp-grpc-endpoint", f"127.0.0.1:{grpc_port}", "--otlp-http-endpoint", f"127.0.0.1:{http_port}",
               "--exporter", "blackhole", "--debug-log", "traces", "--debug-log", "metrics",
               "--debug-log-verbosity", "detailed",
               "--pid-file", str(directory / "rotel.pid"), "--log-file", str(directory / "rotel.log")]
    with running(command, log):
        wait_until(lambda: listening(grpc_port) and listening(http_port), what="rotel listens")
        yield Rotel(grpc_port, http_port, log)


class Prometheus:
    """A running Prometheus server."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def api(self, path: str, **query: str) -> Any:
        """The ``data`` of an API answer; fails the test on an error."""
        status, _, body = http_get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}")
        assert status == 200, body
        return json.loads(body)["data"]

    def value(self, expression: str) -> float | None:
        """The value of an instant query that has one series, None where it has none."""
        result = self.api("query", query=expression)["result"]
        return float(result[0]["value"][1]) if result else None


@contextlib.contextmanager
def prometheus(directory: Path, target: str) -> Iterator[Prometheus]:
    """Debian's Prometheus on a free port, scraping ``target`` (host:port) twice a second, or a skip."""
    path = program("prometheus", "prometheus")
    port = free_port()
    config = directory / "prometheus.yml"
    config.write_text("scrape_configs:\n  - job_name: kvobs\n    scrape_interval: 500ms\n    scrape_timeout: 500ms\n"
                      f"    static_configs:\n      - targets: ['{target}']\n")
    command = [path, f"--config.file={config}", f"--storage.tsdb.path={directory / 'tsdb'}",
               f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=warn"]
    with running(command, directory / "prometheus.txt"):
        server = Prometheus(port)
        wait_until(lambda: listening(port) and http_get(f"{server.url}/-/ready")[0] == 200, what="Prometheus is ready")
        yield server


# The OpenTelemetry conventions name it so; promtool takes the suffix for a histogram's.
_STANDARD = b"process_thread_count non-histogram and non-summary metrics should not have \"_count\" suffix\n"


def promtool_complaints(text: bytes) -> str:
    """What ``promtool check metrics`` says about a scrape in the text format; a name the conventions give is fine."""
    done = subprocess.run([program("promtool", "prometheus"), "check", "metrics"], input=text, capture_output=True,
                          check=False, timeout=60)
    said = (done.stdout + done.stderr).replace(_STANDARD, b"")
    assert said or not done.returncode or _STANDARD in done.stdout + done.stderr
    return said.decode()


class BlackHole:
    """Accepts connections and never answers. ``reached`` is set at the first one."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.reached = threading.Event()
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, name="black-hole", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                self._held.append(self._listener.accept()[0])
            except OSError:
                return
            self.reached.set()

    def close(self) -> None:
        """Hang up on everybody."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=5)
        for held in self._held:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
            held.close()


@contextlib.contextmanager
def black_hole() -> Iterator[BlackHole]:
    """A server that takes everything and says nothing."""
    server = BlackHole()
    try:
        yield server
    finally:
        server.close()


def spoken_turn(trace_id: str, span_id: str, model_name: str = "m", *, sampled: bool = True) -> Turn:
    """A turn with known numbers: 1 s long, 5 prompt and 3 new tokens, first token after 5 ms, then one per 6 ms."""
    origin = Origin("transformers", model_name, "DynamicCache", "cpu", "float32")
    return Turn(t_ns=2_000_000_000, start_ns=1_000_000_000, wall_start_ns=1_000_000_000, origin=origin, cache_id=1,
                session="s", priority="normal", turn=1, outcome="ok", steps=3, prompt_tokens=5, cached_tokens=0,
                new_tokens=3, kv_bytes=1, kv_reserved_bytes=1, kv_largest_bytes=1, reallocations=2, bytes_written=3,
                bytes_copied=4, migrations=(), ttft_ns=5_000_000, tpot_ns=6_000_000, prefill_ns=5_000_000, hook_ns=5,
                trace_id=trace_id, span_id=span_id, sampled=sampled)


# A process as kvobs makes one: a turn with its span, metrics, and both exporters. It prints what it did as JSON, then
# waits for the end of its input.
WORKER = """
import json, sys
from opentelemetry import trace
from kvobs.config import Config
from kvobs.exporters import OtelExporter, PrometheusExporter
from kvobs.metrics import Metrics
from tests.peers import spoken_turn
metrics = Metrics()
otel = OtelExporter(Config(), metrics, "process-1")
endpoint, _ = PrometheusExporter.start(metrics, "127.0.0.1", 0, "process-1")
with otel.tracer().start_as_current_span("text_completion m") as span:
    ids = span.get_span_context()
turn = spoken_turn(trace.format_trace_id(ids.trace_id), trace.format_span_id(ids.span_id))
metrics.fold([turn])
metrics.refresh(0)
otel.tick(metrics.take_observations())
otel.flush()
print(json.dumps({"trace_id": turn.trace_id, "span_id": turn.span_id, "url": endpoint.url}), flush=True)
sys.stdin.read()
otel.stop()
endpoint.stop()
lost = {row.name: points for row, points in metrics.collect()}.get("kvobs.self.events.dropped", {})
print(json.dumps({"lost": sum(lost.values())}), flush=True)
"""


class Worker:
    """The process of ``WORKER``; ``said`` is its first line, ``end()`` its last."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        self._child = child
        line = child.stdout.readline()
        assert line, child.stderr.read() if child.stderr else ""
        self.said: dict[str, str] = json.loads(line)

    def end(self) -> dict[str, int]:
        """Let it stop; returns what it said at the end."""
        out, error = self._child.communicate(timeout=60)
        assert (self._child.returncode, error) == (0, ""), error
        found: dict[str, int] = json.loads(out)
        return found


@contextlib.contextmanager
def worker(**settings: str) -> Iterator[Worker]:
    """A real observed process in this environment's interpreter."""
    child = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, cwd=ROOT, env=child_environment(**settings))
    try:
        yield Worker(child)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait(timeout=10)
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None and not stream.closed:
                stream.close()
