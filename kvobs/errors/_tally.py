"""How many requests of this process ended how, from all threads."""

from __future__ import annotations

import os
import threading
from collections import Counter

from kvobs.errors import _verdicts

OK, REFUSED, FAILED, CANCELLED = OUTCOMES = ("ok", "refused", "failed", "cancelled")
STREAM, START = "stream", "start"  # an answer that had begun did not end well; any other, whole 4xx and 5xx too


class Tally:
    """Requests by (server, outcome), and those that are not ok by (server, class, phase)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._failures: Counter[tuple[str, str, str]] = Counter()

    def begin(self, server: str) -> None:
        """Requests of ``server`` (asgi or wsgi) are counted from now on, each outcome from 0."""
        with self._lock:
            for outcome in OUTCOMES:
                self._requests.setdefault((server, outcome), 0)

    def count(self, server: str, outcome: str, error_class: str = "", phase: str = START) -> None:
        """One request has ended."""
        with self._lock:
            self._requests[server, outcome] += 1
            if error_class:
                self._failures[server, error_class, phase] += 1

    def requests(self) -> dict[tuple[str, str], int]:
        """How many ended, by (server, outcome); empty where no middleware is used."""
        with self._lock:
            return dict(self._requests)

    def failures(self) -> dict[tuple[str, str, str], int]:
        """How many of them were not ok, by (server, class, phase)."""
        with self._lock:
            return dict(self._failures)

    def after_fork_in_child(self) -> None:
        """The parent's requests are the parent's, and so is a thread of it that holds the lock."""
        self._lock = threading.Lock()
        self._failures.clear()
        for key in self._requests:
            self._requests[key] = 0


tally = Tally()


def _after_fork() -> None:
    tally.after_fork_in_child()
    _verdicts.forget()


os.register_at_fork(after_in_child=_after_fork)
