"""What all tables of the config file have in common: how many, and which keys."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any


def tables_of(name: str, given: object, most: int) -> list[tuple[Mapping[str, Any], str]]:
    """Each ``[[name]]`` table with the words for where it is.

    Raises:
        ValueError: these are no tables, or there are too many; one clause.
    """
    if not isinstance(given, list) or not all(isinstance(table, dict) for table in given):
        raise ValueError(f"{name} must be tables, each headed [[{name}]]")
    if len(given) > most:
        raise ValueError(f"there are {len(given)} [[{name}]] tables; allowed are {most}")
    return [(table, f"[[{name}]] number {number}") for number, table in enumerate(given, 1)]


def refuse_unknown(table: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    """Raise ValueError, one clause, for a key that is not among ``keys``."""
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            raise ValueError(f"{where} has no key {key!r}; "
                             + (f"did you mean {near[0]!r}?" if near else "allowed are " + ", ".join(keys)))
