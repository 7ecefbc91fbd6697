"""Who talks to the server and how much: chat sessions of several turns, drawn by a seed. Pure.

Lengths come from a recorded trace, scaled down, or from log-normal distributions that stand for it. A turn's prompt is
all that was said before, so that sessions grow and share their prefix with themselves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

TURNS = 2
RATE = 1.0  # sessions that begin per second
THINK_S = 2.0  # mean of the time between an answer and the next line
# Tokens of a line and of an answer, at least and at most; a whole session fits the context.
LINE, ANSWER = (12, 40), (40, 110)
SCALES = (24, 3)  # the trace's prompts and answers are so many times longer
# Without a trace: medians of the scaled lengths, and the standard deviation of their logarithm.
MEDIANS, SPREAD = (26.0, 75.0), 0.6
PRIORITIES = ("normal", "normal", "normal", "normal", "sheddable")  # of sessions, by turns
# Words that are one token each in most vocabularies.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business side kind head house service friend father power hour game line end
member law car city name team minute idea body back parent face level office door health person art war history party
result change morning reason research girl guy moment air teacher
"""


class Turn(msgspec.Struct, frozen=True):
    """One line of a user: its words, the tokens of the answer, and the seconds to think before it is sent."""

    line: str
    answer: int
    think_s: float


class Session(msgspec.Struct, frozen=True):
    """A user: when the first line is sent (seconds from the beginning), and all lines."""

    name: str
    priority: str
    begin_s: float
    turns: tuple[Turn, ...]


def sessions(number: int, seed: int, lengths: Sequence[tuple[int, int]] = ()) -> list[Session]:
    """So many sessions, the same for the same arguments.

    Args:
        number: of sessions.
        seed: of everything that is drawn.
        lengths: (prompt, output) tokens of a trace's requests, from which turns are drawn.
    """
    chance = random.Random(seed)
    found, begin = [], 0.0
    for index in range(number):
        turns = []
        for turn in range(TURNS):
            line, answer = _length(chance, lengths)
            turns.append(Turn(" ".join(chance.choices(_WORDS.split(), k=line)), answer,
                              chance.expovariate(1 / THINK_S) if turn else 0.0))
        found.append(Session(f"user-{seed}-{index}", PRIORITIES[index % len(PRIORITIES)], begin, tuple(turns)))
        begin += chance.expovariate(RATE)
    return found


def _length(chance: random.Random, lengths: Sequence[tuple[int, int]]) -> tuple[int, int]:
    if lengths:
        prompt, output = chance.choice(lengths)
        drawn = prompt / SCALES[0], output / SCALES[1]
    else:
        drawn = MEDIANS[0] * chance.lognormvariate(0, SPREAD), MEDIANS[1] * chance.lognormvariate(0, SPREAD)
    return _within(drawn[0], LINE), _within(drawn[1], ANSWER)


def _within(value: float, bounds: tuple[int, int]) -> int:
    return min(max(round(value), bounds[0]), bounds[1])
