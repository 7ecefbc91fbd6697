"""Commands of an operator to the breaker of another process: small files beside its store.

Whoever may write the directory may command; it is made for its owner alone. A process takes its commands about once a
second, in the order in which they were given, and deletes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path

import msgspec

FOLDER = "breaker-commands"
MOST_WAITING, MOST_BYTES = 16, 1_024


class Command(msgspec.Struct, frozen=True):
    """``hold`` a ``level`` (None: let the machine have its way again), or ``reset``."""

    what: str
    level: int | None = None


def send(store: Path, process: str, command: Command) -> None:
    """Leave a command for a process.

    Raises:
        OSError: the directory cannot be written.
        ValueError: commands wait already that the process has not taken; a whole sentence.
    """
    folder = store / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    if len(_waiting(folder, process)) >= MOST_WAITING:
        raise ValueError(f"The process {process} has not taken the last {MOST_WAITING} commands.")
    # Monotonic, which all processes of a machine share: a wall clock that is set back would turn their order around.
    path = folder / f"{process}-{time.monotonic_ns():020d}-{os.getpid()}"
    raw = path.with_suffix(".new")
    raw.write_text(json.dumps(msgspec.structs.asdict(command)), encoding="ascii")
    raw.rename(path)


def take(store: Path, process: str) -> list[Command]:
    """The commands that wait for a process, which are deleted; what is none is deleted too. Never raises.

    One that cannot be deleted is not obeyed: it would be again each second.
    """
    found: list[Command] = []
    for path in _waiting(store / FOLDER, process):
        command = _read(path)
        with contextlib.suppress(OSError):
            path.unlink()
            found += [command] if command is not None else []
    return found


def _read(path: Path) -> Command | None:
    """What a file commands; None where it is none. A pipe is not waited for, and a link is not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            data = os.read(descriptor, MOST_BYTES + 1) if regular else b""
        finally:
            os.close(descriptor)
        return msgspec.json.decode(data, type=Command) if len(data) <= MOST_BYTES else None
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):  # of old msgspec it is no ValueError
        return None


def _waiting(folder: Path, process: str) -> list[Path]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(process + "-") and "." not in name)
    except OSError:
        return []
    return [folder / name for name in names[:MOST_WAITING]]
