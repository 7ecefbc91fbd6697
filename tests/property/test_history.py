"""The history budget over chats of any shape, against a checker that knows nothing of turns but the promise."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvobs.breaker._history import tokens_of, trim

CHAT = "/v1/chat/completions"
KEPT = ("system", "developer")
ids = st.sampled_from(["a", "b", "c"])
text = st.text(st.characters(codec="utf-8"), max_size=30)
content = st.one_of(text, st.none(), st.lists(st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": text}),
    st.just({"type": "image_url", "image_url": {"url": "data:"}})), max_size=2))
message = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "user", "assistant", "system", "developer", "other"]),
                           "content": content}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": content, "tool_calls": st.lists(
        ids.map(lambda one: {"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}}),
        min_size=1, max_size=2)}),
    st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": ids, "content": text}),
    st.fixed_dictionaries({"role": st.just("assistant"), "function_call": st.just({"name": "g", "arguments": "{}"})}),
    st.fixed_dictionaries({"role": st.just("function"), "name": st.just("g"), "content": text}))


def pairs(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The places of each result and of the newest call before it that it can belong to."""
    found = []
    for place, one in enumerate(messages):
        for before in range(place - 1, -1, -1):
            other = messages[before]
            if (one["role"] == "tool" and any(call["id"] == one["tool_call_id"] for call in other.get("tool_calls", []))
                    ) or (one["role"] == "function" and "function_call" in other):
                found.append((before, place))
                break
    return found


def last_question(messages: list[dict[str, Any]]) -> int:
    """Where the last question begins: the first of the last user's messages in a row."""
    spoken = [place for place, one in enumerate(messages) if one["role"] not in KEPT]
    asked = [place for place in spoken if messages[place]["role"] == "user"]
    if not asked:
        return spoken[0] if spoken else 0
    at = spoken.index(asked[-1])
    while at and messages[spoken[at - 1]]["role"] == "user":
        at -= 1
    return spoken[at]


@given(messages=st.lists(message, max_size=14), budget=st.integers(0, 200),
       other=st.dictionaries(text, text, max_size=2), ascii_only=st.booleans())
def test_what_goes_is_the_oldest_and_whole(messages: list[dict[str, Any]], budget: int, other: dict[str, str],
                                           ascii_only: bool) -> None:
    """Messages that stay are the same and in their order; system messages, the last question and all after it stay; of
    a call and its result both stay or neither; what went is older than all that stays, begins where no question or a
    question begins, and one turn less would not have been enough.
    """
    other = {key: value for key, value in other.items() if key != "messages"}
    body = json.dumps(other | {"messages": messages}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    found = trim(body, CHAT, budget)
    question = last_question(messages)
    sizes = [0 if one["role"] in KEPT else tokens_of(one) for one in messages]
    if found is None:
        linked = {before for before, after in pairs(messages) if after >= question}
        first_linked = min(linked, default=question)
        assert sum(sizes[:question]) <= budget or first_linked < question
        return
    after = json.loads(found.body)
    assert {key: value for key, value in after.items() if key != "messages"} == other
    for one in other.values():
        assert json.dumps(one, ensure_ascii=ascii_only).encode() in found.body
    spoken = [place for place, one in enumerate(messages) if one["role"] not in KEPT]
    gone = set(spoken[:found.messages])
    kept = [one for place, one in enumerate(messages) if place not in gone]
    assert after["messages"] == kept
    assert max(gone) < question
    assert all((before in gone) == (result in gone) for before, result in pairs(messages))
    following = spoken[found.messages]
    assert messages[following]["role"] == "user"
    assert messages[spoken[found.messages - 1]]["role"] != "user"
    assert found.tokens == sum(sizes[place] for place in gone)
    assert sum(sizes[:question]) > budget
    rest = sum(size for place, size in enumerate(sizes[:question]) if place not in gone)
    linked = [before for before, result in pairs(messages) if result >= question and before < question]
    assert rest <= budget or linked
    runs = [place for number, place in enumerate(spoken) if messages[place]["role"] == "user"
            and (number == 0 or messages[spoken[number - 1]]["role"] != "user")]
    assert found.turns == len(gone & set(runs))
    newest = [place for place in sorted(runs) if place in gone]
    if newest and not any(result in gone and before < newest[-1] <= result for before, result in pairs(messages)):
        fewer = sum(size for place, size in enumerate(sizes[:question]) if place not in gone or place >= newest[-1])
        assert fewer > budget


@given(messages=st.lists(message, max_size=14), budget=st.integers(0, 200))
def test_once_is_enough(messages: list[dict[str, Any]], budget: int) -> None:
    """What is within the budget, or was brought there as far as may be, is left alone."""
    found = trim(json.dumps({"messages": messages}).encode(), CHAT, budget)
    if found is not None:
        assert trim(found.body, CHAT, budget) is None


@given(body=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode), st.recursive(
    st.none() | st.integers() | text, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["messages", "role", "content", "tool_calls"]), inner, max_size=3), max_leaves=8).map(
            lambda value: json.dumps(value).encode())))
def test_anything_can_come(body: bytes) -> None:
    """Whatever the body is, nothing is raised, and what is no chat with a history is left alone."""
    assert trim(body, CHAT, 10**6) is None
    trim(body, CHAT, 0)
