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

import kvobs
from kvobs.allocator.readers import _child, _limits, _wire
from kvobs.allocator.recording import Recording

MIB = _limits.MIB
_WALL_FACTOR, _WALL_SPARE = 3, 20  # seconds: a busy machine gives a process only part of a core
_PIECE = 1 << 20
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
    paths = list(dict.fromkeys(str(Path(module.__file__ or "").resolve().parent.parent) for module in (kvobs, msgspec)))
    # Isolated, without site: no sitecustomize or .pth of the environment runs there, so nothing observes it either.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", _START.format(paths=paths), str(memory), str(cpu), str(path)],
        stdin=descriptor, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, close_fds=True, cwd="/", env={})
    try:
        assert process.stdout is not None
        answer = _answer(process.stdout.fileno(), time.monotonic() + _WALL_FACTOR * cpu + _WALL_SPARE, progress)
    finally:
        process.kill()
        status = process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if isinstance(answer, bytes):
        try:
            return _wire.unpack(answer, str(path))
        except _wire.Damaged:
            answer = None
    raise Unreadable(_why(path, answer, status, memory, cpu))


def _answer(pipe: int, deadline: float, progress: Callable[[float], None]) -> bytes | str | None:
    """The recording, or why there is none, or None where the child ended without a word."""
    received = bytearray()
    with selectors.DefaultSelector() as waiting:
        waiting.register(pipe, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not waiting.select(left):
                return "time"
            piece = os.read(pipe, _PIECE)
            if not piece:
                return None
            received += piece
            while len(received) >= _child.HEADER.size:
                kind, length = _child.HEADER.unpack_from(received)
                if kind not in (_child.PROGRESS, _child.RESULT, _child.ERROR) or length > _limits.MAX_RESULT_BYTES or (
                        kind != _child.RESULT and length > _PIECE):
                    return None
                end = _child.HEADER.size + length
                if len(received) < end:
                    break
                body = bytes(memoryview(received)[_child.HEADER.size:end])
                if kind == _child.RESULT:
                    return body
                if kind == _child.ERROR:
                    return body.decode("utf-8", "replace")
                if length == 8:
                    progress(min(max(struct.unpack("<d", body)[0], 0.0), 1.0))
                del received[:end]


def _why(path: Path, answer: bytes | str | None, status: int, memory: int, cpu: int) -> str:
    if answer == "memory":
        return f"{path} cannot be read: that takes more than the {memory // MIB:,} MiB of memory that are allowed."
    if answer == "time":
        allowed = _WALL_FACTOR * cpu + _WALL_SPARE
        return f"{path} cannot be read: that takes more than the {allowed:,} s that are allowed."
    if isinstance(answer, str):
        return f"{path} cannot be read: {answer[:1].lower()}{answer[1:]}"
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"{path} cannot be read: that takes more than the {cpu:,} s of a core that are allowed."
    return (f"{path} cannot be read: the process that read it ended without an answer (status {status}); the file is "
            "damaged, or no file that kvobs knows.")
