"""Which options make a Python interpreter ignore what ``kvobs run`` puts into its environment."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence

# -E ignores PYTHONPATH, -I implies it, -S skips sitecustomize.
_UNSEEN = "IES"
_WITH_VALUE = "WX"
_ENDS_OPTIONS = "cm"
_PYTHON = re.compile(r"(python|pypy)[\d.]*[a-z]?$")


def unseen_flags(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The options of ``command``, or of its script's ``#!`` line, under which it cannot be observed."""
    if _is_python(command[0]):
        return _flags(command[1:])
    shebang = _shebang(command[0], environ)
    return _flags(shebang[1:]) if shebang and _is_python(shebang[0]) else []


def _is_python(path: str) -> bool:
    return _PYTHON.match(os.path.basename(path)) is not None


def _flags(arguments: Sequence[str]) -> list[str]:
    found: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if len(word) < 2 or not word.startswith("-") or word == "--":
            break
        if word.startswith("--"):  # --version and the like; only --check-hash-based-pycs takes a value
            if word == "--check-hash-based-pycs":
                next(rest, None)
            continue
        for position, letter in enumerate(word[1:], start=2):
            if letter in _UNSEEN and f"-{letter}" not in found:
                found.append(f"-{letter}")
            if letter in _ENDS_OPTIONS:
                return found
            if letter in _WITH_VALUE:
                if position == len(word):
                    next(rest, None)
                break
    return found


def _shebang(name: str, environ: Mapping[str, str]) -> list[str]:
    path = shutil.which(name, path=environ.get("PATH"))
    if path is None:
        return []
    try:
        with open(path, "rb") as file:
            line = file.readline(4096)
    except OSError:
        return []
    if not line.startswith(b"#!"):
        return []
    words = os.fsdecode(line[2:]).split()
    while words and (os.path.basename(words[0]) == "env" or words[0] == "-S"):
        words.pop(0)
    return words
