"""Values out of dicts, many at a time, with their types and ranges checked."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvobs.allocator.readers._frames import kind
from kvobs.allocator.readers._limits import MAX_ADDRESS, MAX_SIZE, MAX_TOTAL_SIZE, Refused

STREAM = 1 << 63


def dicts(found: Any, what: str) -> list[dict[str, Any]]:
    """A list of dicts.

    Raises:
        Refused: it is not.
    """
    if type(found) is not list:
        raise Refused(f"The {what} are {kind(found)}, and must be a list.")
    for other in set(map(type, found)) - {dict}:
        raise Refused(f"One of the {what} is {kind(next(one for one in found if type(one) is other))}, "
                      "and must be a dict.")
    return found


def column(code: str, rows: list[dict[str, Any]], key: str, low: int, high: int, what: str) -> array[int]:
    """The whole number under ``key`` of every row, from ``low`` to below ``high``.

    Raises:
        Refused: one is missing, of another type, or out of range.
    """
    return numbers(code, [row.get(key) for row in rows], low, high, f"{key} of {what}")


def numbers(code: str, values: Sequence[Any], low: int, high: int, what: str) -> array[int]:
    """A column of whole numbers from ``low`` to below ``high``.

    Raises:
        Refused: one is of another type, or out of range.
    """
    for other in set(map(type, values)) - {int}:
        wrong = next(value for value in values if type(value) is other)
        raise Refused(f"The {what} is {kind(wrong)}, and must be a whole number.")
    if values and (min(values) < low or max(values) >= high):
        wrong = next(value for value in values if not low <= value < high)
        raise Refused(f"The {what} is {wrong if abs(wrong) < 1 << 70 else 'a huge number'}, and must be between "
                      f"{low} and {high - 1}.")
    return array(code, values)


def sizes(rows: list[dict[str, Any]], key: str, what: str) -> array[int]:
    """Byte counts."""
    found = column("q", rows, key, 0, MAX_SIZE + 1, what)
    if sum(found) > MAX_TOTAL_SIZE:
        raise Refused(f"The {key}s of its {what}s add up to more bytes than any device has.")
    return found


def addresses(rows: list[dict[str, Any]], key: str, what: str) -> array[int]:
    """Device addresses."""
    return column("Q", rows, key, 0, MAX_ADDRESS, what)


def streams(rows: list[dict[str, Any]], what: str) -> array[int]:
    """Streams, which are handles of any value; 0 where the file has none."""
    return numbers("q", [row.get("stream", 0) for row in rows], -STREAM, STREAM, f"stream of {what}")


def text(value: Any, what: str) -> str:
    """A text.

    Raises:
        Refused: it is not.
    """
    if type(value) is not str:
        raise Refused(f"The {what} is {kind(value)}, and must be a text.")
    return value
