"""The decision board: how a breaker in the engine's process tells gates in other processes what it decided.

One small file per breaker, ``<process>.board`` in a directory of the run. The breaker is its only writer, and holds an
flock on it: the kernel gives it back however the process ends, so that what a killed breaker left is known as such at
once. Readers do not compare clocks with the writer: a record says how long it holds, and that time begins, on the
reader's own monotonic clock, when the reader first sees it. A stopped breaker publishes nothing new, and its last
record ends after that time.

A record is written by one ``pwrite`` and read by one ``pread``; its sequence number stands at both ends and a CRC-32 at
the last, so that a torn one is seen. The file is not mapped: one that is cut short under a mapping ends the process
that reads it (SIGBUS), and the order of plain stores to a mapping is the processor's affair.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvobs.breaker._gate import ACT, Decision, limiting

SUFFIX = ".board"
BYTES = 1_024
MAX_AGE_S = 5.0
MAX_BOARDS = 64  # of a directory: a reader looks at each of them
_MAGIC, _FORMAT = b"kvobsbrd", 1
_HEAD = struct.Struct("<8sIIQ")  # magic, format, bytes of the payload, sequence number
_TAIL = struct.Struct("<QI")  # sequence number, CRC-32 of everything before it
_ROOM = BYTES - _HEAD.size - _TAIL.size
_REASON, _HOST = 384, 128  # bytes at most
_TRIES = 3  # reads of a record that is being written
_CREATIONS = 100
_SCAN_NS = 1_000_000_000
_SECOND = 1_000_000_000
_log = logging.getLogger("kvobs")


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a board says: whose it is (host, process group), for how long it holds (ns), and the decision.

    The decision's ``expires_ns`` is of no clock that a reader has, and is 0 here.
    """

    host: str
    group: int
    lifetime_ns: int
    decision: Decision


def board_directory(store: Path) -> Path:
    """Where the boards of processes lie that keep their stores in ``store``."""
    return store / "boards"


def encode(record: Record, sequence: int) -> bytes:
    """The bytes of a board; what is too long of host and reason is left out."""
    decision = record.decision
    short = msgspec.structs.replace(
        record, host=_cut(record.host, _HOST),
        decision=msgspec.structs.replace(decision, expires_ns=0, reason=_cut(decision.reason, _REASON)))
    payload = msgspec.msgpack.encode(short)
    whole = _HEAD.pack(_MAGIC, _FORMAT, len(payload), sequence) + payload.ljust(_ROOM, b"\0")
    return whole + _TAIL.pack(sequence, zlib.crc32(whole + sequence.to_bytes(8, "little")))


def decode(data: bytes) -> tuple[int, Record] | None:
    """Sequence number and record; None for anything that is not a whole board of this format."""
    if len(data) != BYTES:
        return None
    magic, version, length, sequence = _HEAD.unpack_from(data)
    again, checksum = _TAIL.unpack_from(data, BYTES - _TAIL.size)
    if magic != _MAGIC or version != _FORMAT or length > _ROOM or again != sequence:
        return None
    if zlib.crc32(data[:-4]) != checksum:
        return None
    try:
        return sequence, msgspec.msgpack.decode(data[_HEAD.size:_HEAD.size + length], type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _cut(text: str, most: int) -> str:
    return text.encode("utf-8", "backslashreplace")[:most].decode("utf-8", "ignore")


class BoardWriter:
    """This process's board. One thread at a time may call.

    Raises:
        OSError: the directory or the file cannot be made; ``publish`` raises it too where writing fails.
    """

    def __init__(self, directory: Path, process: str, clock: Callable[[], int] = time.monotonic_ns) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(directory)
        self.path = directory / f"{process}{SUFFIX}"
        self._descriptor: int | None = _create(self.path)
        self._clock = clock
        self._sequence = 0
        self._host, self._group = socket.gethostname(), os.getpgid(0)

    def publish(self, decision: Decision) -> None:
        """Have readers see this decision; it holds as long as it has yet to go, from when they first see it."""
        if self._descriptor is None:
            return
        if not os.fstat(self._descriptor).st_nlink:  # it was removed: who comes to read would not find it
            self._renew()
        self._sequence += 1
        lifetime = max(0, decision.expires_ns - self._clock())
        data = encode(Record(self._host, self._group, lifetime, decision), self._sequence)
        if os.pwrite(self._descriptor, data, 0) != BYTES:
            raise OSError(f"The decision board {self.path} could not be written whole.")

    def _renew(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = _create(self.path)
        self._let_go()
        self._descriptor = descriptor

    def close(self) -> None:
        """Remove the board; gates open when they next look."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self._let_go()

    def _let_go(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked child may have a copy of the descriptor
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: the board is the parent's."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _create(path: Path) -> int:
    """A new file that this process has locked; who reads or sweeps may have the lock for some microseconds."""
    for _ in range(_CREATIONS):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                os.fchmod(descriptor, 0o600)
                os.truncate(descriptor, 0)
                return descriptor
            os.close(descriptor)  # swept before it was locked
        except BlockingIOError:
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    raise OSError(f"The decision board {path} is another process's.")


def _sweep(directory: Path) -> None:
    """Remove the boards of processes that are gone."""
    for path in directory.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


class _Board:
    """One file that a reader has open, and what it last said."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.sequence: int | None = None
        self.host, self.group = "", 0
        self.decision: Decision | None = None
        self.silent = False  # it limited somebody, says nothing any more, and that was said

    def look(self, now_ns: int, most_ns: int) -> None:
        """Take what it says now. The time that a record holds begins when it is first seen."""
        for _ in range(_TRIES):
            found = decode(os.pread(self.descriptor, BYTES + 1, 0))
            if found is not None:
                break
        else:
            self.sequence, self.decision = None, None
            return
        sequence, record = found
        if sequence != self.sequence:
            self.sequence, self.host, self.group = sequence, record.host, record.group
            self.decision = msgspec.structs.replace(
                record.decision, expires_ns=now_ns + min(max(0, record.lifetime_ns), most_ns))

    def alive(self) -> bool:
        """Whether its writer still holds its lock."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return False


class BoardReader:
    """Reads the boards of a directory. One thread at a time may call; nothing raises, nothing blocks.

    Args:
        directory: where the boards lie; it need not exist yet.
        group: a process group, whose boards alone count (of this host); None for all of the directory.
        max_age_s: how long a record holds at most that is not followed by another.
        clock: monotonic nanoseconds of this process.
    """

    def __init__(self, directory: Path, *, group: int | None = None, max_age_s: float = MAX_AGE_S,
                 clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._directory, self._group, self._clock = directory, group, clock
        self._most_ns = round(max_age_s * _SECOND)
        self._host = socket.gethostname()
        self._boards: dict[str, _Board] = {}
        self._scanned_ns: int | None = None

    def decision(self) -> Decision | None:
        """The decision in force; None where there is none: no board, or none that is whole, fresh and of a live writer.

        Of several engines' boards the one that asks for most counts (acting before observing, then the higher level),
        of equals the one seen last: which engine will serve a request is not known here.
        """
        now = self._clock()
        if self._scanned_ns is None or now - self._scanned_ns >= _SCAN_NS:
            self._scanned_ns = now
            self._scan()
        found: list[Decision] = []
        for name, board in list(self._boards.items()):
            try:
                if not board.alive():
                    self._forget(name)
                    continue
                board.look(now, self._most_ns)
            except OSError:
                self._forget(name)
                continue
            decision = board.decision
            ours = self._group is None or (board.host == self._host and board.group == self._group)
            if decision is not None and ours and now < decision.expires_ns:
                found.append(decision)
                board.silent = False
            elif decision is not None and ours and not board.silent and limiting(decision):
                board.silent = True
                _log.warning("kvobs: requests pass, since the breaker %s lives and has not renewed its decision.",
                             name.removesuffix(SUFFIX))
        return max(found, key=lambda one: (one.mode == ACT, one.level, one.expires_ns), default=None)

    def close(self) -> None:
        """Let go of all files."""
        for name in list(self._boards):
            self._forget(name)
        self._scanned_ns = None

    def _scan(self) -> None:
        try:
            with os.scandir(self._directory) as entries:
                names = [entry.name for entry in entries if entry.name.endswith(SUFFIX)]
        except OSError:
            return
        for name in names:
            if name not in self._boards and len(self._boards) < MAX_BOARDS:
                with contextlib.suppress(OSError):
                    self._open(name)

    def _open(self, name: str) -> None:
        descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            self._boards[name] = _Board(descriptor)
        else:
            os.close(descriptor)

    def _forget(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.close(self._boards.pop(name).descriptor)
