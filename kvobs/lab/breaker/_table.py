"""The results as a Markdown table."""

from __future__ import annotations

from kvobs.lab.breaker._results import Interval, Results, Row, rows

COLUMNS = ("load", "segments", "arm", "admitted", "finished", "shed", "OOM errors", "tokens cut",
           "windows P95 <= 12 ms", "and no OOM", "P95 up to", "above 12 ms", "goodput, tokens/s", "of the baseline's",
           "transitions")


def table(results: Results) -> str:
    """One line per arm, load and allocator setting; sums of all runs, intervals of 95 %."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows(results.runs)]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    return [row.load, "expandable" if row.expandable else "plain", row.arm, f"{row.admitted:,}", f"{row.finished:,}",
            f"{row.shed:,}", f"{row.errors:,}", f"{row.cut:,}", _percent(row.fast), _percent(row.good),
            f"{row.p95_ms:g} ms", f"{row.slow:,.0f} ppm", _number(row.goodput, 1),
            "" if row.ratio is None else _number(row.ratio, 3), f"{row.transitions:.1f}"]


def _percent(one: Interval) -> str:
    return f"{100 * one.value:.1f} % ({100 * one.low:.1f} to {100 * one.high:.1f})"


def _number(one: Interval, digits: int) -> str:
    return f"{one.value:.{digits}f} ({one.low:.{digits}f} to {one.high:.{digits}f})"
