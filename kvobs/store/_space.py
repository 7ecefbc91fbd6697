"""The directory that processes share: who is alive, how big everything is, and what may be deleted.

A store is alive while its writer holds an flock on the ``.lock`` file beside it: the kernel releases it when
the process ends, however it ends. Everything that creates, grows or deletes a store does so under the flock
of the directory, so that the bound holds for all of them together. The database files themselves are never
opened here: closing such a descriptor would drop SQLite's own locks in this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvobs.store._schema import SUFFIX

DIRECTORY_LOCK = "kvobs.lock"
MAX_FILES = 256  # stores of a directory: many short processes must not make every listing slow
_NAME = re.compile(rf"(kvobs-(.+)-(\d{{6}}){re.escape(SUFFIX)})(|-wal|-shm|-journal|\.lock|\.new|\.new-journal)")
_SHM_BYTES = 32_768  # the index of a write-ahead log grows by this for every 4,096 pages of it
_SHM_COVERS = 4_062 * 4_120
_PAUSE_S = 0.005


class Busy(Exception):
    """Another process holds the directory's lock; what was to be written can wait."""


class Store(msgspec.Struct):
    """One store of the directory with the files that belong to it (sizes in bytes)."""

    path: Path
    process: str
    sequence: int
    db_bytes: int = 0
    wal_bytes: int = 0
    other_bytes: int = 0
    modified_ns: int = 0
    alive: bool = False

    @property
    def bytes(self) -> int:
        """What its files take now."""
        return self.db_bytes + self.wal_bytes + self.other_bytes

    @property
    def potential_bytes(self) -> int:
        """What its files can take without another write: a checkpoint copies the log before it can truncate it."""
        copied = self.wal_bytes if self.alive else 0
        return self.db_bytes + self.wal_bytes + copied + max(self.other_bytes, shm_bytes(self.wal_bytes))


def shm_bytes(wal_bytes: int) -> int:
    """The size of the shared-memory index of a log; any reader may make it."""
    return _SHM_BYTES * (1 + wal_bytes // _SHM_COVERS)


def store_path(directory: Path, process: str, sequence: int) -> Path:
    """Where a process keeps its store number ``sequence``."""
    return directory / f"kvobs-{process}-{sequence:06d}{SUFFIX}"


def lock_path(store: Path) -> Path:
    """The file whose flock says that the store is being written."""
    return store.with_name(store.name + ".lock")


def bytes_of(store: Path) -> int:
    """Bytes of a store, its log, the log's index and its lock file included; those that are not there have none."""
    found = 0
    for suffix in ("", "-wal", "-shm", ".lock"):
        with contextlib.suppress(OSError):
            found += os.stat(f"{store}{suffix}", follow_symlinks=False).st_size
    return found


def survey(directory: Path) -> list[Store]:
    """Every store of the directory, oldest write first; whether each is alive is asked of its lock.

    Raises:
        OSError: the directory cannot be listed.
    """
    found: dict[str, Store] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            store = found.setdefault(match[1], Store(directory / match[1], match[2], int(match[3])))
            if match[4] == "":
                store.db_bytes = status.st_size
            elif match[4] == "-wal":
                store.wal_bytes = status.st_size
            else:
                store.other_bytes += status.st_size
            if match[4] != "-shm" and (match[4] != "-wal" or status.st_size):  # a reader touches these too
                store.modified_ns = max(store.modified_ns, status.st_mtime_ns)
    for store in found.values():
        store.alive = is_alive(store.path)
    return sorted(found.values(), key=lambda store: (store.modified_ns, store.sequence))


def is_alive(store: Path) -> bool:
    """Whether some process holds the store's lock. One that cannot be asked (another user's) counts as held."""
    try:
        descriptor = os.open(lock_path(store), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def delete(store: Path) -> None:
    """Remove a finished store; readers that have it open keep what they see.

    Raises:
        OSError: a file is there and cannot be removed.
    """
    for ending in ("", "-wal", "-shm", "-journal", ".new", ".new-journal", ".lock"):
        store.with_name(store.name + ending).unlink(missing_ok=True)


def take_lock(path: Path) -> int | None:
    """A descriptor that holds the exclusive flock of ``path`` (made if missing); None when another has it.

    Raises:
        OSError: the file cannot be made, or the file system knows no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def release(descriptor: int) -> None:
    """Give a lock back at once, even where a forked child still has the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(descriptor)


class DirectoryLock:
    """The flock of the directory, held for one commit at a time."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / DIRECTORY_LOCK
        self._descriptor: int | None = None

    @contextlib.contextmanager
    def held(self, wait_s: float) -> Iterator[None]:
        """Hold the lock, waiting at most ``wait_s`` for it; makes the directory if it is missing.

        Raises:
            Busy: another process kept it.
            OSError: the directory is not usable.
        """
        deadline = time.monotonic() + wait_s
        while (descriptor := self._take()) is None:
            if time.monotonic() >= deadline:
                raise Busy
            time.sleep(_PAUSE_S)
        self._descriptor = descriptor
        try:
            yield
        finally:
            self._descriptor = None
            release(descriptor)

    def _take(self) -> int | None:
        try:
            descriptor = take_lock(self._path)
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return None
        if descriptor is None:
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                return descriptor
        release(descriptor)  # the directory was removed meanwhile: that file locks nothing any more
        return None

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptor without giving the parent's lock back."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


class Plan(msgspec.Struct, frozen=True):
    """How much this process may hold (bytes): ``room`` at any instant, ``database`` in the long run.

    A log beyond ``log_soft`` is emptied into the database; beyond ``log_hard`` a successor begins. What the
    database leaves free is for the log and for the beginning of a successor.
    """

    room: int
    database: int
    log_soft: int
    log_hard: int


def plan(max_bytes: int, own_process: str, stores: list[Store], current: Path | None) -> Plan:
    """Share the bound: everybody may use what is free, but a process beyond its equal share leaves an eighth.

    Args:
        max_bytes: the bound on the whole directory.
        own_process: this process's id.
        stores: the survey, taken under the directory's lock.
        current: this process's open store, whose own size is the caller's.
    """
    room = max_bytes - sum(store.potential_bytes for store in stores if store.path != current)
    writers = {store.process for store in stores if store.alive} | {own_process}
    share = max_bytes // len(writers)
    fair = room if len(writers) == 1 else min(room, max(share, room - max_bytes // 8))
    log_hard = min(max(share // 5, 163_840), 16 * 1024**2)
    return Plan(room, fair - log_hard * 3 // 2, log_hard * 3 // 4, log_hard)
