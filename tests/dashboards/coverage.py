"""The coverage matrix: ``python -m tests.dashboards.coverage DIR`` over what the incidents left there.

One line per metric of the catalog, as Markdown: how many queries of the boards read it, and in which scenarios a live
process told it; or why not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvobs.catalog import ROWS, Row, prometheus_name
from tests.dashboards.boards import annotations, metrics_in, targets
from tests.dashboards.harness import Played, Server, prometheus
from tests.dashboards.waivers import reason, waivers


class Covered(NamedTuple):
    """A metric: the panels that read it, the scenarios in which it was seen, and why it need not have been."""

    row: Row
    panels: tuple[str, ...]
    scenarios: tuple[str, ...]
    waived: str | None


def matrix(server: Server, played: Mapping[str, Played]) -> list[Covered]:
    """Every metric of the catalog."""
    names = {prometheus_name(row): row for row in ROWS}
    charted: dict[str, list[str]] = {name: [] for name in names}
    for where, expr in [(target.name, target.expr) for target in targets()] + list(annotations().items()):
        for name in metrics_in(expr, list(names)):
            charted[name].append(where)
    given = waivers(vllm="vllm" in played)
    return [Covered(row, tuple(charted[name]), _seen(server, name, row, played), reason(row.name, given))
            for name, row in names.items()]


def _seen(server: Server, name: str, row: Row, played: Mapping[str, Played]) -> tuple[str, ...]:
    series = f"{name}_count" if row.kind == "histogram" else name
    return tuple(scenario for scenario, one in played.items()
                 if server.range(f'count({series}{{job="{one.job}", instance=~"{one.matcher()}"}})', one.begin,
                                 one.end))


def markdown(found: list[Covered], not_charted: Mapping[str, str]) -> str:
    """The matrix as a table."""
    lines = ["| metric | queries | seen live in | waived |", "|---|---|---|---|"]
    for one in found:
        why = "; ".join(text for text in (not_charted.get(one.row.name), None if one.scenarios else one.waived) if text)
        lines.append(f"| `{one.row.name}` | {len(one.panels)} | {', '.join(one.scenarios) or '-'} | {why} |")
    return "\n".join(lines) + "\n"


def recorded(directory: Path) -> dict[str, Played]:
    """What ``incidents.json`` of a directory says."""
    found = json.loads((directory / "incidents.json").read_text())["scenarios"]
    return {one["name"]: Played(**one | {key: tuple(one[key]) for key in ("instances", "traces")}) for one in found}


def main() -> int:
    """Print the table; exit 2 where there is nothing to make it of."""
    from kvobs.dashboards import WAIVED

    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "incidents.json").is_file():
        print("Name the directory that python -m tests.dashboards.incidents --out has made.", file=sys.stderr)
        return 2
    directory = Path(sys.argv[1]).resolve()
    with prometheus(directory) as server:
        print(markdown(matrix(server, recorded(directory)), WAIVED), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
