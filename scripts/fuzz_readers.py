"""Read a million damaged files, say what crashed, and keep it: ``python scripts/fuzz_readers.py --inputs 1000000``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fuzz import formats, runner

_WIDTH = 140  # columns; the table is read in logs too


def main() -> int:
    """Returns 0, or 1 when an input crashed its reader; such inputs are written to ``tests/fuzz/found``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many in all, shared among the formats")
    parser.add_argument("--first", type=int, default=0, help="the first number; other numbers are other inputs")
    parser.add_argument("--format", action="append", choices=[kind.name for kind in formats.FORMATS])
    chosen = parser.parse_args()
    kinds = [kind for kind in formats.FORMATS if not chosen.format or kind.name in chosen.format]
    each = -(-chosen.inputs // len(kinds))
    outcomes: dict[str, runner.Outcome] = {}
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bars:
        for kind in kinds:
            bar = bars.add_task(kind.name, total=each)
            outcomes[kind.name] = runner.run(kind.name, chosen.first, each,
                                             lambda done, bar=bar: bars.update(bar, completed=done))
    table = Table("format", "inputs", "accepted", "refused", "at a limit", "crashes", "slowest (CPU)", "peak RSS")
    for name, found in outcomes.items():
        table.add_row(name, f"{found.inputs:,}", f"{found.accepted:,}", f"{found.refused:,}", f"{found.limited:,}",
                      f"{len(found.crashes):,}", f"{found.slowest * 1e3:,.1f} ms (number {found.slowest_number})",
                      f"{found.rss >> 20:,} MiB")
    console = Console(width=_WIDTH)
    console.print(table)
    formats.FOUND.mkdir(exist_ok=True)
    for name, found in outcomes.items():
        for number, why in found.crashes:
            kept = formats.FOUND / f"{name}-{number}.bin"
            kept.write_bytes(formats.damaged(formats.by_name(name), number))
            console.print(f"{name} {number}: {why} (kept as {kept.name})", markup=False)
    console.print(f"{sum(found.inputs for found in outcomes.values()):,} inputs, "
                  f"{sum(len(found.crashes) for found in outcomes.values()):,} crashes.")
    return int(any(found.crashes for found in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
