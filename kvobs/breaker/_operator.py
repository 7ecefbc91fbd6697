"""An operator's hands on the breaker of this process, for whoever serves them; and the token that they need."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvobs.breaker._breaker import Breaker
from kvobs.breaker._states import LEVELS, State

FILE = "control-token"  # in the directory of the stores
LEAST_CHARACTERS = 16
_MOST_BYTES = 512
SECOND = 10**9


def token_of(directory: Path) -> str:
    """The token of all processes that keep their stores in a directory, which is made with it; only its owner may read
    the file.

    Raises:
        OSError: it cannot be read or written.
        ValueError: others may read it, or it holds no token; a whole sentence.
    """
    path = directory / FILE
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        _make(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ValueError(f"The token {path} must be a file of this user that nobody else may read (mode 0600).")
        token = os.read(descriptor, _MOST_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    if len(token) < LEAST_CHARACTERS or not token.isascii() or any(character.isspace() for character in token):
        raise ValueError(f"The token {path} must have at least {LEAST_CHARACTERS} characters and no space.")
    return token


def _make(path: Path) -> None:
    """A new token; of two processes that do this at once, one's is kept, and it is never seen half written."""
    raw = path.with_name(f"{FILE}.{os.getpid()}.new")
    raw.unlink(missing_ok=True)
    descriptor = os.open(raw, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_urlsafe(32).encode() + b"\n")
        with contextlib.suppress(FileExistsError):
            os.link(raw, path)
    finally:
        os.close(descriptor)
        raw.unlink(missing_ok=True)


class Operator:
    """What an operator may see and do. Any thread may call; ``token`` is empty where nothing may be commanded."""

    def __init__(self, breaker: Breaker, process: str, token: str, clock: Callable[[], int]) -> None:
        self.token = token
        self._breaker, self._process, self._clock = breaker, process, clock

    def status(self) -> dict[str, Any]:
        """Mode, policy, and each scope's levels with their phases."""
        breaker, now = self._breaker, self._clock()
        return {
            "process": self._process, "mode": breaker.mode, "policy": breaker.policy.name,
            "policy_since_s": None if breaker.adopted_ns is None else _seconds(now - breaker.adopted_ns),
            "decisions": breaker.decisions, "untold": sorted(breaker.untold),
            "scopes": {scope: _standing(state, now) for scope, state in sorted(breaker.states().items())}}

    def hold(self, level: int | None) -> bool:
        """Hold a level in every scope; None: the machine has its way again. Raises ValueError for no level."""
        return self._breaker.hold(level)

    def reset(self) -> bool:
        """Close all levels and forget their failures."""
        return self._breaker.reset()


def _standing(state: State, now_ns: int) -> dict[str, Any]:
    return {
        "level": state.level, "held": state.override, "age_s": _seconds(now_ns - state.now_ns),
        "levels": [{"level": number, "name": LEVELS[number], "phase": level.phase.value,
                    "since_s": _seconds(now_ns - level.since_ns), "generation": level.generation,
                    "failures": level.failures} for number, level in enumerate(state.levels, 1)]}


def _seconds(duration_ns: int) -> float:
    return round(max(0, duration_ns) / SECOND, 3)
