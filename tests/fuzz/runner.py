"""Runs the worker over many numbers, begins anew after what kills it, and adds up."""

from __future__ import annotations

import json
import os
import selectors
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import ROOT, child_environment

MEMORY = 1 << 30
SILENCE = 30.0  # seconds of a core for a thousand inputs of some kilobytes; a busy machine may take much longer
_QUIET = 20  # so many times SILENCE without a word is a hang, whatever it used


@dataclass
class Outcome:
    """How so many inputs of one format ended. A crash has the number of its input and what happened."""

    accepted: int = 0
    refused: int = 0
    limited: int = 0
    crashes: list[tuple[int, str]] = field(default_factory=list)
    slowest: float = 0.0
    slowest_number: int = -1
    rss: int = 0

    @property
    def inputs(self) -> int:
        """Inputs that were read to an end of any kind."""
        return self.accepted + self.refused + self.limited + sum(not why.startswith("no sentence")
                                                                 for _, why in self.crashes)


def run(kind: str, first: int, count: int, progress: Callable[[int], None] = lambda done: None,
        prefix: tuple[str, ...] = ()) -> Outcome:
    """Read ``count`` damaged inputs of a format from number ``first`` on; ``prefix`` is put before the command."""
    total, parts = Outcome(), [(first, first + count)]
    while parts:
        begin, end = parts.pop()
        told, killer, why = _worker(kind, begin, end - begin,
                                    lambda done, begin=begin: progress(begin - first + done), prefix)
        done = 0
        if told is not None:
            _add(total, told)
            done = told["done"]
        if killer is not None:
            total.crashes.append((killer, why))
            # What came after the last report and before the end is read once more.
            parts += [part for part in ((killer + 1, end), (begin + done, killer)) if part[0] < part[1]]
    return total


def _add(total: Outcome, told: dict[str, Any]) -> None:
    total.accepted += told["accepted"]
    total.refused += told["refused"]
    total.limited += told["limited"]
    total.crashes += [(number, why) for number, why in told["crashes"]]
    total.rss = max(total.rss, told["rss"])
    if told["slowest"] > total.slowest:
        total.slowest, total.slowest_number = told["slowest"], told["slowest_number"]


def _worker(kind: str, first: int, count: int, progress: Callable[[int], None],
            prefix: tuple[str, ...]) -> tuple[dict[str, Any] | None, int | None, str]:
    """The last report, and the number that ended the worker, with how."""
    with tempfile.NamedTemporaryFile() as note:
        note.write(struct.pack("<q", first))
        note.flush()
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.fuzz.worker", kind, str(first), str(count), str(MEMORY), note.name],
            stdout=subprocess.PIPE, cwd=ROOT, env=child_environment(KVOBS_ENABLED="off"))
        assert process.stdout is not None
        told: dict[str, Any] | None = None
        spent, quiet = 0.0, 0
        try:
            with selectors.DefaultSelector() as waiting:
                waiting.register(process.stdout, selectors.EVENT_READ)
                while True:
                    if not waiting.select(SILENCE):
                        quiet += 1
                        if _cpu_seconds(process.pid) - spent > SILENCE or quiet > _QUIET:
                            return told, _number(note.name), f"hangs for more than {SILENCE:g} s"
                        continue
                    line = process.stdout.readline()
                    if not line:
                        break
                    quiet = 0
                    told, spent = json.loads(line), _cpu_seconds(process.pid)
                    progress(told["done"])
        finally:
            process.kill()
            status = process.wait()
            process.stdout.close()
        if told is not None and told["done"] == count:
            return told, None, ""
        return told, _number(note.name), f"ends the process with status {status}"


def _cpu_seconds(process: int) -> float:
    """What a process has used of its core."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _number(path: str) -> int:
    with open(path, "rb") as note:
        number: int = struct.unpack("<q", note.read(8))[0]
        return number
