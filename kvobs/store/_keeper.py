"""The current store of a process and the room for it: open, make room, give back, begin a successor.

Order of sacrifice: finished stores, oldest first; then the oldest rows of the own store. A log that a stuck
reader keeps from being emptied ends the store and begins a successor, so the old one can be deleted whole.
Everything here runs under the directory's lock and may raise ``sqlite3.Error`` or ``OSError``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
from pathlib import Path

from kvobs.store import _file, _space
from kvobs.store._batch import Piece
from kvobs.store._file import FRAME_BYTES, NEW_STORE_BYTES, StoreFile
from kvobs.store._schema import PAGE_BYTES, TIMED

_PASSES = 64  # of giving back per commit: the rest waits for the next one
DELETE_PAGES = 20  # that deleting the oldest rows of one table dirties: those emptied are not written


class Keeper:
    """One process's place in the directory."""

    def __init__(self, directory: Path, max_bytes: int, process: str) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._process = process
        self.sequence = 0
        self._plan = _space.plan(max_bytes, process, [], None)
        self._stores: list[_space.Store] = []
        self._finished: list[_space.Store] = []
        self.file: StoreFile | None = None

    def begin(self) -> bool:
        """Take stock and have an open store; True when it is a new one, so that it lacks the process's facts.

        Raises:
            _space.Busy: the store's lock was taken for a moment.
            OSError: there is no room for a store, among other reasons.
        """
        if self.file is not None and not self.file.is_there():
            self.discard()  # somebody removed it: writing on would lose everything in silence
        if self.file is not None and self.file.full_of_names():
            self.discard()
        self._survey()
        if self.file is not None:
            return False
        self._open()
        return True

    def size_bytes(self) -> int:
        """Bytes of this process's stores that the last stock-taking found, as they are now, logs included."""
        paths = {store.path for store in self._stores if store.process == self._process}
        if self.file is not None:
            paths.add(self.file.path)
        return sum(map(_space.bytes_of, paths))

    def piece_pages(self) -> int:
        """The size of transactions that suits the bound, in pages."""
        return min(self._plan.log_hard // FRAME_BYTES // 2, 512)

    def write(self, piece: Piece) -> int | None:
        """Write a piece; returns how many of its rows were refused, None when there is no room for it."""
        while True:
            assert self.file is not None
            file = self.file
            if not self._room_for(piece.pages + file.naming_pages(piece)):
                return None
            if self.file is file:
                return file.write(piece)

    def rotate(self) -> None:
        """End the current store and begin its successor."""
        self.discard()
        self._survey()
        self._open()

    def discard(self) -> None:
        """Close the current store, however broken; the next one gets the next number. Never raises."""
        if self.file is not None:
            self.file.close()
            if not self.file.used:  # a disk that fails every second must not be littered every second
                with contextlib.suppress(OSError):
                    _space.delete(self.file.path)
            self.file = None

    def abandon(self) -> None:
        """In a forked child: forget the parent's store without SQLite or the lock noticing."""
        if self.file is not None:
            # Closing, even by the garbage collector at exit, would act on the parent's files: never let it happen.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.file.connection))
            with contextlib.suppress(OSError):
                os.close(self.file.lock)
            self.file = None

    def finished(self) -> list[_space.Store]:
        """The stores that nobody writes any more, oldest write first, as of the last stock-taking."""
        return list(self._finished)

    def delete(self, store: _space.Store) -> None:
        """Delete a finished store."""
        _space.delete(store.path)
        self._finished.remove(store)
        self._stores.remove(store)
        self._plan = _space.plan(self._max_bytes, self._process, self._stores,
                                 self.file.path if self.file is not None else None)

    def spare_bytes(self) -> int:
        """What all stores together may still grow by, at this instant."""
        assert self.file is not None
        log = self.file.log_bytes()
        return self._plan.room - self.file.database_bytes() - log - _space.shm_bytes(log)

    def expire(self, cut: int, rows: int) -> tuple[int, bool]:
        """Delete at most about ``rows`` rows of each table up to a time, and give back what that freed; returns how
        many were deleted, and whether more are there.
        """
        assert self.file is not None
        file, deleted, more = self.file, 0, False
        for table in TIMED:
            oldest = file.oldest_of(table.name)
            if oldest is None or oldest > cut:
                continue
            if not self._log_fits(DELETE_PAGES):
                return deleted, False  # where there is no room, the oldest rows go anyway
            if self.file is not file:
                return deleted, False  # a successor began meanwhile; the old store is a finished one
            deleted += file.expire(table.name, cut, rows)
            oldest = file.oldest_of(table.name)
            more |= oldest is not None and oldest <= cut
        if deleted:
            self._shrink(file.free_bytes())
        return deleted, more

    # -- inside ----------------------------------------------------------------------------------------

    def _survey(self) -> None:
        stores = _space.survey(self._directory)
        current = self.file.path if self.file is not None else None
        self._finished = [store for store in stores if not store.alive and store.path != current]
        while len(self._finished) > _space.MAX_FILES:
            _space.delete(self._finished.pop(0).path)
        self._stores = [store for store in stores if store.alive or store in self._finished]
        self._plan = _space.plan(self._max_bytes, self._process, self._stores, current)

    def _delete_finished(self) -> bool:
        if not self._finished:
            return False
        self.delete(self._finished[0])
        return True

    def _open(self) -> None:
        while self._plan.room < NEW_STORE_BYTES:
            if not self._delete_finished():
                raise OSError(f"the other stores leave no room below the bound of {self._max_bytes} bytes")
        self.sequence += 1
        while _space.store_path(self._directory, self._process, self.sequence).exists():
            self.sequence += 1
        self.file = _file.create(self._directory, self._process, self.sequence)
        if self.file is None:
            raise _space.Busy

    def _room_for(self, pages: int) -> bool:
        """Make room for a transaction that dirties ``pages`` pages; False when there is none to make."""
        need = pages * FRAME_BYTES
        self._empty_log(need)
        while not self._fits(need, self._plan.database) and self._delete_finished():
            pass
        if not self._fits(need, self._plan.database):
            self._give_back(need)
            assert self.file is not None
            return self._fits(need, max(self._plan.database, self.file.database_bytes()))
        return True

    def _fits(self, need: int, database_limit: int) -> bool:
        """Whether ``need`` bytes of log fit now, and their pages into the database after the next checkpoint."""
        assert self.file is not None
        log = self.file.log_bytes() + need
        grown = self.file.database_bytes() + max(0, need - self.file.free_bytes())
        return (log <= self._plan.log_hard and grown <= database_limit
                and grown + log + _space.shm_bytes(log) <= self._plan.room)

    def _empty_log(self, need: int) -> None:
        assert self.file is not None
        log = self.file.log_bytes()
        if log == 0 or log + need <= self._plan.log_soft:
            return
        if not self.file.checkpoint() and self.file.log_bytes() + need > self._plan.log_hard:
            self.rotate()

    def _give_back(self, need: int) -> None:
        """Delete oldest rows until ``need`` bytes fit into free pages, and shrink what exceeds the plan."""
        rows = min(max(self._max_bytes // PAGE_BYTES, 256), 8_192)
        for _ in range(_PASSES):
            assert self.file is not None
            file = self.file
            database = file.database_bytes()
            surplus = max(0, database - self._plan.database)
            # A little more than needed, so that not every commit has to delete.
            if file.free_bytes() < surplus + max(need, database // 64):
                if not self._delete_oldest(rows) and file.free_bytes() == 0:
                    return
            elif surplus == 0:
                return
            if surplus and file is self.file and file.free_bytes():
                self._shrink(surplus)

    def _delete_oldest(self, rows: int) -> bool:
        assert self.file is not None
        file, cut = self.file, self.file.oldest(rows)
        if cut is None:
            return False
        for table in TIMED:
            if not self._log_fits(DELETE_PAGES):
                return False
            if self.file is not file:
                return True  # a successor began meanwhile, and it is empty
            file.delete(table.name, cut)
        return True

    def _shrink(self, surplus: int) -> None:
        assert self.file is not None
        pages = min(max((self._plan.log_hard // FRAME_BYTES - 8) // 4, 1), -(-surplus // PAGE_BYTES))
        file = self.file
        if self._log_fits(8 + 3 * pages) and self.file is file:
            file.vacuum(pages)
            with contextlib.suppress(sqlite3.OperationalError):
                file.checkpoint()

    def _log_fits(self, pages: int) -> bool:
        """Whether a transaction that only gives back has room in the log."""
        need = pages * FRAME_BYTES
        self._empty_log(need)
        assert self.file is not None
        total = self.file.database_bytes() + self.file.log_bytes() + need
        return total + _space.shm_bytes(self.file.log_bytes() + need) <= self._plan.room
