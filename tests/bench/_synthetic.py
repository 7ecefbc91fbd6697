"""Events as an engine makes them, without an engine: many steps, caches that come and go, turns, sessions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvobs import model

STEP_NS = 5_000_000
STEPS_PER_TURN = 100
LAYERS = 30
_ROW_BYTES = 23_040


def origin(device: str = "cpu", name: str = "synthetic") -> model.Origin:
    return model.Origin("transformers", name, "DynamicCache", device, "bfloat16")


def step(number: int, who: model.Origin, cache_id: int, t_ns: int) -> model.Step:
    """Step ``number`` of a turn; the first is the prefill of 64 tokens."""
    rows = 64 + number
    held = rows * _ROW_BYTES
    written = _ROW_BYTES * (64 if not number else 1)
    return model.Step(t_ns, 4_000_000 + number * 997, 40_000, who, cache_id, not number, 1, held, held, held // LAYERS,
                      2 * LAYERS, written, held - written)


def turn(number: int, who: model.Origin, cache_id: int, t_ns: int, sampled: bool = False) -> model.Turn:
    """The turn that ended at ``t_ns``."""
    took, tokens = STEPS_PER_TURN * STEP_NS, 64 + STEPS_PER_TURN
    return model.Turn(
        t_ns, t_ns - took, 1_700_000_000_000_000_000 + t_ns, who, cache_id, f"session-{number}", "normal", 1, "ok",
        STEPS_PER_TURN, 64, 0, STEPS_PER_TURN, tokens * _ROW_BYTES, tokens * _ROW_BYTES, tokens * _ROW_BYTES // LAYERS,
        2 * LAYERS * STEPS_PER_TURN, tokens * _ROW_BYTES, 50 * tokens * _ROW_BYTES, (), 20_000_000, 5_000_000,
        19_000_000, 90_000, f"{number:032x}" if sampled else "", f"{number:016x}" if sampled else "", sampled)


def life(who: model.Origin | None = None) -> Iterator[model.Event]:
    """Endless: every turn has its own cache and its own session; each 10th moves its cache once."""
    who = origin() if who is None else who
    t_ns = 0
    for number in itertools.count(1):
        for position in range(STEPS_PER_TURN):
            t_ns += STEP_NS
            yield step(position, who, number, t_ns)
        if not number % 10:
            yield model.Migration(t_ns, who, number, "cpu", "meta", 2, 65_536, 300_000)
        yield turn(number, who, number, t_ns, sampled=True)
        yield model.CacheGone(t_ns, number)
