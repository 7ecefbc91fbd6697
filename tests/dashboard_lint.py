"""The rules of Grafana's dashboard-linter that apply, over a board's JSON alone. Written anew from their descriptions.

Unlike there, no panel is let off for its kind: heatmaps, timelines and bars have to obey as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.promql import Node, parse

Board = dict[str, Any]
SOURCE = "${datasource}"
COUNTERS = ("_total", "_sum", "_count", "_bucket")
GROWTH = ("rate", "irate", "increase")


def every_panel(board: Board) -> list[Board]:
    """All panels of a board's JSON but the rows, those inside collapsed rows included."""
    found: list[Board] = []
    for panel in board["panels"]:
        found += panel.get("panels", ()) if panel["type"] == "row" else [panel]
    return found


def drawn(board: Board) -> list[Board]:
    """The panels that show data."""
    return [panel for panel in every_panel(board) if panel["type"] != "text"]


def expressions(board: Board) -> Iterator[tuple[str, str]]:
    """Where each expression is, and its text; those of annotations too."""
    for panel in drawn(board):
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for annotation in board["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]


def variables(board: Board) -> dict[str, Board]:
    """The board's variables by name."""
    return {one["name"]: one for one in board["templating"]["list"]}


def _queried(board: Board) -> list[Board]:
    return [one for one in board["templating"]["list"] if one["type"] == "query"]


def _template_datasource(board: Board) -> Iterator[str]:
    sources = [one for one in board["templating"]["list"] if one["type"] == "datasource"]
    if [(one["name"], one["label"], one["query"]) for one in sources] != [("datasource", "Data source", "prometheus")]:
        yield "there is not exactly one data source variable, named datasource and labelled Data source"


def _template(name: str) -> Callable[[Board], Iterator[str]]:
    def check(board: Board) -> Iterator[str]:
        found = variables(board).get(name)
        if found is None:
            yield f"the variable {name} is missing"
        elif (found["type"], found["label"], found["multi"], found["includeAll"], found["allValue"],
              found["datasource"]["uid"]) != ("query", name.title(), True, True, ".+", SOURCE):
            yield f"the variable {name} is not a multiple choice over {SOURCE} with an all value of .+"

    return check


def _template_label_promql(board: Board) -> Iterator[str]:
    for one in _queried(board):
        match = re.fullmatch(r"label_values\((.+), *(\w+)\)", one["query"])
        try:
            asked = None if match is None else parse(match[1])
        except ValueError as error:
            yield f"the variable {one['name']} does not parse: {error}"
            continue
        if asked is None or asked.kind != "series":
            yield f"the variable {one['name']} asks for no label of a selector"


def _template_reload(board: Board) -> Iterator[str]:
    yield from (f"the variable {one['name']} is not read again when the time changes" for one in _queried(board)
                if one["refresh"] != 2)


def _panel_datasource(board: Board) -> Iterator[str]:
    places = [(panel["title"], panel["datasource"]) for panel in drawn(board)]
    places += [(panel["title"], target["datasource"]) for panel in drawn(board) for target in panel["targets"]]
    places += [(one["name"], one["datasource"]) for one in board["annotations"]["list"]]
    for title, source in places:
        if source != {"type": "prometheus", "uid": SOURCE}:
            yield f"{title} has a fixed data source"


def _panel_title_description(board: Board) -> Iterator[str]:
    yield from (f"panel {panel['id']} has no title or no description" for panel in drawn(board)
                if not panel.get("title") or not panel.get("description"))


def _panel_units(board: Board) -> Iterator[str]:
    yield from (f"{panel['title']} has no unit" for panel in drawn(board)
                if not panel["fieldConfig"]["defaults"].get("unit"))


def _panel_no_targets(board: Board) -> Iterator[str]:
    yield from (f"{panel['title']} has no query" for panel in drawn(board) if not panel.get("targets"))


def parsed(board: Board) -> list[tuple[str, Node]]:
    """Every expression that parses, with its place."""
    found = []
    for place, text in expressions(board):
        try:
            found.append((place, parse(text)))
        except ValueError:
            continue
    return found


def _target_promql(board: Board) -> Iterator[str]:
    for place, text in expressions(board):
        try:
            parse(text)
        except ValueError as error:
            yield f"{place} does not parse: {error}"


def _target_rate_interval(board: Board) -> Iterator[str]:
    for place, tree in parsed(board):
        yield from (f"{place} looks back over [{one.range}]" for one, _ in tree.walk()
                    if one.range and one.range != "$__rate_interval")


def _target_label(name: str) -> Callable[[Board], Iterator[str]]:
    def check(board: Board) -> Iterator[str]:
        for place, tree in parsed(board):
            yield from (f"{place}: {one.name} is not narrowed by ${name}" for one, _ in tree.series()
                        if (name, "=~", f"${name}") not in one.matchers)

    return check


def _target_counter_agg(board: Board) -> Iterator[str]:
    for place, tree in parsed(board):
        for one, above in tree.series():
            if one.name.endswith(COUNTERS) and not (above and above[-1].kind == "call" and above[-1].name in GROWTH):
                yield f"{place}: the counter {one.name} is read as it is"


def _uneditable(board: Board) -> Iterator[str]:
    if board["editable"] is not False:
        yield "the board can be edited"


RULES: dict[str, Callable[[Board], Iterator[str]]] = {
    "template-datasource": _template_datasource, "template-job": _template("job"),
    "template-instance": _template("instance"), "template-label-promql": _template_label_promql,
    "template-on-time-change-reload": _template_reload, "panel-datasource": _panel_datasource,
    "panel-title-description": _panel_title_description, "panel-units": _panel_units,
    "panel-no-targets": _panel_no_targets, "target-promql": _target_promql,
    "target-rate-interval": _target_rate_interval, "target-job": _target_label("job"),
    "target-instance": _target_label("instance"), "target-counter-agg": _target_counter_agg,
    "uneditable-dashboard": _uneditable}


def lint(board: Board) -> list[str]:
    """What the rules complain about: each with the rule's name."""
    return [f"{name}: {complaint}" for name, rule in RULES.items() for complaint in rule(board)]
