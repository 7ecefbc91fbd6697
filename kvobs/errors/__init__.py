"""Failures of requests: which class each belongs to, and how many there were.

``classify(error)`` is pure but for the verdicts on memory; ``add`` and the ``[[error]]`` tables of the config file
put rows before the built-in ones. The middleware is in ``kvobs.asgi`` and ``kvobs.wsgi``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvobs.config import ErrorRow
from kvobs.errors._classes import CLASSES, MEANINGS, of_status
from kvobs.errors._end import rules
from kvobs.errors._tally import tally
from kvobs.errors._verdicts import note as note_verdict

if TYPE_CHECKING:
    from kvobs.errors._classify import Table
    from kvobs.errors._rows import ROWS


def classify(error: BaseException) -> str:
    """The class of an exception, by the rows that were added, those of the config file and the built-in ones."""
    return rules.table.classify(error)


def add(error_class: str, *, types: Sequence[str] = (), message: str = "", codes: Sequence[int | str] = (),
        vague: bool = False) -> ErrorRow:
    """Put a row before all others; see ``kvobs.config.ErrorRow`` for what its parts mean.

    Raises:
        ValueError: what was given is no row, or there are 32 already.
    """
    try:
        row = ErrorRow(error_class=error_class, types=tuple(types), message=message, codes=tuple(codes), vague=vague)
    except ValueError as error:
        raise ValueError(f"The row {error}.") from None
    rules.add(row)
    return row


def remove(row: ErrorRow) -> None:
    """Take out a row that ``add`` returned.

    Raises:
        ValueError: it is not there.
    """
    rules.remove(row)


def __getattr__(name: str) -> object:
    if name in ("ROWS", "Table"):  # most processes need neither
        from kvobs.errors import _classify

        return getattr(_classify, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["CLASSES", "MEANINGS", "ROWS", "ErrorRow", "Table", "add", "classify", "note_verdict", "of_status", "remove",
           "tally"]
