"""Named load shapes: conversations whose turns share their prefix, from a seed. Nothing in them was measured."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from kvobs.breaker.simulator._trace import Request, Trace, scaled

CHUNK_TOKENS = 128
LASTS_S = 600.0
MOST_CONTEXT = 8_192  # tokens; a conversation ends before it
_NS = 10**9
_PEAK = 3.0  # conversations per second that no shape exceeds

# Conversations that begin per second, at so many seconds; ten minutes each.
SHAPES: dict[str, tuple[str, Callable[[float], float]]] = {
    "steady": ("one conversation begins per second", lambda t: 1.0),
    "rising": ("from none to three per second", lambda t: 3.0 * t / LASTS_S),
    "burst": ("one in two seconds, and three per second in the minutes 4 and 8",
              lambda t: 3.0 if 180 <= t < 240 or 420 <= t < 480 else 0.5),
    "idle": ("half a minute of one per second, then two minutes of nothing, again and again",
             lambda t: 1.0 if t % 150 < 30 else 0.0),
}


def scenario(name: str, *, seed: int = 0, rate: float = 1.0, limit: int | None = None) -> Trace:
    """The requests of a shape.

    Conversations begin as a Poisson process (thinned). A turn follows the end of the one before, taken to last 10 s,
    after a pause (exponential, mean 15 s), with probability 0.7. First prompts have a median of 500 tokens, later
    questions 80, answers 250 (log-normal, sigma 0.8); each prompt holds the whole conversation before it.

    Raises:
        ValueError: there is no such shape; one whole sentence.
    """
    if name not in SHAPES:
        raise ValueError(f"There is no scenario {name!r}; allowed are {', '.join(SHAPES)}.")
    shape, draw = SHAPES[name][1], random.Random(f"{name} {seed}")
    found: list[Request] = []
    at = draw.expovariate(_PEAK)
    conversation = 0
    while at < LASTS_S:
        if draw.random() * _PEAK < shape(at):
            found += _conversation(draw, at, conversation)
            conversation += 1
        at += draw.expovariate(_PEAK)
    ordered = scaled(found, rate) if found else ()
    return Trace(f"scenario {name}, seed {seed}", ordered[:limit], CHUNK_TOKENS)


def _conversation(draw: random.Random, at: float, number: int) -> list[Request]:
    turns: list[Request] = []
    held, median = 0, 500.0
    while True:
        prompt = held + _lengths(draw, median)
        output = _lengths(draw, 250.0)
        held, median = prompt + output, 80.0
        if held > MOST_CONTEXT:
            return turns
        chunks = tuple(number * MOST_CONTEXT + chunk for chunk in range(held // CHUNK_TOKENS))
        turns.append(Request(round(at * _NS), prompt, output, chunks))
        at += 10.0 + draw.expovariate(1 / 15.0)
        if draw.random() >= 0.7:
            return turns


def _lengths(draw: random.Random, median: float) -> int:
    return max(1, round(draw.lognormvariate(math.log(median), 0.8)))
