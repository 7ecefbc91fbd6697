"""``kvobs explain``: the engines' speed, a large file from the command line, and beside torch's own summaries."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvobs.allocator import core
from kvobs.allocator.explain import explain
from kvobs.allocator.live import state_of
from kvobs.allocator.readers import read
from kvobs.allocator.recording import Recording
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.waste import waste
from tests.bench._inference import program
from tests.bench._plot import slope, write_svg
from tests.bench._processes import peak
from tests.bench._rows import Plan, Progress, Row, compared, repeated, skipped
from tests.bench._statistics import median, ratios

ENGINES, COMMAND, TORCH = "allocator engines, CPU per operation", "kvobs explain --json", "beside torch's _memory_viz"
BUDGETS_US = {"C++": 0.5, "Python": 5.0}  # 2 and 0.2 million operations per second
LARGE = 1_000_000
EXPLAIN_S, EXPLAIN_MIB = 10.0, 1024.0
SEGSUM_TIMES = 2.0
STRAIGHT = 1.1  # the exponent of growth that still counts as linear
PLOT = Path("build/bench/allocator.svg")
SNAPSHOTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "snapshots"


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    yield from _engines(plan, progress)
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory:
        events = plan.rounds(LARGE, LARGE // 10)
        files = {kind: Path(directory) / f"{kind}.pickle" for kind in ("segments", "expandable")}
        for kind, file in files.items():
            subprocess.run([sys.executable, "-m", "tests.bench._snapshots", str(file), str(events), kind], check=True)
        yield from _command(plan, progress, events, files)
        yield from _torch(plan, progress, events, files["segments"])


def _engines(plan: Plan, progress: Progress) -> Iterator[Row]:
    decades = [10_000, 100_000] if plan.quick else [10_000, 100_000, 1_000_000, 10_000_000]
    done, lines = progress(len(decades)), dict[str, list[tuple[float, float]]]()
    for decade in decades:
        asked = program(decade)
        for engine, budget in BUDGETS_US.items():
            what = f"{engine}, {len(asked):,} operations"
            if engine == "C++" and (reason := core.why_not()):
                yield skipped(ENGINES, what, reason, unit="µs", budget=budget)
                continue
            rounds = 1 if decade > LARGE and engine == "Python" else plan.rounds(5, 3)
            took = [_cpu(lambda: core.run(asked, Settings(), None, engine)) for _ in range(rounds)]  # noqa: B023
            each = [1e6 * one / len(asked) for one in took]
            lines.setdefault(engine, []).append((len(asked), median(took)))
            speed = f"{1 / median(each):,.2f} million operations/s"
            yield repeated(ENGINES, what, each, "µs", budget=budget, note=speed) if rounds > 1 else Row(
                group=ENGINES, what=what, value=each[0], unit="µs", runs=1, budget=budget, note=speed)
        done()
    write_svg(PLOT, "An inference server's requests", "operations", "seconds of CPU", lines)
    for engine, line in lines.items():
        yield Row(group=ENGINES, what=f"{engine}, time grows with the operations to the power of", value=slope(line),
                  unit="", runs=len(line), budget=STRAIGHT, note=f"drawn in {PLOT}")


def _cpu(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _command(plan: Plan, progress: Progress, events: int, files: dict[str, Path]) -> Iterator[Row]:
    """Whole processes: the command with the process that reads the file for it."""
    rounds = plan.rounds(5, 2)
    done = progress(rounds * len(files))
    for kind, file in files.items():
        found = []
        for _ in range(rounds):
            found.append(peak([sys.executable, "-m", "kvobs", "explain", str(file), "--json"]))
            done()
        wall, cpu, together = ([one[index] for one in found] for index in range(3))
        what = f"{events:,} events, {kind}"
        budgets: tuple[float | None, float | None] = (EXPLAIN_S, EXPLAIN_MIB) if events == LARGE else (None, None)
        size = f"{file.stat().st_size / MIB:,.0f} MiB"
        yield repeated(COMMAND, f"{what}, wall", wall, "s", scale=1e-3, budget=budgets[0],
                       note=f"a file of {size}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        yield repeated(COMMAND, f"{what}, CPU of both processes", cpu, "s", scale=1e-3)
        yield repeated(COMMAND, f"{what}, resident memory of both", together, "MiB", budget=budgets[1],
                       note="the highest sum, pages of the file included")


def _torch(plan: Plan, progress: Progress, events: int, file: Path) -> Iterator[Row]:
    try:
        from torch.cuda import _memory_viz as viz
    except ImportError as error:
        yield skipped(TORCH, "state and waste over segsum", str(error), unit="x", budget=SEGSUM_TIMES)
        return
    public = sorted(SNAPSHOTS.glob("*.pickle"), key=lambda one: one.stat().st_size)[-3:] if SNAPSHOTS.is_dir() else []
    done = progress(1 + len(public))
    for path in (*public, file):
        recording = read(path)
        document = pickle.loads(path.read_bytes())
        gc.freeze()  # what was loaded is not looked through again and again
        yield from _summaries(plan, path.stem, recording, document, viz)
        if path == file:
            yield from _whole(plan, events, recording, document, viz)
        del document
        gc.unfreeze()
        done()


def _summaries(plan: Plan, name: str, recording: Recording, document: dict[str, Any], viz: Any) -> Iterator[Row]:
    """In turns on the same document, parsed before."""
    settings, segments = recording.settings or Settings(), document["segments"]
    devices = [device.device for device in recording.devices]
    states = [device.state for device in recording.devices]
    arms: dict[str, Callable[[], Any]] = {
        "segsum": lambda: viz.segsum(document), "again": lambda: viz.segsum(document),
        "waste": lambda: [waste(state, settings) for state in states],
        "both": lambda: [waste(state_of(segments, device), settings) for device in devices]}
    took: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(plan.rounds(60, 15)):
        for arm, call in arms.items():
            took[arm].append(_cpu(call))
    same = [ratio - 1 for ratio in ratios(took["again"], took["segsum"])]
    note = f"segsum {1e3 * median(took['segsum']):.2f} ms"
    yield compared(TORCH, f"{name}: waste of a state, over segsum", ratios(took["waste"], took["segsum"]), same, "x",
                   budget=SEGSUM_TIMES, note=note)
    yield compared(TORCH, f"{name}: state from torch's dicts, and its waste, over segsum",
                   ratios(took["both"], took["segsum"]), same, "x", budget=SEGSUM_TIMES, note=note)


def _whole(plan: Plan, events: int, recording: Recording, document: dict[str, Any], viz: Any) -> Iterator[Row]:
    arms: dict[str, Callable[[], Any]] = {
        "explain": lambda: explain(recording), "trace": lambda: viz.trace(document),
        "trace_plot": lambda: viz.trace_plot(document)}
    took: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(plan.rounds(3, 2)):
        for arm, call in arms.items():
            took[arm].append(_cpu(call))
    for arm, values in took.items():
        yield repeated(TORCH, f"{events:,} events, {arm}, CPU", values, "s", note="parsed before")
