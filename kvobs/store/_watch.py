"""Whether somebody looks: a view touches one file of the stores' directory, and who is observed asks for its age.

What is too expensive to be told all the time (a snapshot of an allocator) is told only then. The file is empty, and
its age is the file system's own: no clocks of two processes are compared beyond what they share there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

WATCH = "kvobs.watch"
WATCHED_S = 10.0


def watched(directory: Path | None) -> bool:
    """Whether a view has looked within the last ``WATCHED_S``; one ``stat``, never raises."""
    if directory is None:
        return False
    try:
        found = os.stat(directory / WATCH, follow_symlinks=False)
    except OSError:
        return False
    return abs(time.time() - found.st_mtime) < WATCHED_S


def touch(path: Path) -> bool:
    """Say that somebody looks at the stores at ``path`` (a directory, or a store in it); False where it cannot be."""
    directory = path if path.is_dir() else path.parent
    try:
        descriptor = os.open(directory / WATCH, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True
