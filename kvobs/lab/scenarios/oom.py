"""Memory is used up: three sessions hold what they reserved, a fourth wants as much, and no setting makes more."""

from __future__ import annotations

from typing import Any

from kvobs.lab.demo._observer import Observer
from kvobs.lab.scenarios._advice import again, errors, first
from kvobs.lab.scenarios._engine import BUFFER_BYTES_PER_TOKEN, BUFFERS, MIB, Engine
from kvobs.lab.scenarios._truth import Expected, Played, Truth

TOKENS = 8192  # buffers of 16 MiB
SESSIONS = 3  # that fit
_BUFFER = TOKENS * BUFFER_BYTES_PER_TOKEN
_HELD = SESSIONS * BUFFERS * _BUFFER
DEVICES = (_HELD + 14 * MIB,)
TRIED = "expandable_segments:True"

TRUTH = Truth("oom", "Three sessions hold 64 MiB each of 206, and a fourth cannot begin.", (
    Expected("verdict", "CAPACITY", "all that is free, wherever it lies, is less than the request"),
    Expected("device", "vgpu:0", "it is the only one"),
    Expected("requested_bytes", _BUFFER, f"{TOKENS} tokens x 8 heads x 64 numbers x 4 bytes"),
    Expected("free_bytes", DEVICES[0] - _HELD, "the device less what the sessions hold, before weights", "<="),
    Expected("remedy", None, "no way to lay out what is held makes room for what is not there"),
    Expected("with_expandable_segments", "fails", "the same requests, really made again"),
    Expected("errors", 2, "one request fails each time")))


def play(observer: Observer) -> Played:
    """Run out of memory, ask for advice, and try again all the same."""
    engine, sessions = Engine(), dict[str, Any]()
    said, sentence = first(observer, lambda: _serve(engine, sessions), DEVICES[0])
    sessions.clear()
    said["with_expandable_segments"] = again(TRIED, lambda: _serve(engine, sessions))
    said["errors"] = errors(observer)
    return Played(said, sentence, (engine, sessions))


def _serve(engine: Engine, sessions: dict[str, Any]) -> bool:
    """Whether the fourth session runs out of memory."""
    import torch

    for number in range(SESSIONS + 1):
        name = f"session {number}"
        sessions[name] = engine.static(TOKENS)
        try:
            engine.turn(name, sessions[name])
        except torch.OutOfMemoryError:
            return number == SESSIONS
    return False
