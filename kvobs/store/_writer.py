"""The writer of one process: batches on the drain thread, never an exception into the host.

What cannot be written is dropped and counted; what only has to wait (another process commits, a tool holds
the database) waits, bounded. The writer tries again by itself, at most once a second while it has no store.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import sqlite3
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from kvobs.catalog import Row as CatalogRow
from kvobs.metrics import Attributes, Value
from kvobs.model import Event
from kvobs.store import _fork, _space
from kvobs.store._batch import Batch, Piece, pages_for
from kvobs.store._file import StoreFile
from kvobs.store._keeper import Keeper
from kvobs.store._retention import Retention
from kvobs.store._rows import SECOND_NS, Row

_log = logging.getLogger("kvobs")
WAITING_RECORDS = 70_000  # more than the default queue holds
_COMMIT_WAIT_S, _CLOSE_WAIT_S = 0.1, 2.0
_WAITS = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def process_words(argv: Iterable[str]) -> list[str]:
    """The command line without the values in it: those may be prompts or keys, which are never recorded."""
    words = list(argv)[:64]
    return words[:1] + [word.partition("=")[0] if word.startswith("-") else "..." for word in words[1:]]


class StoreWriter:
    """This process's store in ``directory``, which all processes together keep below ``max_bytes``. What is older than
    ``retention_s`` seconds is deleted; 0 keeps it.

    The constructor touches no file: the store begins with the first commit. One thread at a time may call.
    """

    def __init__(self, directory: Path, max_bytes: int, process_id: str, endpoint: str | None = None, *,
                 retention_s: int = 0, clock: Callable[[], int] = time.monotonic_ns,
                 wall: Callable[[], int] = time.time_ns) -> None:
        self._directory = Path(directory)
        self._process = process_id
        self._endpoint = endpoint
        self._clock, self._wall = clock, wall
        self._anchor_ns, self._anchor_wall_ns = clock(), wall()
        self._batch = Batch(self.wall_ns, lambda: self.wall_ns(clock()), WAITING_RECORDS)
        self._waiting: deque[Piece] = deque()
        self._facts_written: dict[str, Row] = {}
        self._keeper = Keeper(self._directory, max_bytes, process_id)
        self._retention = Retention(retention_s)
        self._told = (0, 0)
        self._lock = _space.DirectoryLock(self._directory)
        self._heartbeat_ns = self._retry_ns = self._anchor_ns
        self._dropped = self._dropped_in_all = 0
        self._ended = self._failing = False

    def wall_ns(self, t_ns: int) -> int:
        """Unix nanoseconds of a moment on this process's monotonic clock."""
        return self._anchor_wall_ns + t_ns - self._anchor_ns

    # -- the drain thread ------------------------------------------------------------------------------

    def write(self, events: Iterable[Event]) -> None:
        """Take events for the next commit."""
        for event in events:
            self._batch.add(event)

    def write_points(self, families: Iterable[tuple[CatalogRow, dict[Attributes, Value]]]) -> None:
        """Take one sample of every metric, as of now, for the next commit."""
        self._batch.add_points(self.wall_ns(self._clock()), families)

    def commit(self, wait_s: float = _COMMIT_WAIT_S) -> None:
        """Write what was taken, waiting at most ``wait_s`` for one's turn. Never raises; see ``take_dropped``."""
        if self._ended:
            self._drop_all()
        elif self._batch.records or self._waiting or self._clock() >= self._heartbeat_ns:
            self._try(wait_s, ended=False)

    def take_dropped(self) -> int:
        """How many records (events and points) were lost since the last call."""
        dropped = self._dropped + self._batch.dropped
        self._dropped = self._batch.dropped = 0
        self._dropped_in_all += dropped
        return dropped

    def take_pruned(self) -> tuple[tuple[str, int], ...]:
        """How many whole stores and how many rows were deleted for their age since the last call, by what they are."""
        before, self._told = self._told, (self._retention.pruned.stores, self._retention.pruned.rows)
        return tuple((what, now - then) for what, now, then in zip(("stores", "rows"), self._told, before, strict=True)
                     if now > then)

    def size_bytes(self) -> int:
        """Bytes of this process's stores, logs included."""
        return self._keeper.size_bytes()

    def close(self) -> None:
        """Write what was taken and finish the store. Never raises; safe to call twice."""
        if self._ended:
            return
        self._retry_ns = self._anchor_ns
        self._try(_CLOSE_WAIT_S, ended=True)
        self._drop_all()
        self._ended = True
        if _fork.usable():
            with _fork.inside_sqlite():
                self._keeper.discard()

    def abandon(self) -> None:
        """In a forked child: forget everything; the store and what was taken are the parent's."""
        self._keeper.abandon()
        self._lock.abandon()
        self._batch.clear()
        self._waiting.clear()
        self._ended = True

    # -- inside ----------------------------------------------------------------------------------------

    def _try(self, wait_s: float, *, ended: bool) -> None:
        if self._clock() < self._retry_ns or not _fork.usable():
            self._drop_all()
            return
        try:
            with self._lock.held(wait_s), _fork.inside_sqlite():
                self._commit(ended)
        except _space.Busy:
            pass
        except Exception as error:
            self._lose(error)
        else:
            self._failing = False
        self._batch.room = WAITING_RECORDS - sum(piece.records for piece in self._waiting)

    def _commit(self, ended: bool) -> None:
        if self._keeper.begin():
            self._facts_written = {}
            self._heartbeat_ns = self._clock()
        self._waiting.extend(self._batch.pieces(self._keeper.piece_pages()))
        self._batch.clear()
        while self._waiting:
            refused = self._put(self._waiting[0])
            piece = self._waiting.popleft()
            self._dropped += piece.records if refused is None else refused
        self._prune()
        self._put_facts()
        if ended or self._clock() >= self._heartbeat_ns:
            self._put_process(ended)

    def _prune(self) -> None:
        file = self._keeper.file
        # A clock that was wrong at the start and was set since must not make what is young look old.
        self._retention.prune(self._keeper, min(self.wall_ns(self._clock()), self._wall()))
        self._note_successor(file)

    def _put(self, piece: Piece) -> int | None:
        file = self._keeper.file
        refused = self._keeper.write(piece)
        self._note_successor(file)
        return refused

    def _note_successor(self, file: StoreFile | None) -> None:
        if self._keeper.file is not file:
            self._facts_written = {}
            self._heartbeat_ns = self._clock()

    def _put_facts(self) -> None:
        changed = [row for subject, row in self._batch.facts.items() if self._facts_written.get(subject) != row]
        written = dict(self._batch.facts)
        if changed and self._put(Piece("availability", changed, 0, pages_for("availability", changed))) == 0:
            self._facts_written = written

    def _put_process(self, ended: bool) -> None:
        now = self.wall_ns(self._clock())
        row = (self._process, self._keeper.sequence, os.getpid(), socket.gethostname(), platform.python_version(),
               json.dumps(process_words(sys.argv)), self._anchor_wall_ns, self._anchor_ns, self._endpoint, now,
               now if ended else None, self._dropped_in_all + self._dropped + self._batch.dropped)
        if self._put(Piece("process", [row], 0, pages_for("process", [row]))) == 0:
            self._heartbeat_ns = self._clock() + SECOND_NS

    def _lose(self, error: Exception) -> None:
        """Count what waited as lost; keep the store only where it can go on (the disk was full)."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _WAITS:
            return
        self._drop_all()
        if not self._failing:
            self._failing = True
            _log.warning("kvobs: the store in %s cannot be written (%s); what is lost until it can is counted.",
                         self._directory, error)
        if code != sqlite3.SQLITE_FULL:
            with _fork.inside_sqlite():
                self._keeper.discard()
            self._retry_ns = self._clock() + SECOND_NS

    def _drop_all(self) -> None:
        self._dropped += self._batch.records + sum(piece.records for piece in self._waiting)
        self._batch.clear()
        self._waiting.clear()
