"""What the users of the demo say: eight scripted lines that refer back, and two short conversations beside them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import NamedTuple

LINES = (
    "I want to grow basil, carrots or tomatoes at home. Which one is the easiest?",
    "How often should I water it?",
    "How much sun does it need?",
    "When should I plant it?",
    "And how do I plant the second one?",
    "How long does it take to grow?",
    "What dish can I cook with it?",
    "Make that shorter.",
)
FURTHER = (
    "Tell me more about it.",
    "Why is that?",
    "What should I avoid when I grow it?",
    "How do I know that it is ripe?",
    "How can I store it?",
    "What goes well with it?",
)
MAIN = "garden"
SIDES = {
    "travel": ("Name one city by the sea.", "What can I eat there?", "When should I go?", "Is it far?"),
    "letter": ("Write a birthday wish for a friend.", "Make it funnier.", "Now for my aunt.", "Make that shorter."),
}
MOST_TURNS = 64
NEW_TOKENS, SIDE_TOKENS = 96, 16


class Spoken(NamedTuple):
    """One line: in which round, in which conversation, and how long the reply may be."""

    round: int
    conversation: str
    line: str
    new_tokens: int


def lines(turns: int) -> Iterator[str]:
    """The user's lines of the main conversation of ``turns`` turns."""
    yield from LINES[:turns]
    further = cycle(FURTHER)
    for _ in range(turns - len(LINES)):
        yield next(further)


def schedule(turns: int) -> Iterator[Spoken]:
    """All lines in the order in which they are said: in each round the main conversation, then one of the others."""
    beside = cycle([(name, cycle(said)) for name, said in SIDES.items()])
    for number, line in enumerate(lines(turns), start=1):
        yield Spoken(number, MAIN, line, NEW_TOKENS)
        name, said = next(beside)
        yield Spoken(number, name, next(said), SIDE_TOKENS)
