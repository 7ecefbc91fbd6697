"""Fewer new tokens: a request's JSON body with lower limits, everything else as it was, byte for byte."""

from __future__ import annotations

import msgspec

# What the HTTP interfaces of OpenAI and Anthropic, and of the engines that speak them, call the limit.
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LEAST = "min_tokens"  # vLLM and SGLang refuse one above the limit
# Where no limit means as much as the context holds. /v1/completions gives 16 tokens then, and is left alone.
_ADDED = {"/chat/completions": "max_tokens", "/responses": "max_output_tokens"}
_Fields = dict[str, msgspec.Raw]


def clamp(body: bytes, path: str, limit: int) -> bytes | None:
    """The body with no more than ``limit`` new tokens; None where it need not change or is no JSON object.

    A value that is no number is left to the application, which knows what to say of it.
    """
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    given = {name: _number(fields[name]) for name in LIMITS if name in fields}
    changed = [name for name, value in given.items() if value is not None and value > limit]
    absent = all(bytes(fields[name]) == b"null" for name in given)
    added = next((name for ending, name in _ADDED.items() if path.endswith(ending)), None)
    if absent and added is not None:
        changed.append(added)
    if not changed:
        return None
    least = _number(fields[LEAST]) if LEAST in fields else None
    if least is not None and least > limit:
        changed.append(LEAST)
    value = msgspec.Raw(str(limit).encode())
    return msgspec.json.encode(fields | dict.fromkeys(changed, value))


def _number(raw: msgspec.Raw) -> float | None:
    try:
        value = msgspec.json.decode(raw)
    except msgspec.MsgspecError:  # out of any range
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
