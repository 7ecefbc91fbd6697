"""What the user of the demo says: eight scripted lines, later ones referring back, then further follow-ups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

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
MOST_TURNS = 64
NEW_TOKENS = 96


def lines(turns: int) -> Iterator[str]:
    """The user's lines of a conversation of ``turns`` turns."""
    yield from LINES[:turns]
    further = cycle(FURTHER)
    for _ in range(turns - len(LINES)):
        yield next(further)
