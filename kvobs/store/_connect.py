"""Opening a store to read: read-only, for one statement at a time, in any process.

No connection outlives a page of rows, so no reader of kvobs ever starves the writer's checkpoint or keeps a
deleted store on the disk.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvobs.store import _schema
from kvobs.store._schema import StoreError

_WAIT_S = 2.0  # for a writer that is just opening or closing the store


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A checked read-only connection.

    Raises:
        StoreError: the file is missing, not a store, damaged or newer; or a statement failed.
    """
    if not path.is_file():
        raise StoreError(f"There is no store at {path}; name a kvobs store or a directory of stores.")
    connection = _connect(path)
    try:
        _schema.check(connection, path)
        yield connection
    except sqlite3.Error as error:
        raise StoreError(f"The store {path} cannot be read: {error}.") from None
    finally:
        connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro"
    log = path.with_name(path.name + "-wal")
    try:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_WAIT_S)
        try:
            connection.execute("PRAGMA schema_version").fetchone()
            return connection
        except BaseException:
            connection.close()
            raise
    except sqlite3.OperationalError as error:
        # Where the directory cannot be written, a finished store is read as it lies; a live one has its log.
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or log.exists():
            raise StoreError(f"The store {path} cannot be opened: {error}.") from None
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} cannot be read as a kvobs store: {error}.") from None
    try:
        return sqlite3.connect(uri + "&immutable=1", uri=True, isolation_level=None)
    except sqlite3.Error as error:
        raise StoreError(f"The store {path} cannot be opened: {error}.") from None


def fetch(path: Path, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
    """All rows of one statement.

    Raises:
        StoreError: as ``reading``.
    """
    with reading(path) as connection:
        return connection.execute(sql, parameters).fetchall()
