"""Opening a SQLite file that nobody vouches for: read-only, its own SQL never run, its tables checked by hand."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote

_STEPS = 1_000_000  # of SQLite's machine between two looks at the budget
_BUDGET = 20_000  # such looks: some minutes of one core, more rows than the limits allow
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1 << 28,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 16,
    sqlite3.SQLITE_LIMIT_COLUMN: 256,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 16,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 1,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 10_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 4,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 1 << 10,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ})


class Database:
    """The tables of one file."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._columns: dict[str, tuple[str, ...]] = {}

    def columns(self, table: str) -> tuple[str, ...]:
        """The columns of an ordinary table; none where there is no such table, or one that computes its values."""
        if table not in self._columns:
            self._columns[table] = self._ordinary(table)
        return self._columns[table]

    def rows(self, table: str, columns: Sequence[str], where: str = "") -> Iterator[tuple[object, ...]]:
        """Rows of a table, as they lie in the file. All names must come from :meth:`columns`."""
        words = ", ".join(_quoted(column) for column in columns)
        yield from self._connection.execute(f"SELECT {words} FROM main.{_quoted(table)} {where}")

    def _ordinary(self, table: str) -> tuple[str, ...]:
        # Views and virtual tables have no root page; rows of them would be computed by SQL of the file.
        kinds = self._connection.execute(
            "SELECT type, rootpage FROM main.sqlite_master WHERE name = ? LIMIT 2", (table,)).fetchall()
        if len(kinds) != 1 or kinds[0][0] != "table" or not isinstance(kinds[0][1], int) or kinds[0][1] < 1:
            return ()
        found = self._connection.execute(f"PRAGMA main.table_xinfo({_quoted(table)})").fetchall()
        if any(hidden for *_, hidden in found):
            return ()  # generated columns
        return tuple(str(row[1]) for row in found)


@contextmanager
def opened(source: str | bytes) -> Iterator[Database]:
    """A file, by its path or its bytes, as a database for reading.

    Raises:
        sqlite3.Error: it is no database, or a damaged one; also later, while rows are read.
        UnicodeDecodeError: it is damaged, and SQLite's words about it quote what is no text.
    """
    place = f"file:{quote(source)}?mode=ro&immutable=1" if isinstance(source, str) else ":memory:"
    connection = sqlite3.connect(place, uri=True, isolation_level=None)
    try:
        if isinstance(source, bytes):
            connection.deserialize(source)
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0", "temp_store = MEMORY",
                       "query_only = ON", "cache_size = -8192"):
            connection.execute(f"PRAGMA {pragma}")
        connection.text_factory = _text
        connection.set_authorizer(_authorise)
        connection.set_progress_handler(_Budget().spend, _STEPS)
        yield Database(connection)
    finally:
        connection.close()


def printable(text: str) -> str:
    """An error of SQLite may quote the file: at most 200 characters, none that a terminal obeys."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])


class _Budget:
    def __init__(self) -> None:
        self.left = _BUDGET

    def spend(self) -> int:
        self.left -= 1
        return int(self.left < 0)


def _authorise(action: int, first: str | None, _second: str | None, _database: str | None, _trigger: str | None) -> int:
    if action in _ALLOWED or (action == sqlite3.SQLITE_PRAGMA and first == "table_xinfo"):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
