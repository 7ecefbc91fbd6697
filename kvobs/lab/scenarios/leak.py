"""Sessions end and their caches stay: somebody keeps a reference in a registry. Others end and are gone."""

from __future__ import annotations

import threading
import time
from typing import Any

from kvobs.lab.demo._observer import Observer
from kvobs.lab.scenarios._engine import BYTES_PER_TOKEN, MIB, Engine, cached
from kvobs.lab.scenarios._truth import Expected, Played, Truth

DEVICES = (256 * MIB,)
LEAKED = 4
TURNS = 3  # of each session
HELD = BYTES_PER_TOKEN * cached(TURNS)  # by a session at its end
_ATTEMPTS, _PAUSE_S = 150, 0.1  # a memory map may have to wait for its turn

TRUTH = Truth("leak", "Eight sessions of three turns end one after the other; every other one stays in a registry.", (
    Expected("held_bytes after each end", [HELD * (1 + number // 2) for number in range(2 * LEAKED)],
             f"each second session leaves {cached(TURNS)} tokens of {BYTES_PER_TOKEN} bytes"),
    Expected("caches after each end", [1 + number // 2 for number in range(2 * LEAKED)], "the registry has as many"),
    Expected("bytes by session", {f"leaked {number}": HELD for number in range(LEAKED)},
             "what the registry holds, by the memory map"),
    Expected("caches freed", LEAKED, "those of the other sessions")))


def play(observer: Observer) -> Played:
    """Let sessions end, and look after each of them."""
    engine = Engine()
    registry: list[Any] = []
    held: list[int] = []
    alive: list[int] = []
    for number in range(2 * LEAKED):
        cache, tokens, leaks = engine.dynamic(), None, number % 2 == 0
        for _ in range(TURNS):
            tokens = engine.turn(f"{'leaked' if leaks else 'clean'} {number // 2}", cache, tokens)
        if leaks:
            registry.append(cache)
        del cache
        observer.record()
        held.append(sum(int(point.value) for point in observer.points("kvobs.kv.usage")
                        if point.attributes["state"] == "held"))
        alive.append(sum(int(point.value) for point in observer.points("kvobs.kv.caches")))
    said = {"held_bytes after each end": held, "caches after each end": alive,
            "bytes by session": dict(sorted(_by_session(observer).items())),
            "caches freed": sum(type(event.record).__name__ == "CacheGone" for event in observer.reader().events())}
    return Played(said, f"{alive[-1]} caches hold {held[-1]:,} bytes, and no session is in a turn.", (engine, registry))


def _by_session(observer: Observer) -> dict[str, int]:
    """Bytes of KV blocks by the session that holds them, in a memory map that is taken now, as for a live view."""
    from kvobs.allocator.memory_map import KV, NOBODY, unpack
    from kvobs.store import touch

    asked_ns = time.monotonic_ns()
    found: dict[str, int] = {}
    for _ in range(_ATTEMPTS):
        touch(observer.directory)
        observer.record()
        maps = [stored.record for stored in observer.reader().maps() if stored.record.t_ns >= asked_ns]
        for one in maps:
            for segment in unpack(one.packed):
                for block in segment.blocks:
                    kind, name, _ = one.holders[block.stack] if block.stack != NOBODY else ("", "", None)
                    if kind == KV:
                        found[name] = found.get(name, 0) + block.size
        if maps:
            break
        threading.Event().wait(_PAUSE_S)
    return found
