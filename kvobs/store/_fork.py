"""No thread of this process is inside SQLite while it forks: a child must not inherit a locked mutex of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_WAIT_S = 0.5  # that a fork is held up at most by a commit in progress

_lock = threading.Lock()
_forking = threading.local()
_broken = False


@contextlib.contextmanager
def inside_sqlite() -> Iterator[None]:
    """Around every use of SQLite by a writer."""
    with _lock:
        yield


def usable() -> bool:
    """False in a child that was forked while a commit hung: SQLite may never return there."""
    return not _broken


def _before() -> None:
    _forking.held = _lock.acquire(timeout=_WAIT_S)


def _after_in_parent() -> None:
    if getattr(_forking, "held", False):
        _forking.held = False
        _lock.release()


def _after_in_child() -> None:
    global _lock, _forking, _broken
    _broken = _broken or not getattr(_forking, "held", False)
    _lock = threading.Lock()
    _forking = threading.local()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
