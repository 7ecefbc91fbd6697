"""What observing adds to a process that does nothing: ``kvobs run -- python -c pass``."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from kvobs.cli._run import child_environment
from tests.bench._processes import run
from tests.bench._rows import Plan, Progress, Row, compared, repeated

GROUP = "a process that does nothing"


def _cpu_ms(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> float:
    return run([sys.executable, *arguments], environ)[1]


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    rounds = plan.rounds(30, 5)
    done = progress(rounds)
    bare: list[float] = []
    added: dict[str, list[float]] = {"nothing": [], "command": [], "child": []}
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory:
        settings = {"store": directory, "prometheus": "127.0.0.1:0"}
        armed = child_environment(os.environ, settings)
        command = ["-m", "kvobs", "run", "--store", directory, "--prometheus", "127.0.0.1:0", "--",
                   sys.executable, "-c", "pass"]
        for _ in range(rounds):
            bare.append(_cpu_ms(["-c", "pass"]))
            added["nothing"].append(_cpu_ms(["-c", "pass"]) - bare[-1])
            added["command"].append(_cpu_ms(command) - bare[-1])
            added["child"].append(_cpu_ms(["-c", "pass"], armed) - bare[-1])
            done()
    yield repeated(GROUP, "python -c pass, CPU", bare, "ms", note="without kvobs")
    yield compared(GROUP, "added by kvobs run, CPU", added["command"], added["nothing"], "ms",
                   note="the command line and the observed child")
    yield compared(GROUP, "added to each Python child below it, CPU", added["child"], added["nothing"], "ms")
