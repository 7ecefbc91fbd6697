"""Chat sessions over time, drawn from a serving trace: when they come, what they ask and how long answers are.

A session is a run of consecutive requests of the trace: their new tokens and their answers are its turns. Gaps between
sessions are those between the trace's requests, stretched so that a load is so many sessions per second.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from kvobs.breaker.simulator._trace import Request

TURNS = (2, 6)  # of a session
PRIORITIES = {"critical": 0.15, "normal": 0.55, "sheddable": 0.3}
THINK_S = (4, 16)  # between an answer and the next turn
SCALE = 2  # every length of the trace is halved, so that one session is a small part of a small device
SHORTER = 4  # a follow-up brings a quarter of what the trace's prompt, which carries its history, brings


class Turn(NamedTuple):
    """What one request brings and wants, in tokens, and how long its user thinks afterwards, in seconds."""

    prompt: int
    answer: int
    think_s: int


class Session(NamedTuple):
    """One user: when the first turn comes (seconds), how important it is, and the turns."""

    name: str
    arrival_s: float
    priority: str
    turns: tuple[Turn, ...]


class Load(NamedTuple):
    """Sessions per second at the beginning and at the end of ``seconds``; linear between."""

    name: str
    seconds: int
    first: float
    last: float


CALM = Load("no pressure", 90, 0.06, 0.06)
RISING = Load("rising", 90, 0.1, 1.2)
LOADS = {load.name: load for load in (CALM, RISING)}


def sessions(requests: Sequence[Request], load: Load, seed: int) -> list[Session]:
    """The sessions of a run, in the order of their arrival; the same for the same seed."""
    chance = random.Random(seed)
    at = chance.randrange(len(requests))
    mean = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9 / max(len(requests) - 1, 1)
    found: list[Session] = []
    now = 0.0
    while True:
        first = requests[at % len(requests)]
        after = requests[(at + 1) % len(requests)]
        gap = max(after.arrival_ns - first.arrival_ns, 0) / 1e9 / mean
        now += gap / (load.first + (load.last - load.first) * now / load.seconds)
        if now >= load.seconds:
            return found
        turns = []
        for number in range(chance.randint(*TURNS)):
            one = requests[(at + number) % len(requests)]
            prompt = one.prompt // SCALE if not number else one.prompt // (SCALE * SHORTER)
            turns.append(Turn(max(prompt, 1), max(one.output // SCALE, 1), chance.randint(*THINK_S)))
        priority, = chance.choices(list(PRIORITIES), list(PRIORITIES.values()))
        found.append(Session(f"s{len(found)}", now, priority, tuple(turns)))
        at += 1
