"""Masking whatever text: secrets never stay, innocent text never changes, the work grows with the length only."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from kvobs.exporters._deny import MASKED, Rules, mask_text

WORDS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=12).filter(
    lambda word: not re.search("pass|pwd|secret|credential|key|token|bearer|basic|authorization|sk|eyj", word))
NUMBERS = st.integers(0, 10**12 - 1).map(str)
SENTENCES = st.lists(WORDS | NUMBERS | st.sampled_from(["(", ")", "[x]", "/a/b", "1.5", "-", "…", "a_b"]), max_size=20)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def check_digit(digits: str) -> str:
    """By the table of the standard: doubled digits as their sums."""
    doubled = {"0": 0, "1": 2, "2": 4, "3": 6, "4": 8, "5": 1, "6": 3, "7": 5, "8": 7, "9": 9}
    total = sum(doubled[digit] if (len(digits) - place) % 2 else int(digit) for place, digit in enumerate(digits))
    return str(-total % 10)


CARDS = st.text("0123456789", min_size=14, max_size=14).map(lambda rest: "4" + rest).map(
    lambda digits: digits + check_digit(digits))
SECRETS = st.one_of(
    CARDS, CARDS.map(lambda digits: " ".join(digits[at:at + 4] for at in range(0, 16, 4))),
    st.text(LETTERS, min_size=20, max_size=40).map(lambda text: "hf_" + text),
    st.text(LETTERS, min_size=24, max_size=40).map(lambda text: "Bearer " + text),
    st.text(LETTERS, min_size=1, max_size=30).map(lambda text: f"password={text}"),
    st.text(LETTERS + "-._~!$*+@:", min_size=1, max_size=30).map(lambda text: f"https://anna:{text}@host/path"),
    st.tuples(WORDS, WORDS).map(lambda pair: f"{pair[0]}@{pair[1]}.org"))


def secret_of(planted: str) -> str:
    found = re.fullmatch(r"https://anna:(.*)@host/path", planted)
    return found[1] if found else planted.partition("=")[2] or planted.partition("Bearer ")[2] or planted


@given(SENTENCES, SECRETS, SENTENCES)
def test_a_secret_is_masked_wherever_it_stands(before: list[str], secret: str, after: list[str]) -> None:
    """Between any words and numbers, the secret goes; the words around it stay, in their order."""
    # A number beside a card in groups can be read as part of a longer run; both readings are masked.
    grouped = re.fullmatch(r"[\d ]+", secret) is not None
    fence = "|" if grouped else " "
    left, right = " ".join(before), " ".join(after)
    planted = mask_text(f"{left}{fence}{secret}{fence}{right}")
    assert planted.startswith(left + fence)
    assert planted.endswith(fence + right)
    middle = planted[len(left) + 1:len(planted) - len(right) - 1]
    assert MASKED in middle
    if len(secret_of(secret)) > 8:
        assert secret_of(secret) not in middle
    assert mask_text(planted) == planted


@given(SENTENCES)
def test_text_without_a_secret_is_the_same_object(words: list[str]) -> None:
    """Nothing is rewritten where nothing is found."""
    text = " | ".join(words)
    assert Rules(payloads=True).text(text) is text


@given(SECRETS)
def test_a_text_that_is_only_a_secret_is_masked(secret: str) -> None:
    """However short it is."""
    assert MASKED in mask_text(secret)


@given(st.text(max_size=300))
def test_any_text_can_be_masked(text: str) -> None:
    """Nothing raises, and masking twice is masking once."""
    once = mask_text(text)
    assert mask_text(once) == once


@given(st.dictionaries(st.text(max_size=20), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
                       | st.lists(st.integers(), max_size=5).map(tuple), max_size=6), st.booleans())
def test_numbers_change_only_by_their_keys(attributes: dict[str, object], payloads: bool) -> None:
    """A number is either replaced whole, because of its key, or the very same."""
    rules = Rules(payloads=payloads)
    for key, value in attributes.items():
        found = rules.value(key, value)
        assert found is value or found == MASKED
