"""Run the measurements, show their progress on stderr and the table on stdout."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from tests.bench import (
    _vllm_server,
    breaker,
    children,
    dashboards,
    decode,
    deep,
    errors,
    explain,
    frame,
    guard,
    hooks,
    imports,
    memory,
    passthrough,
    pipeline,
    probe,
    scrape,
    vgpu,
    view,
    vllm,
)
from tests.bench._rows import Measurement, Plan, Progress, Row
from tests.bench._table import show, write_json

MEASUREMENTS: dict[str, Measurement] = {
    "hooks": hooks.measure, "deep": deep.measure, "guard": guard.measure, "frame": frame.measure,
    "view": view.measure, "decode": decode.measure, "passthrough": passthrough.measure,
    "pipeline": pipeline.measure, "memory": memory.measure, "scrape": scrape.measure, "imports": imports.measure,
    "children": children.measure, "breaker": breaker.measure, "errors": errors.measure, "explain": explain.measure,
    "probe": probe.measure, "vgpu": vgpu.measure, "vllm": vllm.measure, "vllm_server": _vllm_server.measure,
    "dashboards": dashboards.measure,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="What kvobs costs.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for CI")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, metavar="NAME",
                        help=f"some measurements: {', '.join(MEASUREMENTS)}")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a row is over its budget")
    return parser.parse_args()


def _bar(bars: Bars, name: str) -> Progress:
    def begin(total: int) -> Callable[[], None]:
        task = bars.add_task(name, total=total)
        return lambda: bars.advance(task)

    return begin


def main() -> int:
    options = arguments()
    plan = Plan(options.quick)
    before = os.getloadavg()[0]
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Nothing redraws while a measurement runs: the refresh thread would compete with it.
    with Bars(*columns, console=Console(stderr=True), auto_refresh=False) as bars:
        for name in options.only or MEASUREMENTS:
            rows += MEASUREMENTS[name](plan, _bar(bars, name))
            bars.refresh()
    facts = {"load before and after": f"{before:.2f} and {os.getloadavg()[0]:.2f}", "cores": os.cpu_count(),
             "Python": platform.python_version(), "mode": "quick" if plan.quick else "full"}
    show(rows, facts, Console(width=None if sys.stdout.isatty() else 132))
    if options.json is not None:
        write_json(rows, facts, options.json)
    return 1 if options.strict and any(row.verdict == "over" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
