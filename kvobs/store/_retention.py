"""What is older than the retention goes: whole stores of processes that ended, and old rows of what is younger.

Everything runs under the directory's lock, on the clock that is handed in, and in bounded bites: what a pass leaves,
the next commit's does. Stores that another process writes are not touched; their own writers keep them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path

import msgspec

from kvobs.store import _schema, _space
from kvobs.store._file import FRAME_BYTES, StoreFile
from kvobs.store._keeper import DELETE_PAGES, Keeper
from kvobs.store._schema import TIMED, StoreError

_log = logging.getLogger("kvobs")
EVERY_NS = 60 * 10**9
ROWS = 4_096  # of a table, per pass
_VACUUM_PAGES, _VACUUMS = 16, 64  # of a finished store, per pass
_NEED = (DELETE_PAGES + 3 * _VACUUM_PAGES) * FRAME_BYTES  # of log, in a finished store


class Pruned(msgspec.Struct):
    """How much was deleted. ``bytes`` are those of whole stores."""

    stores: int = 0
    rows: int = 0
    bytes: int = 0


class Retention:
    """Keeps one process's directory within ``keep_s`` seconds; 0 keeps everything."""

    def __init__(self, keep_s: int) -> None:
        self._keep_ns = keep_s * 10**9
        self._next_ns: int | None = None
        self._expires: dict[Path, int] = {}  # when a finished store's oldest row expires
        self.pruned = Pruned()

    def prune(self, keeper: Keeper, now_ns: int) -> None:
        """One pass, at most once a minute unless the last one left something or the clock was set back since.

        Args:
            now_ns: Unix nanoseconds.
        Raises:
            sqlite3.Error, OSError: of the process's own store.
        """
        if not self._keep_ns:
            return
        if self._next_ns is not None and now_ns < self._next_ns:
            if now_ns >= self._next_ns - EVERY_NS:
                return
            self._expires.clear()
        self._next_ns = now_ns + EVERY_NS
        cut, before = now_ns - self._keep_ns, msgspec.structs.replace(self.pruned)
        for store in keeper.finished():
            if store.modified_ns <= cut:
                size = store.bytes
                with contextlib.suppress(OSError):  # another user's, in a sticky directory
                    keeper.delete(store)
                    self.pruned.stores += 1
                    self.pruned.bytes += size
        rows, more = keeper.expire(cut, ROWS)
        self.pruned.rows += rows
        more |= self._rows_of_finished(keeper, now_ns, cut)
        if more:
            self._next_ns = now_ns
        self._say(before)

    def _rows_of_finished(self, keeper: Keeper, now_ns: int, cut: int) -> bool:
        """Look at one finished store that has, or may have, old rows; True when another one waits."""
        there = {store.path: store for store in keeper.finished()}
        self._expires = {path: when for path, when in self._expires.items() if path in there}
        due = [store for path, store in there.items() if self._expires.get(path, now_ns) <= now_ns]
        if not due:
            return False
        store = due[0]
        if keeper.spare_bytes() < _NEED + store.wal_bytes + _space.shm_bytes(store.wal_bytes + _NEED):
            return False  # the bound is near, so it will soon be deleted whole
        try:
            rows, oldest = expire_finished(store.path, cut, store.modified_ns)
        except (sqlite3.OperationalError, OSError):  # in use, or another user's: perhaps not for long
            self._expires[store.path] = now_ns + EVERY_NS
            return len(due) > 1
        except (sqlite3.Error, StoreError):
            rows, oldest = 0, None  # damaged or newer: it goes whole when its time has come
        self.pruned.rows += rows
        self._expires[store.path] = (max(store.modified_ns + 2 * self._keep_ns, now_ns + EVERY_NS) if oldest is None
                                     else oldest + self._keep_ns)
        return len(due) > 1 or self._expires[store.path] <= now_ns

    def _say(self, before: Pruned) -> None:
        stores, rows = self.pruned.stores - before.stores, self.pruned.rows - before.rows
        if stores or rows:
            _log.info("kvobs: %d stores (%d bytes) and %d rows beyond the retention were deleted.", stores,
                      self.pruned.bytes - before.bytes, rows)


def expire_finished(path: Path, cut: int, modified_ns: int) -> tuple[int, int | None]:
    """Delete a bounded number of a finished store's rows up to ``cut``; returns how many, and the time of the oldest
    row that is left (None where there is none). Its time of writing stays ``modified_ns``.

    Raises:
        StoreError: it is no store of this version or an older one.
        sqlite3.Error, OSError: it cannot be used.
    """
    if path.is_symlink() or not path.is_file():  # a link's lock is elsewhere, and SQLite would make a missing file
        raise StoreError(f"{path} is not a file.")
    lock = _space.take_lock(_space.lock_path(path))
    if lock is None:
        raise OSError("the store is being written")
    try:
        file = StoreFile(path, lock)
    except BaseException:
        _space.lock_path(path).unlink(missing_ok=True)
        _space.release(lock)
        raise
    try:
        _schema.check(file.connection, path)
        there = {name for name, in file.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        tables = [table.name for table in TIMED if table.name in there]
        rows = 0
        for table in tables:
            if found := file.expire(table, cut, ROWS):
                rows += found
                file.checkpoint()
        _vacuum(file)
        times = [time for table in tables if (time := file.oldest_of(table)) is not None]
        return rows, min(times, default=None)
    finally:
        file.close()
        with contextlib.suppress(OSError):
            os.utime(path, ns=(modified_ns, modified_ns), follow_symlinks=False)


def _vacuum(file: StoreFile) -> None:
    for _ in range(_VACUUMS):
        if not file.free_bytes():
            return
        file.vacuum(_VACUUM_PAGES)
        if not file.checkpoint():
            return  # somebody reads it
