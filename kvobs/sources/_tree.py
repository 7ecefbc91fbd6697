"""Small text files of the kernel, below a root that tests replace."""

from __future__ import annotations

import os
from pathlib import Path

LIMIT_BYTES = 1 << 18


class Tree:
    """Reads files by their absolute paths; ``OSError`` passes through."""

    def __init__(self, root: Path) -> None:
        self._root = str(root).rstrip("/")

    def read(self, path: str) -> str:
        """The text of a file, cut at 256 KiB; read without Python's buffers, which cost twice the system calls."""
        descriptor = os.open(self._root + path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts, left = [], LIMIT_BYTES
            while left > 0 and (part := os.read(descriptor, left)):
                parts.append(part)
                left -= len(part)
        finally:
            os.close(descriptor)
        return b"".join(parts).decode("utf-8", "replace")

    def names(self, path: str) -> list[str]:
        """What a directory contains, sorted."""
        return sorted(os.listdir(self._root + path))


def unreadable(path: str, error: OSError) -> str:
    """The sentence for a file that is not there or cannot be read."""
    return f"{path} cannot be read ({(error.strerror or type(error).__name__).lower()})."


def misunderstood(path: str) -> str:
    """The sentence for a file whose text is not in a known form."""
    return f"The text of {path} is not understood."
