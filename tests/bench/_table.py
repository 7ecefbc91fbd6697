"""The report: a table for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench._rows import Row
from tests.bench._statistics import Interval

_COLOURS = {"ok": "green", "over": "bold red", "unclear": "yellow", "skipped": "yellow", "-": "dim"}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _measured(row: Row) -> str:
    if row.value is None:
        return "-"
    sign = "+" if row.unit == "%" and row.value > 0 else ""
    return f"{sign}{_number(row.value)} {row.unit}"


def _span(interval: Interval | None) -> str:
    return "" if interval is None else f"{_number(interval.low)} … {_number(interval.high)}"


def show(rows: Sequence[Row], facts: Mapping[str, object], console: Console) -> None:
    """Print the table; the facts about this run stand below it."""
    table = Table(title="kvobs: cost of observing", title_justify="left", pad_edge=False)
    table.add_column("what", overflow="fold", min_width=34)
    for name in ("median", "95 % interval", "A/A interval", "budget"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    table.add_column("runs", justify="right")
    group = ""
    for row in rows:
        if row.group != group:
            group = row.group
            table.add_section()
            table.add_row(f"[bold]{group}[/]")
        budget = "" if row.budget is None else f"≤ {_number(row.budget)} {row.unit}"
        what = f"  {row.what}" + (f"\n  [dim]{row.note}[/]" if row.note else "")
        table.add_row(what, _measured(row), _span(row.interval), _span(row.noise), budget,
                      f"[{_COLOURS[row.verdict]}]{row.verdict}[/]", str(row.runs) if row.runs else "")
    console.print(table)
    console.print("; ".join(f"{name} {value}" for name, value in facts.items()) + ".", style="dim", highlight=False)


def write_json(rows: Sequence[Row], facts: Mapping[str, object], path: Path) -> None:
    """The same as one JSON object."""
    lines = [{"group": row.group, "what": row.what, "value": row.value, "unit": row.unit, "runs": row.runs,
              "interval": _ends(row.interval), "aa_interval": _ends(row.noise), "budget": row.budget,
              "verdict": row.verdict, "note": row.note} for row in rows]
    path.write_text(json.dumps({"facts": dict(facts), "rows": lines}, indent=1) + "\n", encoding="utf-8")


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]
