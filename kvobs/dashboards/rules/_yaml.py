"""Mappings, lists and scalars as YAML; texts of several lines as literal blocks, all other texts quoted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def document(value: Mapping[str, Any], comments: Sequence[str] = ()) -> str:
    """A YAML document that begins with ``comments``."""
    return "".join(f"# {line}\n" for line in comments) + "\n".join(_lines(value, "")) + "\n"


def _lines(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            name = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
            yield from _entry(f"{indent}{name}:", entry, indent)
    else:
        for entry in value:
            yield from _item(entry, indent)


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    if _nested(value):
        yield head
        yield from _lines(value, indent + "  ")
    elif _block(value):
        yield f"{head} |-"
        yield from (f"{indent}  {line}" for line in value.split("\n"))
    else:
        yield f"{head} {_scalar(value)}"


def _item(value: Any, indent: str) -> Iterator[str]:
    if not _nested(value):
        yield f"{indent}- {_scalar(value)}"
        return
    first, *rest = _lines(value, indent + "  ")
    yield f"{indent}- {first[len(indent) + 2:]}"
    yield from rest


def _nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and bool(value)


def _block(value: Any) -> bool:
    """A literal block keeps what has neither a leading space nor anything at a line's end that YAML would drop."""
    return isinstance(value, str) and "\n" in value and value[:1] not in (" ", "\n") and all(
        line == line.rstrip() and line.isprintable() for line in value.split("\n")) and not value.endswith("\n")


def _scalar(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return "".join(sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in text)
