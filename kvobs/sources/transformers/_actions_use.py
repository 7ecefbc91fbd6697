"""Who uses which cache, so that an action never touches one that another thread is at work with.

A thread is busy in a forward pass and in a generate call, from its first to its last step. A cache may be taken by the
thread that used it last, between its own passes; by any other one only when it has been idle for a while and its last
user is not busy. A pass over a cache that is taken waits until it is given back (milliseconds).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvobs.sources.transformers._caches import CacheRecord

IDLE_NS = 2_000_000_000
WAIT_S = 5.0  # what takes a cache for longer is stuck, and the host goes on


class Uses:
    """One process's account. ``idle_ns``: how long without a step makes a cache idle."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.idle_ns = IDLE_NS
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._busy: dict[int, int] = {}
        self._taken: set[int] = set()

    def begins(self, record: CacheRecord | None = None) -> None:
        """The calling thread begins something; with a cache, once nobody holds it for an action."""
        me = threading.get_ident()
        with self._lock:
            if record is not None and record.id in self._taken:
                self._changed.wait_for(lambda: record.id not in self._taken, WAIT_S)
            self._busy[me] = self._busy.get(me, 0) + 1
            if record is not None:
                record.user = me

    def ends(self, record: CacheRecord | None = None) -> None:
        """It has ended; a cache that it used has been used until now."""
        me = threading.get_ident()
        with self._lock:
            left = self._busy.get(me, 1) - 1
            if left:
                self._busy[me] = left
            else:
                self._busy.pop(me, None)
        if record is not None:
            record.user, record.used_ns = me, self._clock()

    def after_fork_in_child(self) -> None:
        """Only this thread is left of the parent's, and it may have held the lock."""
        me = threading.get_ident()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._busy = {me: self._busy[me]} if me in self._busy else {}
        self._taken = set()

    def idle(self) -> bool:
        """Is no thread inside a pass or a generate call?"""
        return not self._busy

    def rested(self, record: CacheRecord) -> bool:
        """Has a cache been without a step for long enough?"""
        return record.used_ns is not None and self._clock() - record.used_ns >= self.idle_ns

    @contextmanager
    def taking(self, record: CacheRecord) -> Iterator[bool]:
        """Hold a cache for an action; False where it is somebody else's now."""
        me, held = threading.get_ident(), False
        with self._lock:
            if record.id not in self._taken and record.used_ns is not None and (
                    record.user == me or (record.user not in self._busy and self.rested(record))):
                held = True
                self._taken.add(record.id)
        try:
            yield held
        finally:
            if held:
                with self._lock:
                    self._taken.discard(record.id)
                    self._changed.notify_all()
