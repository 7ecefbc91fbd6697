"""The generated boards as Grafana asks for them: their targets, with the variables replaced."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.dashboards.harness import JOB, SCRAPE_S
from tests.support import ROOT

GENERATED = ROOT / "dashboards" / "generated"
PIXELS = 600  # of a panel a third of a screen wide: as many points are asked for where the panel says nothing
# Grafana's steps in seconds, with what is rounded to them: all below the bound.
STEPS = ((1.5, 1), (3.5, 2), (7.5, 5), (12.5, 10), (17.5, 15), (25, 20), (45, 30), (90, 60), (210, 120), (450, 300),
         (750, 600), (1050, 900), (1500, 1200), (2700, 1800), (5400, 3600))


class Target(NamedTuple):
    """One query of a panel of a board; ``title`` of the row it lies in, empty for the strip."""

    board: str
    row: str
    panel: str
    ref: str
    expr: str
    instant: bool
    exemplars: bool
    kind: str
    points: int

    @property
    def name(self) -> str:
        """Where a reader finds it."""
        return f"{self.board} / {self.row or 'strip'} / {self.panel} / {self.ref}"


def targets(directory: Path = GENERATED) -> list[Target]:
    """Every query of every panel of the boards in a directory, those in collapsed rows too."""
    return [target for path in sorted(directory.glob("*.json")) for target in _of(json.loads(path.read_text()))]


def named(slug: str, panel: str, ref: str = "A") -> Target:
    """The one query of a board's panel that is meant; panels are known by their titles."""
    found = [one for one in targets() if (one.board, one.panel, one.ref) == (f"kvobs-{slug}", panel, ref)]
    assert len(found) == 1, f"The boards have {len(found)} queries that are {slug} / {panel} / {ref}."
    return found[0]


def annotations(directory: Path = GENERATED) -> dict[str, str]:
    """The expressions of annotations, by board and name."""
    return {f"{board['uid']} / {one['name']}": one["expr"] for path in sorted(directory.glob("*.json"))
            for board in [json.loads(path.read_text())] for one in board["annotations"]["list"] if "expr" in one}


def _of(board: dict[str, Any]) -> Iterator[Target]:
    row = ""
    for panel in board["panels"]:
        inside = panel.get("panels", [])
        if panel["type"] == "row":
            row = panel["title"]
        for one in inside if panel["type"] == "row" else [panel]:
            for target in one.get("targets", []):
                yield Target(board["uid"], row, one["title"], target["refId"], target["expr"],
                             bool(target.get("instant")), bool(target.get("exemplar")), one["type"],
                             one.get("maxDataPoints", PIXELS))


def step(range_s: float, points: int, least_s: float) -> float:
    """The seconds between points that Grafana asks for over a range."""
    wanted = range_s / points
    return max(least_s, next((rounded for bound, rounded in STEPS if wanted < bound), wanted))


def rate_interval(step_s: float, scrape_s: float = SCRAPE_S) -> float:
    """Grafana's ``$__rate_interval`` in seconds: four scrapes, or a step and a scrape where that is more."""
    return max(step_s + scrape_s, 4 * scrape_s)


def replaced(expr: str, *, instances: str = ".+", job: str = JOB, step_s: float = SCRAPE_S, range_s: float = 60,
             scrape_s: float = SCRAPE_S) -> str:
    """The query that Grafana sends: every model and device, the jobs and instances as regular expressions."""
    values = {"job": job, "instance": instances, "model": ".*", "device": ".*", "objective": ".*", "src": ".*",
              "dst": ".*", "__interval": f"{step_s:g}s", "__range": f"{range_s:.0f}s", "__range_s": f"{range_s:.0f}",
              "__rate_interval": f"{rate_interval(step_s, scrape_s):g}s"}

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in values:
            raise KeyError(f"The boards have no variable {name!r}, which is in {expr}.")
        return values[name]

    return re.sub(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))", value, expr)


def metrics_in(expr: str, names: Sequence[str]) -> set[str]:
    """Which of the names are selected in an expression, with the suffix of a histogram's parts or without."""
    found = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.sub(r'"[^"]*"', '""', expr)))
    return {name for name in names if {name, f"{name}_bucket", f"{name}_sum", f"{name}_count"} & found}
