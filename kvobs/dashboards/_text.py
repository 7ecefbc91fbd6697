"""What panels say of themselves: descriptions, the page of metrics and the page of formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvobs.catalog import ROWS, Row, prometheus_name
from kvobs.dashboards._model import NATURES, Board, Panel
from kvobs.dashboards._promql import Expr


def description(panel: Panel) -> str:
    """The question that a panel answers, the metrics that it reads with their formulas, and what to beware of."""
    parts = [panel.question, *(f"{prometheus_name(row)}: {row.meaning} Formula: {row.formula}." for row in panel.rows)]
    parts += [f"Drawn: {one}." for one in dict.fromkeys(q.expr.formula for q in panel.queries) if one]
    natures = dict.fromkeys(row.nature for row in panel.rows)
    parts += [NATURES[nature] for nature in natures if nature in NATURES]
    parts += dict.fromkeys(window for query in panel.queries if (window := _window(query.expr)))
    return "\n\n".join([*parts, panel.note] if panel.note else parts)


def _window(of: Expr) -> str:
    """What a point tells of the time before it; empty for what is told as of now."""
    if "increase(" in of.text:
        return ("Counts are those within $__rate_interval before each point, which is longer than the step between "
                "points: do not add points up.")
    if "rate(" not in of.text:
        return ""
    return f"{'Rates are per second,' if of.unit.endswith('/s') else 'Of what was counted'} within $__rate_interval."


def metrics_page(boards: Sequence[Board], waived: Mapping[str, str]) -> str:
    """Every metric of the catalog with the panels that draw it, or the reason why none does."""
    lines = ["# Metrics and where they are drawn", "",
             "Written by `make docs` from the catalog and the boards; do not edit.", "",
             "| OpenTelemetry name | Prometheus name | kind | unit | across ranks | nature | meaning | panels |",
             "|---|---|---|---|---|---|---|---|"]
    lines += [f"| `{row.name}` | `{prometheus_name(row)}` | {row.kind} | `{row.unit}` | {row.across_ranks} | "
              f"{row.nature} | {row.meaning} | {_drawn(row, boards) or 'waived: ' + waived.get(row.name, '')} |"
              for row in ROWS]
    return "\n".join(lines) + "\n"


def _drawn(row: Row, boards: Sequence[Board]) -> str:
    found = {board.title: [panel.title for panel in board.panels if row in panel.rows] for board in boards}
    return "; ".join(f"{board}: {', '.join(dict.fromkeys(panels))}" for board, panels in found.items() if panels)


def panels_page(boards: Sequence[Board]) -> str:
    """Every panel: its question, metrics, formulas and queries."""
    lines = ["# Panels: question, metric, formula, query", "",
             "Written by `make docs` from the boards; do not edit. `$__rate_interval` and the variables are Grafana's.",
             ""]
    for board in boards:
        lines += [f"## {board.title}", "", board.description, ""]
        for name, panels in (("Stat strip", board.strip), *((one.title, one.panels) for one in board.sections)):
            lines += [f"### {board.title}: {name}", ""]
            for panel in panels:
                lines += _panel(panel)
    return "\n".join(lines).rstrip("\n") + "\n"


def _panel(panel: Panel) -> list[str]:
    lines = [f"#### {panel.title}", ""]
    if panel.kind == "text":
        return [*lines, panel.question, ""]
    lines += [f"{panel.question} Without data: *{panel.absent}*.", ""]
    lines += [f"- `{prometheus_name(row)}` = {row.formula} ({row.nature})" for row in panel.rows]
    lines += [f"- Drawn: {one}" for one in dict.fromkeys(query.expr.formula for query in panel.queries) if one]
    lines += [f"- {panel.note}"] if panel.note else []
    lines += ["", "```promql", *(query.expr.text for query in panel.queries), "```", ""]
    return lines
