"""One open store: transactions in, oldest rows out, pages and log back to the file system.

Single writer, always under the directory's lock; every method may raise ``sqlite3.Error`` or ``OSError``.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from kvobs.store import _schema, _space
from kvobs.store._batch import Piece
from kvobs.store._rows import Row
from kvobs.store._schema import PAGE_BYTES, TABLES, TIMED

FRAME_BYTES = PAGE_BYTES + 24  # a page in the write-ahead log
NEW_STORE_BYTES = 40 * PAGE_BYTES + _space.shm_bytes(0)  # an empty store, with a margin; a test compares
MAX_SERIES = 20_000  # after that many names a successor begins
_INSERTS = {name: _schema.insert_sql(table) for name, table in TABLES.items()}
_SERIES_BYTES = 64  # of a name's row and index entry, beyond its text
Name = tuple[str, str, str | None]


class StoreFile:
    """A store that this process writes."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock
        self.connection = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
        self._wal_path = path.with_name(path.name + "-wal")
        self._identity = os.stat(path)
        self._series: dict[Name, int] = {}
        self.used = False
        try:
            # The log must not be checkpointed at moments of SQLite's choice, nor dirty pages be written twice.
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 0",
                           "cache_size = -256", "cache_spill = OFF", "temp_store = MEMORY",
                           "secure_delete = OFF"):
                self.connection.execute(f"PRAGMA {pragma}").fetchall()
        except BaseException:
            self.connection.close()
            raise

    # -- size ------------------------------------------------------------------------------------------

    def is_there(self) -> bool:
        """Whether the path still leads to this very file."""
        try:
            return os.path.samestat(self._identity, os.stat(self.path))
        except OSError:
            return False

    def log_bytes(self) -> int:
        """The size of the write-ahead log."""
        try:
            return os.stat(self._wal_path).st_size
        except FileNotFoundError:
            return 0

    def database_bytes(self) -> int:
        """The size of the database once the log is copied back."""
        return max(self._number("PRAGMA page_count") * PAGE_BYTES, os.stat(self.path).st_size)

    def free_bytes(self) -> int:
        """Pages inside the database that hold nothing and will be used first."""
        return self._number("PRAGMA freelist_count") * PAGE_BYTES

    def full_of_names(self) -> bool:
        """Whether metrics were named too often for one file."""
        return len(self._series) > MAX_SERIES

    def _number(self, sql: str) -> int:
        value: int = self.connection.execute(sql).fetchone()[0]
        return value

    # -- writing ---------------------------------------------------------------------------------------

    def naming_pages(self, piece: Piece) -> int:
        """Pages that naming the new series of a piece of points will dirty."""
        new = {row[1] for row in piece.rows} - self._series.keys() if piece.table == "points" else set()
        size = sum(len(name[0]) + len(name[1]) + len(name[2] or "") + _SERIES_BYTES for name in new)
        return 8 + -(-5 * size // PAGE_BYTES) if new else 0

    def write(self, piece: Piece) -> int:
        """Insert a piece in one transaction; returns how many of its rows SQLite cannot hold and were left out."""
        with self._transaction():
            rows = self._numbered(piece.rows) if piece.table == "points" else piece.rows
            try:
                self.connection.execute("SAVEPOINT piece")
                self.connection.executemany(_INSERTS[piece.table], rows)
                return 0
            except (OverflowError, UnicodeError, sqlite3.ProgrammingError, sqlite3.InterfaceError):
                self.connection.execute("ROLLBACK TO piece")
                return self._one_by_one(piece.table, rows)

    def _one_by_one(self, table: str, rows: list[Row]) -> int:
        refused = 0
        for row in rows:
            try:
                self.connection.execute(_INSERTS[table], [_storable(value) for value in row])
            except (OverflowError, sqlite3.ProgrammingError, sqlite3.InterfaceError):
                refused += 1
        return refused

    def _numbered(self, rows: list[Row]) -> list[Row]:
        return [(row[0], self._series_number(row[1]), *row[2:]) for row in rows]

    def _series_number(self, name: Name) -> int:
        number = self._series.get(name)
        if number is None:
            cursor = self.connection.execute("INSERT INTO series (metric, attributes, bounds) VALUES (?, ?, ?)",
                                             [_storable(value) for value in name])
            number = self._series[name] = cursor.lastrowid or 0
        return number

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        named = len(self._series)
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
            self.used = True
        except BaseException:
            for name in list(self._series)[named:]:
                del self._series[name]
            with contextlib.suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")
            raise

    # -- giving back -----------------------------------------------------------------------------------

    def oldest(self, rows: int) -> int | None:
        """A time up to which no table holds many more than ``rows`` rows; None when all are empty."""
        return min((found for table in TIMED if (found := self._cut(table.name, rows)) is not None), default=None)

    def delete(self, table: str, until_wall_ns: int) -> None:
        """Delete a table's rows up to a time."""
        with self._transaction():
            self.connection.execute(f"DELETE FROM {table} WHERE wall_ns <= ?", (until_wall_ns,))

    def oldest_of(self, table: str) -> int | None:
        """The time of a table's oldest row; None when it is empty."""
        found: int | None = self.connection.execute(f"SELECT min(wall_ns) FROM {table}").fetchone()[0]
        return found

    def expire(self, table: str, cut: int, rows: int) -> int:
        """Delete a table's rows up to a time, the oldest first and about ``rows`` at most (all of one instant go
        together); returns how many.
        """
        found = self.connection.execute(f"SELECT wall_ns FROM {table} WHERE wall_ns <= ? ORDER BY wall_ns LIMIT 1 "
                                        "OFFSET ?", (cut, rows - 1)).fetchone()
        with self._transaction():
            return self.connection.execute(f"DELETE FROM {table} WHERE wall_ns <= ?",
                                           (cut if found is None else found[0],)).rowcount

    def _cut(self, table: str, rows: int) -> int | None:
        """The time of the row number ``rows`` from the oldest, or of the middle one of fewer."""
        there = self._number(f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT {2 * rows})")
        if there == 0:
            return None
        return self._number(f"SELECT wall_ns FROM {table} ORDER BY wall_ns LIMIT 1 OFFSET {(there - 1) // 2}")

    def vacuum(self, pages: int) -> None:
        """Move at most ``pages`` free pages to the end of the file and cut them off."""
        # A step per page, of which execute() takes but one: the statement has no columns.
        self.connection.executescript(f"PRAGMA incremental_vacuum({pages})")

    def checkpoint(self) -> bool:
        """Copy the log into the database and empty it; False while a reader needs the log."""
        return self._number("PRAGMA wal_checkpoint(TRUNCATE)") == 0  # the first column says whether it was busy

    # -- ending ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close and let others know that the store is finished. Never raises."""
        with contextlib.suppress(sqlite3.Error):
            self.connection.close()
        with contextlib.suppress(OSError):
            _space.lock_path(self.path).unlink(missing_ok=True)
        _space.release(self.lock)


def _storable(value: object) -> object:
    """The value, or the text that stands for one that is not valid Unicode."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def create(directory: Path, process: str, sequence: int) -> StoreFile | None:
    """Make and open a store; None when its lock is taken for a moment (somebody asks whether it is alive)."""
    path = _space.store_path(directory, process, sequence)
    lock = _space.take_lock(_space.lock_path(path))
    if lock is None:
        return None
    try:
        _schema.create(path)
        return StoreFile(path, lock)
    except BaseException:
        with contextlib.suppress(OSError):
            _space.delete(path)
        _space.release(lock)
        raise
