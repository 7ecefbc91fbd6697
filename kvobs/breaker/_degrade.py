"""A request's body within the limits of its session: less history, fewer new tokens, and how the answer says so."""

from __future__ import annotations

import msgspec

from kvobs.breaker._clamp import clamp
from kvobs.breaker._history import Count, Trimmed, trim
from kvobs.breaker._limits import Limits

DEGRADED, DROPPED = b"kvobs-degraded", b"kvobs-history-dropped"


class Changed(msgspec.Struct, frozen=True, gc=False):
    """The new body, what became of the request (``trimmed``, ``clamped``), and headers for the answer."""

    body: bytes
    outcomes: tuple[str, ...]
    headers: tuple[tuple[bytes, bytes], ...]


def within(limits: Limits, body: bytes, path: str, count: Count | None = None) -> Changed | None:
    """The body within the limits; None where it is so already or cannot be read.

    ``count`` tells the tokens of a text; without it those of the history are estimated, and the header says so.

    Raises:
        RuntimeError: ``count`` failed.
    """
    now, outcomes, marks = body, [], []
    headers: list[tuple[bytes, bytes]] = []
    if limits.max_new_tokens is not None and (clamped := clamp(now, path, limits.max_new_tokens)) is not None:
        now = clamped
        outcomes.append("clamped")
        marks.append(f"max_tokens={limits.max_new_tokens}")
    if limits.history_tokens is not None and (less := _trimmed(now, path, limits.history_tokens, count)) is not None:
        now = less.body
        outcomes.append("trimmed")
        marks.append(f"history_tokens={limits.history_tokens}")
        headers.append((DROPPED, f"turns={less.turns}, messages={less.messages}, tokens={less.tokens}"
                                 f"{'' if count is not None else ';estimated'}".encode()))
    if not outcomes:
        return None
    return Changed(now, tuple(outcomes), ((DEGRADED, ", ".join(marks).encode()), *headers))


def _trimmed(body: bytes, path: str, budget: int, count: Count | None) -> Trimmed | None:
    try:
        return trim(body, path, budget, count)
    except Exception as error:  # what it says may hold what was said in the chat
        raise RuntimeError(f"a history was not counted, {type(error).__name__}") from None
