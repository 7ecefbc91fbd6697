"""Requests that an engine core has received and its scheduler has not taken in yet.

vLLM receives on a thread of its own and takes requests in between two steps: one that comes while a step runs (a long
prefill, say) waits for its end, unseen by the scheduler. Its time begins here.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

MOST = 65_536


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A request in the engine core's input queue."""

    request: str
    session: str
    received_ns: int
    prompt_tokens: int


class Arrivals:
    """Written by the threads that receive, read by the engine's and the drain thread."""

    def __init__(self, session_of: Callable[[Any], str]) -> None:
        self._session_of = session_of
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, Arrival] = OrderedDict()

    def received(self, request: Any) -> None:
        """A request has come; ids repeat where a session goes on, so the first of them counts."""
        found = Arrival(request.request_id, self._session_of(request), time.monotonic_ns(), request.num_prompt_tokens)
        with self._lock:
            self._waiting.setdefault(found.request, found)
            if len(self._waiting) > MOST:
                self._waiting.popitem(last=False)

    def taken(self, request_id: str) -> int | None:
        """The scheduler takes a request in: when it was received, if that was seen.

        The queue keeps its order, so that those received before it were taken unseen, or refused.
        """
        with self._lock:
            if request_id not in self._waiting:
                return None
            while True:
                name, found = self._waiting.popitem(last=False)
                if name == request_id:
                    return found.received_ns

    def clear(self) -> None:
        """Nothing was seen for a while: who still waits is not known."""
        with self._lock:
            self._waiting.clear()

    def waiting(self) -> list[Arrival]:
        """Those that wait, oldest first."""
        with self._lock:
            return list(self._waiting.values())
