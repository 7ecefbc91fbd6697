"""What many tests share: waiting for real things with a deadline, free ports, and clean child processes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What the code under test reads; a test names what it wants.
SETTINGS_PREFIXES = ("KVOBS_", "OTEL_")


def wait_until(predicate: Callable[[], object], timeout: float = 30.0, what: str = "the condition") -> None:
    """Return once ``predicate`` is true; fail after ``timeout`` seconds, naming what was awaited."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not predicate():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not become true within {timeout:g} s.")
        pause.wait(0.02)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def program(name: str, package: str) -> str:
    """The path of a real program, or a skip that says which Debian package brings it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; apt-get install {package} brings it.")
    return found


def child_environment(**settings: str) -> dict[str, str]:
    """This process's environment for a child, less kvobs's and OpenTelemetry's settings, plus ``settings``."""
    kept = {key: value for key, value in os.environ.items()
            if not key.startswith(SETTINGS_PREFIXES) or key.startswith("KVOBS_TEST_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | settings


def run_child(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None,
              timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its output as text."""
    return subprocess.run([str(word) for word in command], env=dict(env) if env is not None else child_environment(),
                          cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL)


def run_python(code: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a piece of Python in a fresh interpreter of this environment."""
    return run_child([sys.executable, "-c", code, *arguments], env=child_environment(**settings), cwd=ROOT)
