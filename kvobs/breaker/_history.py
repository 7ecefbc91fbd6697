"""A budget for a chat's history: whole oldest turns go from a request's JSON body, the rest stays byte for byte.

A turn is a question (one or more messages of the user in a row) with all that follows it until the next one: replies,
calls of tools and their results. The last turn is the question that is asked now, and always stays, and so do system
and developer messages, wherever they stand. The history is what is left: the turns before the last. The oldest go until
the others are within the budget, so that what stays has no holes. Turns that a call of a tool and its result hold
together go together, or stay if one of them is the last.

Without a tokenizer the number of tokens is estimated: four bytes of UTF-8 each, four tokens more per message for its
role and marks, and for a picture or another part that is no text as many as a picture of 336 x 336 pixels has in the
usual patches of 14.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

CHAT = "/chat/completions"
ALWAYS = ("system", "developer")
BYTES_PER_TOKEN, PER_MESSAGE, PER_PART = 4, 4, 576
Count = Callable[[str], int]
# One decoder for all: to make one takes longer than to decode a message.
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PARTS = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGES = msgspec.json.Decoder(list[dict[str, Any]])


class Trimmed(msgspec.Struct, frozen=True, gc=False):
    """A body without its oldest turns: how many turns and messages are gone, and their tokens."""

    body: bytes
    turns: int
    messages: int
    tokens: int


def trim(body: bytes, path: str, budget: int, count: Count | None = None) -> Trimmed | None:
    """The body of a chat whose history has ``budget`` tokens at most, by ``count`` of a text or estimated; None where
    it need not change or is no chat that can be read.
    """
    if not path.endswith(CHAT):
        return None
    try:
        fields = _FIELDS.decode(body)
        messages = _MESSAGES.decode(fields["messages"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return None
    turns = _turns(messages)
    sizes = [sum(tokens_of(messages[place], count) for place in turn) for turn in turns[:-1]]
    gone = oldest(sizes, budget)
    if not gone:
        return None
    dropped = set(itertools.chain.from_iterable(turns[:gone]))
    kept = [one for place, one in enumerate(_PARTS.decode(fields["messages"])) if place not in dropped]
    questions = sum(_asks(messages, place) for place in dropped)
    return Trimmed(msgspec.json.encode(fields | {"messages": msgspec.Raw(msgspec.json.encode(kept))}), questions,
                   len(dropped), sum(sizes[:gone]))


def oldest(sizes: Sequence[int], budget: int) -> int:
    """How many of the turns, the oldest first, must go so that the others have ``budget`` tokens at most."""
    left = sum(sizes)
    for number, size in enumerate(sizes):
        if left <= budget:
            return number
        left -= size
    return len(sizes)


def tokens_of(message: Mapping[str, Any], count: Count | None = None) -> int:
    """Tokens of a message; estimated where no tokenizer counts them."""
    texts, parts = _texts(message)
    tokens = -(-sum(len(text.encode()) for text in texts) // BYTES_PER_TOKEN) if count is None else sum(
        count(text) for text in texts)
    return tokens + PER_MESSAGE + PER_PART * parts


def _texts(message: Mapping[str, Any]) -> tuple[list[str], int]:
    """What of a message is text, and how many other parts it has."""
    texts: list[str] = []
    others = 0
    for key, value in message.items():
        if key == "content" and isinstance(value, list):
            found = [part.get("text") if isinstance(part, dict) else part for part in value]
            texts += (one for one in found if isinstance(one, str))
            others += sum(not isinstance(one, str) for one in found)
        elif isinstance(value, str):
            if key not in ("role", "tool_call_id"):
                texts.append(value)
        elif value is not None:
            texts.append(msgspec.json.encode(value).decode())
    return texts, others


# -- turns ----------------------------------------------------------------------------------------------


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The places of messages by turn, the oldest first; without those that always stay."""
    turns: list[list[int]] = []
    asking = False
    for place, message in enumerate(messages):
        role = message.get("role")
        if role in ALWAYS:
            continue
        if not turns or (role == "user" and not asking):
            turns.append([])
        turns[-1].append(place)
        asking = role == "user"
    return _together(messages, turns)


def _together(messages: Sequence[Mapping[str, Any]], turns: Sequence[list[int]]) -> list[list[int]]:
    """Turns that a call and its result hold together are one."""
    calls: dict[str, int] = {}  # where each was last made
    joined: list[list[int]] = []
    first: list[int] = []  # of each joined turn, the number of its first turn
    for number, turn in enumerate(turns):
        begins = number
        for place in turn:
            for name in _made(messages[place]):
                calls[name] = number
            answered = _answered(messages[place])
            if answered is not None:
                begins = min(begins, calls.get(answered, number))
        current, whole = number, list(turn)
        while current > begins:
            current, whole = first.pop(), joined.pop() + whole
        joined.append(whole)
        first.append(current)
    return joined


def _made(message: Mapping[str, Any]) -> list[str]:
    """The calls that a message makes."""
    calls = message.get("tool_calls")
    found = [f"id {call['id']}" for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str)] if (
        isinstance(calls, list)) else []
    function = message.get("function_call")
    return [*found, f"name {function.get('name')}"] if isinstance(function, dict) else found


def _answered(message: Mapping[str, Any]) -> str | None:
    """The call whose result a message is."""
    if message.get("role") == "tool":
        return f"id {message.get('tool_call_id')}"
    return f"name {message.get('name')}" if message.get("role") == "function" else None


def _asks(messages: Sequence[Mapping[str, Any]], place: int) -> bool:
    """Whether a question begins there."""
    before = next((role for at in range(place - 1, -1, -1) if (role := messages[at].get("role")) not in ALWAYS), None)
    return messages[place].get("role") == "user" and before != "user"
