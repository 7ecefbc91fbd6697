"""Threads, asyncio, fork and spawn: every turn becomes exactly one span and one row, under the right parent."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support import child_environment, wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="The OTLP exporter is not installed.")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

# A source whose turns are labelled; it is installed in this process and in every one that it spawns.
_SOURCE = """
import asyncio, multiprocessing, os, threading, time
from opentelemetry import trace
import kvobs
from kvobs import runtime, spans
from kvobs.model import Origin, Turn

class Labelled:
    name = "labelled"
    def __init__(self, wiring):
        self.wiring = wiring
    def install(self, emit):
        self.emit = emit
    def uninstall(self):
        pass
    def sample(self, now_ns):
        return ()
    def availability(self):
        return ()

runtime.factories = lambda: (Labelled,)

def source():
    return runtime.current().sources[0]

def turn(label):
    before = trace.get_current_span()
    start, wall = time.monotonic_ns(), time.time_ns()
    opened = spans.open_turn(source().wiring.tracer(), label, wall, {})
    assert trace.get_current_span() is opened.span
    opened.leave()
    assert trace.get_current_span() is before, "a stale context"
    trace_id, span_id, sampled = opened.ids
    done = Turn(t_ns=time.monotonic_ns(), start_ns=start, wall_start_ns=wall,
                origin=Origin("labelled", "m", "c", "cpu", "float32"), cache_id=1, session=label, priority="normal",
                turn=1, outcome="ok", steps=1, prompt_tokens=1, cached_tokens=0, new_tokens=1, kv_bytes=1,
                kv_reserved_bytes=1, kv_largest_bytes=1, reallocations=0, bytes_written=1, bytes_copied=0,
                migrations=(), ttft_ns=1, tpot_ns=None, prefill_ns=None, hook_ns=0, trace_id=trace_id,
                span_id=span_id, sampled=sampled)
    opened.close(done, (), {}, None)
    source().emit(done)

def turns(where, count=5):
    for number in range(count):
        turn(f"{where}/{number}")

def outer(where):
    return source().wiring.tracer().start_as_current_span("outer " + where)

def worker(where):
    kvobs.instrument()  # a forked worker is observed already, a spawned one starts here
    turns(where)
    threads(where)

def threads(where):
    def work(name):
        with outer(name):
            turns(name)
    running = [threading.Thread(target=work, args=(f"{where}/thread{n}",)) for n in range(3)]
    for thread in running: thread.start()
    for thread in running: thread.join()

async def tasks(where):
    async def work(name):
        with outer(name):
            for number in range(5):
                turn(f"{name}/{number}")
                await asyncio.sleep(0)
    await asyncio.gather(*(work(f"{where}/task{n}") for n in range(5)))

"""
_TURNS = 5
_WORKER = 4 * _TURNS  # its own and those of three threads


class Received:
    """What an OTLP endpoint was sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.lock = threading.Lock()

    def turns(self) -> list[Span]:
        """The spans of turns."""
        with self.lock:
            return [span for span in self.spans if span.name.startswith("text_completion ")]


@pytest.fixture
def received() -> Iterator[tuple[Received, str]]:
    """An OTLP/HTTP endpoint that keeps every span, and its address."""
    kept = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            if self.path.endswith("/traces"):
                request = ExportTraceServiceRequest.FromString(body)
                with kept.lock:
                    kept.spans += [span for resource in request.resource_spans for scope in resource.scope_spans
                                   for span in scope.spans]
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield kept, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _run(body: str, tmp_path: Path, url: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(_SOURCE + "if __name__ == '__main__':\n    kvobs.instrument()\n" + "".join(
        f"    {line}\n" for line in body.strip().splitlines()))
    child = subprocess.Popen([sys.executable, script], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, start_new_session=True, env=child_environment(
        KVOBS_PROMETHEUS="off", KVOBS_STORE=str(tmp_path / "store"), OTEL_EXPORTER_OTLP_ENDPOINT=url,
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf"))
    try:
        out, err = child.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # its forks too, should they hang
    assert child.returncode == 0, err
    assert err == ""
    return out


def _rows(tmp_path: Path) -> list[str]:
    found: list[str] = []
    for path in (tmp_path / "store").glob("**/*.sqlite"):
        with sqlite3.connect(path) as database:
            found += [session for (session,) in database.execute("SELECT session FROM turns")]
        database.close()
    return found


def _check(kept: Received, tmp_path: Path, expected: list[str]) -> None:
    wait_until(lambda: len(kept.turns()) >= len(expected), what="the arrival of all spans")
    spans = kept.turns()
    assert Counter(span.name.partition(" ")[2] for span in spans) == Counter(expected)
    assert len({span.span_id for span in spans}) == len(spans)
    outer = {span.name.partition(" ")[2]: span for span in kept.spans if span.name.startswith("outer ")}
    for span in spans:
        parent = outer.get(span.name.partition(" ")[2].rpartition("/")[0])
        assert span.parent_span_id == (parent.span_id if parent else b"")
        if parent is not None:
            assert span.trace_id == parent.trace_id
    assert Counter(_rows(tmp_path)) == Counter(expected)


def _labels(*places: str, workers: tuple[str, ...] = ()) -> list[str]:
    names = [*places, *(f"{worker}{part}" for worker in workers
                        for part in ("", "/thread0", "/thread1", "/thread2"))]
    return [f"{name}/{number}" for name in names for number in range(_TURNS)]


def test_threads_and_tasks(received: tuple[Received, str], tmp_path: Path) -> None:
    """Turns of interleaved threads and asyncio tasks are children of their own thread's or task's span."""
    kept, url = received
    _run("turns('main')\nthreads('main')\nasyncio.run(tasks('main'))", tmp_path, url)
    _check(kept, tmp_path, _labels("main", *(f"main/thread{n}" for n in range(3)),
                                   *(f"main/task{n}" for n in range(5))))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing(method: str, received: tuple[Received, str], tmp_path: Path) -> None:
    """Turns before, in and after workers of each start method arrive once, though forked workers skip atexit."""
    kept, url = received
    _run(f"""
turns('before')
context = multiprocessing.get_context({method!r})
running = [context.Process(target=worker, args=(f'worker{{n}}',)) for n in range(3)]
for process in running: process.start()
turns('meanwhile')
for process in running: process.join()
assert [process.exitcode for process in running] == [0, 0, 0]
turns('after')
""", tmp_path, url)
    _check(kept, tmp_path, _labels("before", "meanwhile", "after", workers=("worker0", "worker1", "worker2")))


def test_forks_while_other_threads_are_in_turns(received: tuple[Received, str], tmp_path: Path) -> None:
    """Forking again and again while threads make turns neither deadlocks, loses nor repeats any of them."""
    kept, url = received
    made = _run("""
stop = threading.Event()
made = [0, 0]
def busy(n):
    while not stop.is_set():
        turn(f'busy{n}/{made[n]}')
        made[n] += 1
        stop.wait(0.001)
running = [threading.Thread(target=busy, args=(n,)) for n in range(2)]
for thread in running: thread.start()
children = []
for n in range(6):
    child = os.fork()
    if child == 0:
        turns(f'child{n}')
        kvobs.uninstrument()
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
stop.set()
for thread in running: thread.join()
print(*made)
""", tmp_path, url)
    busy = [f"busy{n}/{number}" for n, count in enumerate(map(int, made.split())) for number in range(count)]
    _check(kept, tmp_path, [*busy, *_labels(*(f"child{n}" for n in range(6)))])


def test_a_fork_of_a_fork(received: tuple[Received, str], tmp_path: Path) -> None:
    """Grandchildren are processes of their own, with their own spans and rows."""
    kept, url = received
    _run("""
context = multiprocessing.get_context('fork')
def middle():
    turns('middle')
    last = context.Process(target=turns, args=('last',))
    last.start()
    last.join()
    turns('middle-after')
turns('first')
process = context.Process(target=middle)
process.start()
process.join()
""", tmp_path, url)
    _check(kept, tmp_path, _labels("first", "middle", "last", "middle-after"))


def test_a_forked_child_without_turns_opens_nothing(received: tuple[Received, str], tmp_path: Path) -> None:
    """A worker that makes no turn has no thread, endpoint or store of its own; one that makes some has all three."""
    kept, url = received
    out = _run("""
turns('main')
for makes_turns in (False, True):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        if makes_turns:
            turns('child')
            kvobs.uninstrument()
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith('kvobs'))
        found = runtime.current()
        os.write(write, repr((names, found and found.endpoint, found and found.store)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    print(os.read(read, 1000).decode())
""", tmp_path, url)
    assert out.splitlines()[0] == "([], None, None)"
    _check(kept, tmp_path, _labels("main", "child"))
    assert len(list((tmp_path / "store").glob("**/*.sqlite"))) == 2
