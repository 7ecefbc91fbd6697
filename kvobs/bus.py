"""A bounded queue between the engine's threads and the one drain thread.

``publish`` is a length test and an append (both atomic under the GIL and per-object locked without it): it
never blocks, formats or raises. A full queue drops the event and counts it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator

from kvobs.model import CacheGone, Event


class Bus:
    """Many producers, one consumer. ``active`` is the one attribute that hooks test when kvobs is off.

    ``wake`` is set where nobody drains yet (a forked child that has published nothing): it is told of events until
    it takes itself away. ``deep`` says whether deep sampling may run now. ``pause`` and ``resume`` are the overhead
    guard's: while paused nothing is observed, and what spans a pause (``epoch`` differs) must not be told as whole.
    """

    __slots__ = ("_dropped_taken", "_drops", "_limit", "_queue", "active", "deep", "epoch", "wake")

    def __init__(self, limit: int) -> None:
        self.active = True
        self.deep = False
        self.epoch = 0
        self.wake: Callable[[Event], None] | None = None
        self._limit = limit
        self._queue: deque[Event] = deque()
        self._drops = itertools.count()
        self._dropped_taken = 0

    def publish(self, event: Event) -> None:
        """Queue the event, or drop and count it when ``limit`` events are waiting."""
        if self.wake is not None:
            self.wake(event)
        waiting = len(self._queue)
        # A cache whose end is lost would count as alive for ever: its end may go over the limit, to twice of it.
        if waiting < self._limit or (type(event) is CacheGone and waiting < 2 * self._limit):
            self._queue.append(event)
        else:
            next(self._drops)

    def pause(self) -> None:
        """Let everything pass through unobserved."""
        self.active = False
        self.epoch += 1

    def resume(self) -> None:
        """Observe again; sources compare ``epoch`` and take a new baseline of what changed meanwhile."""
        self.active = True

    def drain(self) -> Iterator[Event]:
        """Events queued so far, oldest first (those that arrive meanwhile wait for the next drain)."""
        for _ in range(len(self._queue)):
            yield self._queue.popleft()

    def take_dropped(self) -> int:
        """How many events were dropped since the last call (consumer only)."""
        # itertools.count has no reader: drawing one number tells how many were drawn before it.
        drawn = next(self._drops)
        dropped = drawn - self._dropped_taken
        self._dropped_taken = drawn + 1
        return dropped

    def clear(self) -> None:
        """Forget what is queued: in a forked child those events belong to the parent."""
        self._queue = deque()
        self._drops = itertools.count()
        self._dropped_taken = 0
