"""Times of whole child processes."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_EVERY_MS = 5


def run(command: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[float, float]:
    """(wall, CPU) milliseconds of a command that must succeed; CPU is its own and its waited-for children's."""
    began = time.perf_counter_ns()
    child = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return _ended(child, command, began)


def peak(command: Sequence[str]) -> tuple[float, float, float]:
    """(wall ms, CPU ms, highest MiB resident in it and its children together) of a command that must succeed.

    The sum is looked at every 5 ms. The kernel's own record will not do: it begins with the parent's size at the fork.
    """
    began, highest = time.perf_counter_ns(), 0
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    lives = os.pidfd_open(child.pid)
    try:
        waiting = select.poll()
        waiting.register(lives, select.POLLIN)
        while not waiting.poll(_EVERY_MS):
            highest = max(highest, _resident(child.pid))
    finally:
        os.close(lives)
    return *_ended(child, command, began), highest / (1 << 20)


def _ended(child: subprocess.Popen[bytes], command: Sequence[str], began: int) -> tuple[float, float]:
    """(wall, CPU) milliseconds of a child that has ended, or is waited for; an error where it failed."""
    _, status, usage = os.wait4(child.pid, 0)
    wall = (time.perf_counter_ns() - began) / 1e6
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {child.returncode}.")
    return wall, (usage.ru_utime + usage.ru_stime) * 1e3


def _resident(pid: int) -> int:
    """Bytes resident in a process and all below it; 0 of what has ended meanwhile."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        children = [child for task in Path(f"/proc/{pid}/task").iterdir()
                    for child in (task / "children").read_text(encoding="ascii").split()]
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident(int(one)) for one in children)
