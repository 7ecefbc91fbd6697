"""The thread that pushes: every so often, when asked, and a last time at the end, each with a deadline."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger("kvobs")


class Pusher:
    """Calls ``push`` (which may block as long as a network does) on its own daemon thread, never concurrently."""

    def __init__(self, name: str, push: Callable[[], None], interval_s: float) -> None:
        self._push = push
        self._interval_s = interval_s
        self._condition = threading.Condition()
        self._asked = 0
        self._done = 0
        self._stopping = False
        self._said = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self) -> int:
        """Ask for a push soon, without waiting; returns a ticket for :meth:`wait`."""
        with self._condition:
            self._asked += 1
            self._condition.notify_all()
            return self._asked

    def wait(self, ticket: int, timeout_s: float) -> bool:
        """Whether the push that was asked for had ended within ``timeout_s`` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: self._done >= ticket, timeout_s)

    def finish(self) -> None:
        """Ask for one last push and the end of the thread, without waiting."""
        with self._condition:
            self._stopping = True
            self._asked += 1
            self._condition.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread had ended within ``timeout_s`` seconds."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._asked == self._done:
                    self._condition.wait(self._interval_s)
                asked, last = self._asked, self._stopping
            try:
                self._push()
            except Exception as error:
                self._say(error)
            with self._condition:
                self._done = asked
                self._condition.notify_all()
            if last:
                return

    def _say(self, error: Exception) -> None:
        if not self._said:
            self._said = True
            _log.warning("kvobs: %s failed (%s: %s); it goes on, the process is not affected.", self._thread.name,
                         type(error).__name__, error)
