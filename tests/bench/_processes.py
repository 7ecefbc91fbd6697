"""Times of whole child processes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence


def run(command: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[float, float]:
    """(wall, CPU) milliseconds of a command that must succeed; CPU is its own and its waited-for children's."""
    began = time.perf_counter_ns()
    child = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall = (time.perf_counter_ns() - began) / 1e6
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {child.returncode}.")
    return wall, (usage.ru_utime + usage.ru_stime) * 1e3
