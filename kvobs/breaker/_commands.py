"""Commands of an operator to the breaker of another process: small files beside its store.

Whoever may write the directory may command; it is made for its owner alone. A process takes its commands about once a
second, in the order in which they were given, and deletes them.
"""

from __future__ import annotations

import json
import os
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
    path = folder / f"{process}-{time.time_ns():020d}-{os.getpid()}"
    raw = path.with_suffix(".new")
    raw.write_text(json.dumps(msgspec.structs.asdict(command)), encoding="ascii")
    raw.rename(path)


def take(store: Path, process: str) -> list[Command]:
    """The commands that wait for a process, which are deleted; what is none is deleted too."""
    found: list[Command] = []
    for path in _waiting(store / FOLDER, process):
        try:
            if path.stat().st_size <= MOST_BYTES:
                found.append(msgspec.convert(json.loads(path.read_text(encoding="ascii")), Command))
        except (OSError, ValueError, msgspec.ValidationError):
            pass
        path.unlink(missing_ok=True)
    return found


def _waiting(folder: Path, process: str) -> list[Path]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(process + "-") and "." not in name)
    except OSError:
        return []
    return [folder / name for name in names[:MOST_WAITING]]
