"""What a server does: several conversations in turn, one that ends and another that begins."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.gpu._checks import check
from tests.gpu._model import Conversation, Served, conversation, lines

SESSIONS, TURNS, NEW_TOKENS, MADE_UP = 3, 4, 8, 40
MOST_ALLOCATIONS = 160_000  # each makes about three events, and a snapshot of all of them must stay within seconds


@contextlib.contextmanager
def named(number: int) -> Iterator[None]:
    """Turns inside the block are this session's."""
    from kvobs import session

    with session(f"session-{number}"):
        yield


def converse(served: Served, allocations: Callable[[], int], until: float,
             say: Callable[[str], None]) -> tuple[list[Conversation], dict[str, Any]]:
    """Hold the conversations; what does not fit the time or the number of events is left out and told."""
    open_sessions = [conversation(served, number) for number in range(SESSIONS)]
    began, turns, tokens, stopped, opened = time.monotonic(), 0, 0, "", SESSIONS
    for turn in range(TURNS):
        if turn == TURNS // 2:  # one user leaves, and another comes
            open_sessions.pop(0)
            open_sessions.append(conversation(served, opened))
            opened += 1
        for session in open_sessions:
            stopped = ("its time was over" if time.monotonic() > until else
                       "there were enough events" if allocations() > MOST_ALLOCATIONS else "")
            if stopped:
                break
            with named(session.number):
                tokens += session.say(lines(turn), MADE_UP + 7 * session.number, NEW_TOKENS)
            turns += 1
        if stopped:
            say(f"the conversations were cut after {turns} turns, for {stopped}")
            break
    return open_sessions, {"turns": turns, "new_tokens": tokens, "sessions": opened, "cut": stopped,
                           "seconds": round(time.monotonic() - began, 2)}


def serve(device: Any, served: Served, observed: Any, until: float, say: Callable[[str], None]) -> dict[str, Any]:
    """The conversations, and kvobs's account of them against ours; the sessions are alive while it is taken."""
    sessions, ours = converse(served, device.allocations, until, say)
    device.settle()
    told, held = observed.turns(), observed.held()
    checks = [] if told is None else [
        check("turns recorded", ours["turns"], told["turns"]),
        check("tokens recorded", ours["new_tokens"], told["new_tokens"]),
        check("all turns on the device", [device.name] if ours["turns"] else [], told["devices"]),
        check("KV bytes held", sum(session.held_bytes() for session in sessions), held)]
    return {"program": ours, "kvobs": told, "checks": checks, "keep": sessions}
