"""Whose turn this is: explicit scopes, OpenTelemetry baggage, and how ids may be shown."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

import msgspec

Priority = Literal["critical", "normal", "sheddable"]
PRIORITIES: tuple[Priority, ...] = ("critical", "normal", "sheddable")
BAGGAGE_ID = "session.id"
BAGGAGE_PRIORITY = "session.priority"


class Scope(msgspec.Struct, frozen=True):
    """A session as the user named it."""

    id: str
    priority: Priority = "normal"


_current: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("kvobs_session", default=None)


@contextlib.contextmanager
def session(id: str, *, priority: Priority = "normal") -> Iterator[Scope]:
    """Turns that start inside the block belong to session ``id``.

    Args:
        id: any non-empty text; shown as the ``session_ids`` setting says (plain, hashed or not at all).
        priority: ``critical`` sessions are degraded last, ``sheddable`` ones first.
    Raises:
        ValueError: an empty id or an unknown priority.
    """
    if not id:
        raise ValueError("A session id must be a non-empty text.")
    if priority not in PRIORITIES:
        raise ValueError(f"The session priority {priority!r} is unknown; allowed are {', '.join(PRIORITIES)}.")
    token = _current.set(Scope(str(id), priority))
    try:
        yield Scope(str(id), priority)
    finally:
        _current.reset(token)


def current() -> Scope | None:
    """The scope in force: the innermost ``session`` block, else the ``session.id`` of the OpenTelemetry baggage."""
    scope = _current.get()
    if scope is not None:
        return scope
    from opentelemetry import baggage

    named = baggage.get_baggage(BAGGAGE_ID)
    if not isinstance(named, str) or not named:
        return None
    priority = baggage.get_baggage(BAGGAGE_PRIORITY)
    for known in PRIORITIES:
        if priority == known:
            return Scope(named, known)
    return Scope(named)


class Names:
    """How session ids are shown: ``plain``, ``hashed`` (HMAC-SHA-256, 16 hex digits) or ``off`` (empty)."""

    def __init__(self, mode: str, key: bytes = b"") -> None:
        self._mode = mode
        self._key = key or secrets.token_bytes(32)

    def shown(self, id: str) -> str:
        """The id as spans and the store may carry it."""
        if self._mode == "plain":
            return id.encode("utf-8", "backslashreplace").decode()
        if self._mode == "off":
            return ""
        return hmac.new(self._key, id.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:16]


class TurnNumbers:
    """Counts turns per session from 1, forgetting the least recently used sessions beyond ``limit``."""

    def __init__(self, limit: int = 2_048) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._turns: OrderedDict[str, int] = OrderedDict()

    def next(self, id: str) -> int:
        """The number of the session's next turn."""
        with self._lock:
            turn = self._turns.pop(id, 0) + 1
            self._turns[id] = turn
            if len(self._turns) > self._limit:
                self._turns.popitem(last=False)
        return turn
