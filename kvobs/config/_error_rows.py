"""How failures are told apart: the ``[[error]]`` tables of the config file, which go before the built-in table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kvobs.config._tables import refuse_unknown, tables_of

MOST_ROWS = 32  # each may name a class of its own, and classes are values of a metric's label
KEYS = {"class": "a name of small letters, digits and '_', at most 40", "types": "a list of names with their modules, "
        "such as builtins.TimeoutError", "message": "a regular expression", "codes": "a list of numbers or texts",
        "vague": "true or false"}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_TYPE = re.compile(r"\w+(\.\w+)+")


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """An exception is of ``error_class`` if all that the row gives holds.

    Args:
        error_class: of failures like this.
        types: one of the exception's type and its bases has one of these names (``module.qualname``).
        message: this regular expression is found in its text, whatever the case of letters.
        codes: one of its ``errno``, ``code``, ``status_code``, ``status``, ``sqlstate`` and ``pgcode`` is one of these.
        vague: an exception that it came from may know better.
    """

    error_class: str
    types: tuple[str, ...] = ()
    message: str = ""
    codes: tuple[int | str, ...] = ()
    vague: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.error_class):
            raise ValueError(f"has the class {self.error_class!r}; it must be {KEYS['class']}")
        if not (self.types or self.message or self.codes):
            raise ValueError("needs types, a message or codes")
        for name in self.types:
            if not _TYPE.fullmatch(name):
                raise ValueError(f"names the type {name!r}; types are {KEYS['types']}")
        try:
            re.compile(self.message)
        except re.error as error:
            raise ValueError(f"has the message {self.message!r}, which is no regular expression: {error}") from None


def parse_error_rows(tables: object) -> tuple[ErrorRow, ...]:
    """The rows of a file's ``error`` tables.

    Raises:
        ValueError: one clause that says which table, what is wrong and what is allowed.
    """
    return tuple(_row(table, where) for table, where in tables_of("error", tables, MOST_ROWS))


def _row(table: Mapping[str, Any], where: str) -> ErrorRow:
    refuse_unknown(table, KEYS, where)
    given: dict[str, Any] = {"error_class": table.get("class", ""),
                             **{key: table[key] for key in table if key != "class"}}
    for key, value in given.items():
        good = {"types": _all(value, str), "codes": _all(value, int, str), "vague": isinstance(value, bool)}
        if not good.get(key, isinstance(value, str)):
            name = "class" if key == "error_class" else key
            raise ValueError(f"{where} has the {name} {value!r}; it must be {KEYS[name]}")
    row: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        return ErrorRow(**row)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


def _all(value: object, *kinds: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kinds) and not isinstance(one, bool) for one in value)
