"""Fewer new tokens in a request's body: which values change, and that nothing else does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.breaker._clamp import clamp

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = ("/v1/chat/completions", "/v1/completions", "/v1/responses",
                                            "/v1/embeddings")


def clamped(body: dict[str, Any], path: str = CHAT) -> dict[str, Any] | None:
    found = clamp(json.dumps(body).encode(), path, 100)
    return None if found is None else json.loads(found)


@pytest.mark.parametrize(("path", "body", "expected"), [
    (CHAT, {"max_tokens": 500}, {"max_tokens": 100}),
    (CHAT, {"max_tokens": 500.0}, {"max_tokens": 100}),
    (CHAT, {"max_completion_tokens": 101}, {"max_completion_tokens": 100}),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 500}, {"max_tokens": 5, "max_completion_tokens": 100}),
    (CHAT, {"max_tokens": 10**30}, {"max_tokens": 100}),
    (CHAT, {}, {"max_tokens": 100}),
    (CHAT, {"max_tokens": None}, {"max_tokens": 100}),
    (CHAT, {"max_tokens": 500, "min_tokens": 200}, {"max_tokens": 100, "min_tokens": 100}),
    (CHAT, {"max_tokens": 500, "min_tokens": 20}, {"max_tokens": 100, "min_tokens": 20}),
    (RESPONSES, {}, {"max_output_tokens": 100}),
    (COMPLETIONS, {"max_tokens": 500}, {"max_tokens": 100}),
    ("/v1/messages", {"max_tokens": 500}, {"max_tokens": 100}),
])
def test_limits_above_are_lowered(path: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    """A limit that is above, or absent where that means as much as fits, becomes the new one; a least number of tokens
    follows it.
    """
    assert clamped(body, path) == expected


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {"max_tokens": 100}), (CHAT, {"max_tokens": 0}), (CHAT, {"max_tokens": None, "max_completion_tokens": 5}),
    (COMPLETIONS, {}), (COMPLETIONS, {"max_tokens": None}), (EMBEDDINGS, {"input": "a"}),
    (CHAT, {"max_tokens": "many"}), (CHAT, {"max_tokens": True}), (CHAT, {"max_tokens": [1]}),
    (CHAT, {"max_tokens": -1})])
def test_what_need_not_change_does_not(path: str, body: dict[str, Any]) -> None:
    """A limit that is low enough, one that has a low default, and what is no number is left alone."""
    assert clamped(body, path) is None


@pytest.mark.parametrize("body", [b"", b"null", b"[1]", b'"text"', b"{", b'{"max_tokens": 500', b"\xff\xfe{\x00",
                                  b'{"max_tokens": 500} x', b'{"max_tokens": NaN}', b'{"max_tokens": 1e999}'])
def test_what_is_no_object_is_left_alone(body: bytes) -> None:
    """What cannot be read as one JSON object with numbers in range is the application's affair."""
    assert clamp(body, EMBEDDINGS, 100) is None


def test_the_last_of_two_equal_names_counts() -> None:
    """A name that is given twice is lowered as the application would read it."""
    found = clamp(b'{"max_tokens": 5, "max_tokens": 500}', CHAT, 100)
    assert found is not None
    assert json.loads(found) == {"max_tokens": 100}


values = st.recursive(st.none() | st.booleans() | st.integers(-10**20, 10**20) | st.text(max_size=8)
                      | st.floats(allow_nan=False, allow_infinity=False),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                                  max_size=3), max_leaves=8)


@given(body=st.dictionaries(st.text(max_size=6), values, max_size=5), tokens=st.integers(101, 10**9),
       ascii_only=st.booleans())
def test_everything_else_is_the_same(body: dict[str, Any], tokens: int, ascii_only: bool) -> None:
    """Of any object only the limit changes; every other value keeps its very bytes."""
    body = {name: value for name, value in body.items() if "tokens" not in name}
    given_ = json.dumps(body | {"max_tokens": tokens}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    found = clamp(given_, CHAT, 100)
    assert found is not None
    assert json.loads(found) == body | {"max_tokens": 100}
    for value in body.values():
        assert json.dumps(value, ensure_ascii=ascii_only).encode() in found
