"""How much kvobs itself grows between step 10,000 and step 1,000,000, without torch, in a process of its own.

The real composition runs (queue, windows, metrics, store with a small bound, samples once a second) on synthetic
steps and a synthetic clock; every turn brings a new cache and a new session.
"""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench._rows import Plan, Progress, Row

GROUP = "memory of kvobs itself"
BUDGET_MIB = 1.0
SETTLED = 10_000
_BATCH = 1_000
_MIB = 1024**2


def resident_bytes() -> int:
    """What the kernel says is resident and anonymous (pages of files that are mapped are shared and not counted)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def grow(steps: int, traced: bool) -> None:
    """The child's whole life: prints one JSON line per 100,000 steps, and one with both readings last."""
    from kvobs.config import Config
    from kvobs.runtime import Runtime
    from kvobs.sessions import TurnNumbers
    from tests.bench._synthetic import STEPS_PER_TURN, life

    if traced:
        tracemalloc.start()
    now = [0]
    numbers = TurnNumbers()
    readings: list[int] = []
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory:
        runtime = Runtime(Config(store=Path(directory), store_max_bytes=8 * _MIB, prometheus=None, otlp="off"),
                          sources=[], clock=lambda: now[0])
        runtime.start()
        events, seen = life(), 0
        marks = {SETTLED, steps}
        while seen < steps:
            for event in itertools.islice(events, _BATCH):
                runtime.bus.publish(event)
                now[0] = event.t_ns if hasattr(event, "t_ns") else now[0]
            for number in range(_BATCH // STEPS_PER_TURN):
                numbers.next(f"session-{seen + number}")
            runtime.tick()
            seen += _BATCH
            if seen in marks:
                gc.collect()
                readings.append(tracemalloc.get_traced_memory()[0] if traced else resident_bytes())
            if not seen % 100_000:
                print(json.dumps({"seen": seen}), flush=True)
        runtime.stop()
    print(json.dumps({"readings": readings}), flush=True)


def _child(steps: int, traced: bool, done: Callable[[], None]) -> tuple[int, int]:
    """Bytes after ``SETTLED`` steps and after ``steps``."""
    readings = (0, 0)
    command = [sys.executable, "-m", "tests.bench.memory", str(steps), str(int(traced))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            told = json.loads(line)
            done()
            if "readings" in told:
                readings = (told["readings"][0], told["readings"][1])
    if run.returncode:
        raise RuntimeError(f"The memory measurement's child ended with status {run.returncode}.")
    return readings


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    steps = plan.rounds(1_000_000, 100_000)
    done = progress(2 * (steps // 100_000 + 1))
    for traced, what in ((True, "allocated by Python (tracemalloc)"), (False, "resident (RssAnon)")):
        before, after = _child(steps, traced, done)
        yield Row(group=GROUP, what=f"growth, step {SETTLED:,} to {steps:,}: {what}", value=(after - before) / _MIB,
                  unit="MiB", runs=1, budget=BUDGET_MIB,
                  note=f"from {before / _MIB:.1f} to {after / _MIB:.1f} MiB")


if __name__ == "__main__":
    grow(int(sys.argv[1]), sys.argv[2] == "1")
