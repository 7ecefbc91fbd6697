"""Asking a child process for what is in a file, and believing nothing that it says without looking."""

from __future__ import annotations

import os
import selectors
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvobs.allocator.readers import _child, _limits, _wire
from kvobs.allocator.recording import Recording

MIB = _limits.MIB
_WALL_FACTOR, _WALL_SPARE = 3, 20  # seconds: a busy machine gives a process only part of a core
_PIECE = 1 << 20
_GOODBYE = 5.0  # seconds between a child's last word and its end
_LARGEST = {_child.PROGRESS: 8, _child.ERROR: 1 << 16, _child.RESULT: _limits.MAX_RESULT_BYTES}
_KEPT = ("LD_LIBRARY_PATH",)  # some interpreters do not start without it
_NONSENSE = "the process that read it gave an answer that makes no sense."
_START = "import sys; sys.path += {paths!r}; from kvobs.allocator.readers._child import main; main(sys.argv[1:])"


class Unreadable(Exception):
    """The file could not be read; the message is one sentence with its name, what is wrong and what is allowed."""


def read(path: Path, *, memory_bytes: int | None = None, cpu_seconds: int = _limits.CPU_SECONDS,
         progress: Callable[[float], None] | None = None) -> Recording:
    """Read a snapshot or a profiler's file, whatever it is, in a process that is held to limits.

    Args:
        path: the file; its kind is told by its content.
        memory_bytes: address space that reading may take; by default 256 MiB and 24 times the file's size, at most
            4 GiB.
        cpu_seconds: seconds of a core that reading may take.
        progress: called in this thread with 0.0 … 1.0; what it raises ends the reading.
    Raises:
        Unreadable: there is no such file, or it is none that kvobs reads, or reading it passed a limit.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Unreadable(f"{path} cannot be opened: {error.strerror}.") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable(f"{path} is no regular file, which kvobs needs.")
        if found.st_size > _limits.MAX_FILE_BYTES:
            raise Unreadable(f"{path} has {found.st_size // MIB:,} MiB, and {_limits.MAX_FILE_BYTES // MIB:,} MiB are "
                             "allowed.")
        memory = memory_bytes or _limits.memory_for(_unpacked_size(descriptor, found.st_size))
        return _ask(path, descriptor, memory, cpu_seconds, progress or (lambda done: None))
    finally:
        os.close(descriptor)


def _unpacked_size(descriptor: int, size: int) -> int:
    """The size of what is read: a .gz says it in its last four bytes (if it lies, only the limit is another)."""
    if size < 18 or os.pread(descriptor, 2, 0) != b"\x1f\x8b":
        return size
    return size + int.from_bytes(os.pread(descriptor, 4, size - 4), "little")


def _ask(path: Path, descriptor: int, memory: int, cpu: int, progress: Callable[[float], None]) -> Recording:
    if not sys.executable:
        raise Unreadable(f"{path} cannot be read: this Python does not know its own program, and kvobs reads files in "
                         "a process of their own.")
    places = (Path(__file__).resolve().parents[3], Path(msgspec.__file__).resolve().parents[1])
    paths = [str(place) for place in dict.fromkeys(places)]
    name = path.name.encode("utf-8", "replace").decode()
    # Isolated, without site: no sitecustomize or .pth of the environment runs there, so nothing observes it either.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", _START.format(paths=paths), str(memory), str(cpu), name],
        stdin=descriptor, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, close_fds=True, cwd="/",
        env={key: os.environ[key] for key in _KEPT if key in os.environ})
    try:
        assert process.stdout is not None
        answer = _answer(process.stdout.fileno(), time.monotonic() + _WALL_FACTOR * cpu + _WALL_SPARE, progress)
        if answer is None:
            raise _Failure(_why(process.wait(_GOODBYE), memory, cpu))
        return _wire.unpack(answer, str(path))
    except _Failure as failure:
        raise Unreadable(f"{path} cannot be read: {failure}") from None
    except (_wire.Damaged, subprocess.TimeoutExpired):
        raise Unreadable(f"{path} cannot be read: {_NONSENSE}") from None
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


class _Failure(Exception):
    """Why there is no recording: the rest of a sentence."""


def _answer(pipe: int, deadline: float, progress: Callable[[float], None]) -> bytes | None:
    """The recording, or None where the child ended without a word."""
    received = bytearray()
    with selectors.DefaultSelector() as waiting:
        waiting.register(pipe, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not waiting.select(left):
                raise _Failure("that takes longer than is allowed, even for a busy machine.")
            piece = os.read(pipe, _PIECE)
            if not piece:
                return None
            received += piece
            while len(received) >= _child.HEADER.size:
                kind, length = _child.HEADER.unpack_from(received)
                if kind not in _LARGEST or length > _LARGEST[kind]:
                    raise _Failure(_NONSENSE)
                end = _child.HEADER.size + length
                if len(received) < end:
                    break
                body = bytes(memoryview(received)[_child.HEADER.size:end])
                if kind == _child.RESULT:
                    return body
                if kind == _child.ERROR:
                    told = body.decode("utf-8", "replace")
                    raise _Failure(told[:1].lower() + told[1:])
                if length == 8:
                    progress(min(max(struct.unpack("<d", body)[0], 0.0), 1.0))
                del received[:end]


def _why(status: int, memory: int, cpu: int) -> str:
    """Why a child that said nothing ended."""
    if status == -signal.SIGXCPU:
        return f"that takes more than the {cpu:,} s of a core that are allowed."
    if status == -signal.SIGKILL:
        return "the process that read it was killed, perhaps because the machine's memory ran out."
    if status == _child.OUT_OF_MEMORY:
        return f"that takes more than the {memory // MIB:,} MiB of memory that are allowed."
    return (f"the process that read it ended without an answer (status {status}); the file is damaged, or no file that "
            "kvobs knows.")
