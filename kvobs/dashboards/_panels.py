"""Panels by what they show; each knows the options that Grafana's panel of that kind wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvobs.dashboards._model import Panel, Query
from kvobs.dashboards._promql import UP, Expr, ratio, state, total, where
from kvobs.dashboards._units import grafana_unit

Step = tuple[float | None, str]
Words = Mapping[int, tuple[str, str]]  # of states: text and color
GOOD_TO_BAD: Words = {0: ("normal", "green"), 1: ("reorganise", "yellow"), 2: ("offload", "orange"),
                      3: ("degrade", "red")}
_LINK = {"type": "link", "icon": "external link", "tooltip": "", "tags": [], "asDropdown": False, "targetBlank": True,
         "includeVars": False, "keepTime": False}
# Where exemplars lead: to the turn by its trace, which only their own field names, and to all turns of the time shown.
_TRACE = {"matcher": {"id": "byName", "options": "trace_id"}, "properties": [{"id": "links", "value": [
    {"title": "Trace in Jaeger", "url": "${jaeger}/trace/${__value.raw}", "targetBlank": True}]}]}
_TURNS = {**_LINK, "title": "Turns of this time in Jaeger",
          "url": "${jaeger}/search?service=${service}&lookback=custom&start=${__from}000&end=${__to}000"}
_TOOLTIP = {"mode": "multi", "sort": "desc"}
# Without it, the text for no data has the color of the lowest step: the green or the red of a value that nobody told.
_PLAIN_ABSENCE = {"type": "special", "options": {"match": "null", "result": {"color": "text", "index": 99}}}
_WIDE = {"reason": 520}  # pixels of a table's column whose labels are sentences
_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}


def query(expr: Expr, legend: str = "", *, exemplars: bool = False, words: Words | None = None) -> Query:
    """One expression under a name; empty: its labels. ``words`` are what a table's column says for its states."""
    return Query(expr=expr, legend=legend, exemplars=exemplars, words=words or {})


def stat(title: str, question: str, expr: Expr, *, absent: str = "not reported", steps: Sequence[Step] = (),
         mappings: Words | None = None, note: str = "", unit: str = "", decimals: int | None = None,
         width: int = 3) -> Panel:
    """A tile with the value as of now."""
    defaults: dict[str, Any] = {"thresholds": _thresholds(steps or ((None, "text"),)), "color": {"mode": "thresholds"},
                                "mappings": [*(_mappings(mappings) if mappings else ()), _PLAIN_ABSENCE]}
    if decimals is not None:
        defaults["decimals"] = decimals
    options = {"colorMode": "value", "graphMode": "none", "justifyMode": "auto", "orientation": "auto",
               "textMode": "value", "wideLayout": True, "showPercentChange": False,
               "percentChangeColorMode": "standard",
               "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    return Panel(kind="stat", title=title, question=question, queries=(Query(expr=expr),), absent=absent, note=note,
                 unit=unit or grafana_unit(expr.unit), width=width, height=4, options=options, defaults=defaults)


def unreachable(width: int = 3) -> Panel:
    """The tile that says how many chosen targets Prometheus could not scrape; absent without targets."""
    down = where(state(UP.name, "job", "instance"), "== bool 0")
    expr = Expr(f"sum ({down.text})", down.rows, (), "{target}", "count of targets with up = 0")
    return stat("Unreachable", "How many of the chosen processes does Prometheus not reach?", expr,
                absent="no targets", steps=((None, "green"), (1, "red")), width=width, decimals=0,
                note="What an unreachable process shows elsewhere ends at its last scrape: it is absent, not 0.")


def lines(title: str, question: str, *queries: Query | Expr, absent: str = "not reported", note: str = "",
          unit: str = "", stacked: bool = False, limit: float | None = None, width: int = 8, height: int = 7,
          low: float | None = 0, high: float | None = None) -> Panel:
    """Values over time. ``limit`` is drawn as a line; an area that is ``stacked`` adds up."""
    chosen = tuple(one if isinstance(one, Query) else Query(expr=one) for one in queries)
    custom: dict[str, Any] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if stacked else 0,
                              "showPoints": "auto", "spanNulls": False,
                              "stacking": {"mode": "normal" if stacked else "none", "group": "A"}}
    defaults: dict[str, Any] = {"custom": custom, "color": {"mode": "palette-classic"}}
    if low is not None:
        defaults["min"] = low
    if high is not None:
        defaults["max"] = high
    linked = any(one.exemplars for one in chosen)
    if limit is not None:
        custom["thresholdsStyle"] = {"mode": "dashed"}
        defaults["thresholds"] = _thresholds(((None, "transparent"), (limit, "red")))
    return Panel(kind="timeseries", title=title, question=question, queries=chosen, absent=absent, note=note,
                 unit=unit or _one_unit(chosen), width=width, height=height, defaults=defaults,
                 overrides=(_TRACE,) if linked else (), links=(_TURNS,) if linked else (),
                 options={"legend": _LEGEND, "tooltip": _TOOLTIP})


def heat(title: str, question: str, expr: Expr, *, line_at: float, line_name: str, absent: str, note: str,
         width: int = 12, height: int = 9) -> Panel:
    """The buckets of a histogram over time; the edge of the bucket that ends at ``line_at`` is called ``line_name``."""
    options = {"calculate": False, "cellGap": 1, "color": {"mode": "scheme", "scheme": "Oranges", "fill": "dark-orange",
                                                          "scale": "exponential", "exponent": 0.5, "steps": 64,
                                                          "reverse": False},
               "exemplars": {"color": "rgba(31,96,196,0.9)"}, "filterValues": {"le": 1e-9}, "legend": {"show": True},
               "rowsFrame": {"layout": "auto", "value": "allocations"}, "showValue": "never",
               "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
               "yAxis": {"axisPlacement": "left", "unit": "s", "reverse": False}}
    edge = {"matcher": {"id": "byName", "options": f"{line_at:g}"},
            "properties": [{"id": "displayName", "value": line_name}]}
    defaults = {"custom": {"hideFrom": {"legend": False, "tooltip": False, "viz": False},
                           "scaleDistribution": {"type": "linear"}},
                "thresholds": _thresholds(((None, "transparent"), (line_at, "red")))}
    return Panel(kind="heatmap", title=title, question=question, absent=absent, note=note, unit="s", width=width,
                 height=height, queries=(Query(expr=expr),), options=options, defaults=defaults, overrides=(edge,))


def states(title: str, question: str, expr: Expr, *, mappings: Words, absent: str, note: str = "",
           width: int = 12, height: int = 6) -> Panel:
    """States over time, one band per series."""
    return Panel(kind="state-timeline", title=title, question=question, queries=(Query(expr=expr),), absent=absent,
                 unit="short", note=note, width=width, height=height,
                 options={"showValue": "auto", "rowHeight": 0.9, "mergeValues": True, "alignValue": "left",
                          "legend": _LEGEND, "tooltip": {"mode": "single", "sort": "none"}},
                 defaults={"mappings": _mappings(mappings), "color": {"mode": "thresholds"},
                           "thresholds": _thresholds(((None, "green"),)),
                           "custom": {"fillOpacity": 70, "lineWidth": 0, "spanNulls": False}})


def table(title: str, question: str, *columns: Query, absent: str = "not reported", note: str = "", width: int = 12,
          height: int = 8, mappings: Words | None = None) -> Panel:
    """Values as of now: one row per set of labels, one column per query."""
    names = _value_columns(columns)
    # The text for no data is the whole table's; a cell without a value is a dash, a label without one is empty.
    overrides = ({"matcher": {"id": "byType", "options": "string"}, "properties": [{"id": "noValue", "value": ""}]},
                 *({"matcher": {"id": "byName", "options": one.legend}, "properties": _column(one)} for one in columns),
                 *({"matcher": {"id": "byName", "options": label},
                    "properties": [{"id": "custom.width", "value": pixels}]}
                   for label, pixels in _WIDE.items() if label in columns[0].expr.by))
    defaults: dict[str, Any] = {"custom": {"align": "auto", "inspect": False}}
    if mappings:
        defaults["mappings"] = _mappings(mappings)
    return Panel(kind="table", title=title, question=question, queries=columns, absent=absent, note=note,
                 unit="none", width=width, height=height, overrides=overrides, defaults=defaults,
                 options={"showHeader": True, "frameIndex": 0, "cellHeight": "sm"},
                 transformations=(*({"id": "merge", "options": {}} for _ in columns[1:2]),
                                  _organized(dict(zip(names, (one.legend for one in columns), strict=True)),
                                             order=(*columns[0].expr.by, *names))))


def stacked_bars(title: str, question: str, *parts: Query, absent: str, note: str, width: int = 12,
                 height: int = 9) -> Panel:
    """One bar per place, stacked of parts; each part is an expression whose ``place`` label names the bar."""
    renamed = dict(zip(_value_columns(parts), (one.legend for one in parts), strict=True))
    hidden = {label: True for part in parts for label in part.expr.by}
    return Panel(kind="barchart", title=title, question=question, queries=parts, absent=absent, note=note,
                 unit=_one_unit(parts), width=width, height=height,
                 options={"orientation": "horizontal", "xField": "place", "stacking": "normal", "showValue": "auto",
                          "groupWidth": 0.7, "barWidth": 0.97, "barRadius": 0, "fullHighlight": False,
                          "xTickLabelRotation": 0, "xTickLabelSpacing": 0, "xTickLabelMaxLength": 0,
                          "legend": _LEGEND, "tooltip": _TOOLTIP},
                 defaults={"color": {"mode": "palette-classic"}, "custom": {"fillOpacity": 80, "lineWidth": 1}},
                 transformations=({"id": "merge", "options": {}}, _organized(renamed, hidden)))


def text(title: str, content: str, *, width: int = 24, height: int = 5) -> Panel:
    """Markdown."""
    return Panel(kind="text", title=title, question=content, unit="none", width=width, height=height,
                 options={"mode": "markdown", "content": content})


def share(part: Expr, *others: Expr) -> Expr:
    """A part's share of itself and the others."""
    return ratio(part, total(part, *others))


def _one_unit(queries: Sequence[Query]) -> str:
    units = {grafana_unit(one.expr.unit) for one in queries}
    if len(units) != 1:
        raise ValueError(f"One panel has one unit, not {sorted(units)}.")
    return units.pop()


def _value_columns(queries: Sequence[Query]) -> list[str]:
    return [f"Value #{chr(ord('A') + number)}" for number in range(len(queries))] if len(queries) > 1 else ["Value"]


def _column(of: Query) -> list[dict[str, Any]]:
    words = [{"id": "mappings", "value": _mappings(of.words)}] if of.words else []
    return [{"id": "unit", "value": grafana_unit(of.expr.unit)}, {"id": "noValue", "value": "-"}, *words]


def _organized(renamed: Mapping[str, str], hidden: Mapping[str, bool] | None = None,
               order: Sequence[str] = ()) -> dict[str, Any]:
    places = {name: place for place, name in enumerate(order)}
    return {"id": "organize", "options": {"excludeByName": {"Time": True, **(hidden or {})}, "includeByName": {},
                                          "indexByName": places, "renameByName": dict(renamed)}}


def _thresholds(steps: Sequence[Step]) -> dict[str, Any]:
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in steps]}


def _mappings(of: Words) -> list[dict[str, Any]]:
    return [{"type": "value", "options": {str(value): {"text": word, "color": color, "index": index}
                                          for index, (value, (word, color)) in enumerate(of.items())}}]
