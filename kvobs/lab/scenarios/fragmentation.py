"""Enough memory is free, and no request of that size can be served: the segments of ended sessions are pinned.

Ten sessions reserve static caches of 4 MiB buffers. The allocator puts five buffers into each segment of 20 MiB, so
that a segment holds buffers of two sessions. Six sessions end; the four that stay pin all eight segments, and no free
block is larger than one session's 16 MiB. An eleventh session wants buffers of 24 MiB. With expandable segments the
buffers lie in one range, where what neighbours leave behind is one block, also across 20 MiB.
"""

from __future__ import annotations

from typing import Any

from kvobs.lab.demo._observer import Observer
from kvobs.lab.scenarios._advice import again, errors, first
from kvobs.lab.scenarios._engine import BUFFER_BYTES_PER_TOKEN, BUFFERS, MIB, Engine
from kvobs.lab.scenarios._truth import Expected, Played, Truth

SHORT, LONG = 2048, 12_288  # tokens: buffers of 4 and 24 MiB
SESSIONS, STAY = 10, (1, 3, 6, 8)
DEVICES = (232 * MIB,)
REMEDY = "expandable_segments:True"
_SHORT_BYTES, _LONG_BYTES = SHORT * BUFFER_BYTES_PER_TOKEN, LONG * BUFFER_BYTES_PER_TOKEN

HAPPENS = "Six of ten sessions end, 96 MiB are free, and one that wants buffers of 24 MiB cannot begin."

TRUTH = Truth("fragmentation", HAPPENS, (
    Expected("verdict", "FRAGMENTED", "the ended sessions' buffers are more than the request, which fails"),
    Expected("device", "vgpu:0", "it is the only one"),
    Expected("requested_bytes", _LONG_BYTES, f"{LONG} tokens x 8 heads x 64 numbers x 4 bytes"),
    Expected("free_bytes", (SESSIONS - len(STAY)) * BUFFERS * _SHORT_BYTES, "six sessions' buffers are free", ">="),
    Expected("largest_free_bytes", BUFFERS * _SHORT_BYTES, "a session's buffers lie side by side, others around them"),
    Expected("remedy", REMEDY, "what two neighbours leave is one block only there"),
    Expected("with_remedy", "succeeds", "one buffer fits between neighbours, three at the end, after 60 MiB more"),
    Expected("errors", 1, "one request fails, and none with the remedy")))


def play(observer: Observer) -> Played:
    """Run out of memory, ask for advice, and follow it."""
    engine, sessions = Engine(), dict[str, Any]()
    said, sentence = first(observer, lambda: _serve(engine, sessions), DEVICES[0])
    if said["remedy"] is not None:
        sessions.clear()
        said["with_remedy"] = again(said["remedy"], lambda: _serve(engine, sessions))
    said["errors"] = errors(observer)
    return Played(said, sentence, (engine, sessions))


def _serve(engine: Engine, sessions: dict[str, Any]) -> bool:
    """Whether the last session runs out of memory."""
    import torch

    for number in range(SESSIONS):
        sessions[f"short {number}"] = engine.static(SHORT)
        engine.turn(f"short {number}", sessions[f"short {number}"])
    for number in set(range(SESSIONS)) - set(STAY):
        del sessions[f"short {number}"]
    sessions["long"] = engine.static(LONG)
    try:
        engine.turn("long", sessions["long"])
    except torch.OutOfMemoryError:
        return True
    return False
