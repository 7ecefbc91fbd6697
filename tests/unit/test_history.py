"""The history budget: which turns go from a chat, how their tokens are estimated, and what is left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvobs.breaker._degrade import within
from kvobs.breaker._history import tokens_of, trim
from kvobs.breaker._limits import Limits

CHAT = "/v1/chat/completions"


def said(role: str, text: Any = "x" * 40, **more: Any) -> dict[str, Any]:
    """A message; by default of 40 bytes: ten tokens, and four for itself."""
    return {"role": role, "content": text, **more}


def left(messages: list[dict[str, Any]], budget: int) -> list[int] | None:
    """The places of the messages that stay; None where the body is left alone."""
    numbered = [one | {"at": place} for place, one in enumerate(messages)]
    found = trim(json.dumps({"messages": numbered}).encode(), CHAT, budget, lambda text: 10 if len(text) == 40 else 0)
    return None if found is None else [one["at"] for one in json.loads(found.body)["messages"]]


TALK = [said("system"), said("user"), said("assistant"), said("user"), said("assistant"), said("user")]


def calls(name: str) -> list[dict[str, Any]]:
    return [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(("messages", "budget", "stays"), [
    (TALK, 10_000, None),
    (TALK, 56, None),
    (TALK, 55, [0, 3, 4, 5]),
    (TALK, 0, [0, 5]),
    ([*TALK, said("assistant"), said("tool", tool_call_id="none")], 0, [0, 5, 6, 7]),
    ([said("user"), said("user"), said("assistant"), said("user"), said("user")], 0, [3, 4]),
    ([said("assistant"), said("user"), said("developer"), said("assistant"), said("user")], 0, [2, 4]),
    ([said("user"), said("assistant", tool_calls=calls("a")), said("tool", tool_call_id="a"), said("user")], 0, [3]),
    ([said("user"), said("assistant", tool_calls=calls("a")), said("user"), said("tool", tool_call_id="a"),
      said("user")], 0, [4]),
    ([said("user"), said("assistant"), said("user"), said("assistant", tool_calls=calls("a")), said("user"),
      said("tool", tool_call_id="a")], 0, [2, 3, 4, 5]),
    ([said("user")], 0, None),
    ([said("system"), said("assistant")], 0, None),
    ([], 0, None)])
def test_whole_oldest_turns_go(messages: list[dict[str, Any]], budget: int, stays: list[int] | None) -> None:
    """Oldest first, with their replies and pairs, until the history is within the budget; instructions and the last
    question stay.
    """
    assert left(messages, budget) == stays


def test_the_estimate() -> None:
    """Four bytes of UTF-8 a token, four tokens a message, 576 for a picture; arguments of calls count as they are."""
    assert tokens_of(said("user", "x" * 41)) == 11 + 4
    assert tokens_of(said("user", "七" * 4)) == 3 + 4
    assert tokens_of(said("user", None)) == 4
    picture = {"type": "image_url", "image_url": {"url": "data:" + "A" * 9_000}}
    assert tokens_of(said("user", [{"type": "text", "text": "x" * 8}, picture])) == 2 + 4 + 576
    function = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert tokens_of({"role": "assistant", "tool_calls": [function]}) == -(-len(
        json.dumps([function], separators=(",", ":"))) // 4) + 4
    assert tokens_of(said("user", "one two three"), lambda text: len(text.split())) == 3 + 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"])
def test_other_interfaces_are_left_alone(path: str) -> None:
    """Only chats have a history that the server is sent anew each time under this name."""
    assert trim(json.dumps({"messages": TALK}).encode(), path, 0) is None


def test_both_limits_and_what_the_answer_says() -> None:
    """New tokens and history change in one body, each is told, and an estimate is called one."""
    limits, body = Limits(max_new_tokens=64, history_tokens=20), json.dumps({"max_tokens": 900, "messages": TALK})
    found = within(limits, body.encode(), CHAT)
    assert found is not None
    assert json.loads(found.body) == {"max_tokens": 64, "messages": [TALK[0], TALK[5]]}
    assert found.outcomes == ("clamped", "trimmed")
    assert dict(found.headers) == {b"kvobs-degraded": b"max_tokens=64, history_tokens=20",
                                   b"kvobs-history-dropped": b"turns=2, messages=4, tokens=56;estimated"}
    exact = within(Limits(history_tokens=20), body.encode(), CHAT, len)
    assert exact is not None
    assert dict(exact.headers)[b"kvobs-history-dropped"] == b"turns=2, messages=4, tokens=176"
    assert within(Limits(history_tokens=10_000), body.encode(), CHAT) is None
    assert within(Limits(), body.encode(), CHAT) is None
