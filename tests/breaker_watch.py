"""A test's view of a process with a breaker (``tests.breaker_engine``): its state, its log, its store, its clients."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.support import ROOT, child_environment, run_child, wait_until

LEVELS = (1, 2, 3)


def policy(*limits: float) -> str:
    """Three levels on the pool's use, quick to open and to close."""
    return "\n".join(['name = "load"', 'escalate = "200ms"', "jitter = 0", "transitions = 1000", *(f"""
[[level]]
any = [{{ signal = "kv_utilization", above = {limit}, max_age = "2s" }}]
open = "500ms"
closed = "200ms"
half_open = "300ms"
""" for limit in limits)])


class Child:
    """The process, and what can be known of it from outside."""

    def __init__(self, directory: Path, store: Path | None = None, mode: str = "act") -> None:
        self.directory, self.store = directory, store or directory / "store"
        directory.mkdir(exist_ok=True)
        self.policy = directory / "policy.toml"
        self.policy.write_text(policy(0.5, 0.7, 0.9))
        self._errors = (directory / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.breaker_engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, cwd=ROOT,
            env=child_environment(KVOBS_STORE=str(self.store), KVOBS_PROMETHEUS="off", KVOBS_OTLP="off",
                                  KVOBS_BREAKER=mode, KVOBS_BREAKER_POLICY=str(self.policy)))
        self.children: list[int] = []
        assert self.answer()

    def answer(self) -> dict[str, Any]:
        """The next state that it tells."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.said()
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, what: str, value: Any = None) -> dict[str, Any]:
        """Order something, and the state after it."""
        self.order(what, value)
        return self.answer()

    def order(self, what: str, value: Any = None) -> None:
        """Order something, whether or not the process runs."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"what": what, "value": value}) + "\n")
        self.process.stdin.flush()

    def fork(self, *, hooks: bool) -> int:
        self.children.append(self.tell("fork", hooks)["child"])
        return self.children[-1]

    def state(self) -> dict[str, Any]:
        return self.tell("state")

    def flags(self) -> list[list[int]]:
        return list(self.state()["flags"].values())

    def in_effect(self, *levels: list[int]) -> None:
        """Wait until these levels' actions are in effect, in one engine and in the other."""
        wait_until(lambda: self.flags() == list(levels), 60, f"actions {levels}")

    def said(self, words: str = "") -> int | str:
        """How many lines of the log have these words; without any, the log."""
        text = (self.directory / "stderr").read_text()
        return text if not words else sum(words in line for line in text.splitlines())

    # -- the store -------------------------------------------------------------------------------------

    def level(self) -> int | None:
        """By ``kvobs breaker status``; None while there is none."""
        rows = self._cli("status")
        return max((row["level"] for row in rows), default=None)

    def decisions(self) -> list[dict[str, Any]]:
        return [one for one in self._cli("log") if one["what"] == "decision"]

    def actions(self) -> list[dict[str, Any]]:
        return [one for one in self._cli("log") if one["what"] == "action"]

    def _cli(self, word: str) -> list[dict[str, Any]]:
        done = run_child([sys.executable, "-m", "kvobs", "breaker", word, self.store, "--json"], cwd=ROOT)
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    # -- the end ---------------------------------------------------------------------------------------

    def end(self) -> dict[str, Any]:
        """End observation and the process; its last state."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        last = self.answer()
        assert self.process.wait(60) == 0, self.said()
        return last

    def close(self) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not taken by a process that is gone
                    pipe.close()


class Clients:
    """Clients that ask without end, and count what became of each request."""

    def __init__(self, port: int) -> None:
        self._port, self._stop = port, threading.Event()
        self.answers: Counter[tuple[str, int]] = Counter()  # by priority and status
        self.last: dict[str, int] = {}
        self.tokens = 0  # that answers held
        self.lost: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(priority,))
                         for priority in ("critical", "normal", "sheddable")]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, priority: str) -> None:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=30)
        while not self._stop.wait(0.01):
            try:
                connection.request("POST", "/v1/chat/completions", b'{"max_tokens": 500}', {
                    "content-type": "application/json", "kvobs-priority": priority})
                answer = connection.getresponse()
                body = answer.read()
                self.answers[priority, answer.status] += 1
                self.last[priority] = answer.status
                self.tokens += len(body.split()) if answer.status == 200 else 0
            except Exception as error:
                self.lost.append(f"{type(error).__name__}: {error}")
                connection.close()
        connection.close()

    def see(self, status: int) -> None:
        """Wait until sheddable requests are answered so."""
        wait_until(lambda: self.last.get("sheddable") == status, 30, f"answers {status}")


class Application:
    """Gives each request as many tokens as it asks for, and counts both."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        tokens = json.loads(body)["max_tokens"]
        self.requests += 1
        self.tokens += tokens
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"t " * tokens})


@contextlib.contextmanager
def child(directory: Path, **options: Any) -> Iterator[Child]:
    """The process, ended whatever happens."""
    found = Child(directory, **options)
    try:
        yield found
    finally:
        found.close()
