"""How a request ended, told to the tally and to the span that was current when it came."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from opentelemetry import trace

from kvobs import config
from kvobs.errors import _classes
from kvobs.errors._tally import CANCELLED, FAILED, OK, REFUSED, START, STREAM, tally

if TYPE_CHECKING:
    from kvobs.errors._classify import Table

_log = logging.getLogger("kvobs")
OUTCOME = "kvobs.outcome"


class Rules:
    """The table in force: rows added in code, then those of the config file, then the built-in ones."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._added: tuple[config.ErrorRow, ...] = ()
        self._table: Table | None = None

    @property
    def table(self) -> Table:
        """Made when it is first needed; where the configuration is refused, without the file's rows."""
        with self._lock:
            table, added = self._table, self._added
        if table is None:
            from kvobs.errors._classify import Table  # most processes never fail

            table = Table().with_rows((*added, *_configured()))
            with self._lock:
                if self._added is added:
                    self._table = table
        return table

    def add(self, row: config.ErrorRow) -> None:
        """Have a row go before all others."""
        with self._lock:
            if row in self._added:
                return
            if len(self._added) >= config.MOST_ERROR_ROWS:
                raise ValueError(f"At most {config.MOST_ERROR_ROWS} rows can be added to the table of errors.")
            self._added, self._table = (row, *self._added), None

    def remove(self, row: config.ErrorRow) -> None:
        """Take out a row that was added."""
        with self._lock:
            at = self._added.index(row)
            self._added, self._table = (*self._added[:at], *self._added[at + 1:]), None

    def after_fork_in_child(self) -> None:
        """A thread of the parent that holds the lock, perhaps half-way, is the parent's."""
        self._lock, self._table = threading.RLock(), None


def _configured() -> tuple[config.ErrorRow, ...]:
    try:
        return config.load().errors
    except config.ConfigError as error:
        _log.error("kvobs: failures are told apart by the built-in table alone: %s", error)
        return ()


rules = Rules()
os.register_at_fork(after_in_child=rules.after_fork_in_child)


def ended(server: str, span: trace.Span, error: BaseException | None, status: int | None, *, gone: bool, whole: bool,
          began: bool) -> None:
    """Count one request; never raises.

    Args:
        error: what the application raised.
        status: of the answer; None where none began.
        gone: the client left before the answer's end.
        whole: the answer was sent to its end.
        began: the answer had begun to go out. Where it then did not end well, the phase is ``stream``.
    """
    try:
        outcome, found = _judged(error, status, gone=gone, whole=whole)
        broken = gone or error is not None or not whole
        tally.count(server, outcome, found, STREAM if began and broken else START)
        if outcome != OK and span.is_recording():
            span.set_attribute(OUTCOME, outcome)
            if outcome == FAILED:
                span.set_attribute("error.type", found)
    except Exception as failure:
        _log.debug("kvobs: the end of a request could not be counted (%s: %s).", type(failure).__name__, failure)


def _judged(error: BaseException | None, status: int | None, *, gone: bool, whole: bool) -> tuple[str, str]:
    if gone:
        return CANCELLED, _classes.CANCELLED
    if error is not None:
        found = rules.table.classify(error)
        return CANCELLED if found == _classes.CANCELLED else FAILED, found
    if status is None or not whole:
        return FAILED, _classes.INTERNAL  # the application ended without an answer, or within it
    if status < 400:
        return OK, ""
    if status == 499:
        return CANCELLED, _classes.CANCELLED
    return REFUSED if status < 500 else FAILED, _classes.of_status(status)
