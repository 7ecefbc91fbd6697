"""Which class an exception belongs to: its own row, else that of what it came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kvobs.config import ErrorRow
from kvobs.errors import _verdicts
from kvobs.errors._classes import CANCELLED, INTERNAL, OUT_OF_MEMORY
from kvobs.errors._rows import ROWS

MOST = 64  # exceptions of a chain, with all groups in it
MOST_CHARACTERS = 2_000  # of a message
_CODES = ("errno", "code", "status_code", "status", "sqlstate", "pgcode")
_WRAPPED = ("orig", "reason")  # where database layers and urllib keep what they wrap


class Table:
    """Rows in the order in which they are asked; those that were added last come first."""

    def __init__(self, rows: Iterable[ErrorRow] = ROWS) -> None:
        self._rows = tuple(rows)
        self._patterns = {row.message: re.compile(row.message, re.IGNORECASE) for row in self._rows if row.message}

    def with_rows(self, rows: Iterable[ErrorRow]) -> Table:
        """A table in which these rows, in their order, go before all others."""
        return Table((*rows, *self._rows))

    def classify(self, error: BaseException) -> str:
        """The class of an exception; ``internal`` where no row fits it or what it came from. Never raises.

        Of a group it is that of its first member whose class is neither ``cancelled`` nor ``internal``. What an
        exception came from is its ``__cause__``, else its ``__context__`` unless that is suppressed.
        """
        try:
            return self._classify(error, [MOST])
        except Exception:  # a type whose attributes raise
            return INTERNAL

    def _classify(self, error: BaseException, left: list[int]) -> str:
        vague = None
        for one in _chain(error, left):
            if isinstance(one, BaseExceptionGroup):
                found = self._of_group(one, left)
                if found != INTERNAL:
                    return found
                continue
            row = self._row_of(one)
            if row is not None and not row.vague:
                return _verdicts.of_message(_text(one)) if row.error_class == OUT_OF_MEMORY else row.error_class
            if row is not None and vague is None:
                vague = row.error_class
        return vague or INTERNAL

    def _of_group(self, group: BaseExceptionGroup[BaseException], left: list[int]) -> str:
        found = [self._classify(member, left) for member in group.exceptions if left[0] > 0]
        told = next((one for one in found if one not in (CANCELLED, INTERNAL)), None)
        return told or (INTERNAL if INTERNAL in found or not found else CANCELLED)

    def _row_of(self, error: BaseException) -> ErrorRow | None:
        names = {f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__}
        text = None
        for row in self._rows:
            if row.types and names.isdisjoint(row.types):
                continue
            if row.codes and not any(getattr(error, name, None) in row.codes for name in _CODES):
                continue
            if row.message:
                text = _text(error) if text is None else text
                if not self._patterns[row.message].search(text):
                    continue
            return row
        return None


def _chain(error: BaseException, left: list[int]) -> Iterator[BaseException]:
    """The exception and what it came from, nearest first; each once."""
    seen: set[int] = set()
    waiting: list[BaseException] = [error]
    while waiting and left[0] > 0:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        left[0] -= 1
        yield one
        came_from = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        wrapped = [getattr(one, name, None) for name in _WRAPPED]
        waiting += [found for found in (*wrapped, came_from) if isinstance(found, BaseException)]


def _text(error: BaseException) -> str:
    try:
        return str(error)[:MOST_CHARACTERS]
    except Exception:  # of the exception's own __str__
        return ""
