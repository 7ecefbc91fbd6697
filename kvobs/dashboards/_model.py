"""What a board is: sections of panels, each panel with the question that it answers. Inert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvobs.catalog import Row
from kvobs.dashboards._promql import Expr

Kind = Literal["stat", "timeseries", "heatmap", "state-timeline", "table", "barchart", "text"]
# Notes that a value needs beside its formula, by the nature that the catalog gives it.
NATURES = {"measured": "Measured: as exact as the clock or sensor behind it.",
           "estimated": "Estimated: a prediction, not a count.",
           "modelled": "Modelled: computed from a model, not observed.",
           "scraped": "Scraped: what another program says of itself, as old and as exact as that is."}


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """One expression of a panel, with what its series are called (empty: by their labels)."""

    expr: Expr
    legend: str = ""
    exemplars: bool = False
    words: Mapping[int, tuple[str, str]] = {}

    @property
    def name(self) -> str:
        """The legend in Grafana's words."""
        labels = " ".join(f"{{{{{label}}}}}" for label in self.expr.by).replace("{{src}} {{dst}}", "{{src}} to {{dst}}")
        return " ".join(part for part in (self.legend, labels) if part) or "all"


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One panel. ``unit`` is Grafana's; ``absent`` is what it says where there is no data."""

    kind: Kind
    title: str
    question: str
    unit: str
    queries: tuple[Query, ...] = ()
    absent: str = "not reported"
    note: str = ""
    width: int = 8
    height: int = 7
    options: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    overrides: tuple[dict[str, Any], ...] = ()
    transformations: tuple[dict[str, Any], ...] = ()
    links: tuple[dict[str, Any], ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every row of the catalog that it reads, each once."""
        return tuple(dict.fromkeys(row for query in self.queries for row in query.expr.rows))


class Section(msgspec.Struct, frozen=True):
    """A row of panels; a section that needs something switched on or built in is collapsed and titled after it."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """A dashboard: the strip of stats first, then its sections in causal order.

    ``points`` bounds the steps of a query over time (0: as many as a panel is wide), for boards over many processes.
    """

    slug: str
    title: str
    description: str
    strip: tuple[Panel, ...]
    sections: tuple[Section, ...]
    points: int = 0

    @property
    def uid(self) -> str:
        """The stable uid, which is also the file's stem."""
        return f"kvobs-{self.slug}"

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in order."""
        return (*self.strip, *(panel for section in self.sections for panel in section.panels))
