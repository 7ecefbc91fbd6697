"""Boards as Grafana's JSON: to be provisioned, or to be shared on grafana.com, where inputs name the data source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from kvobs.catalog import prometheus_name
from kvobs.dashboards._model import Board, Panel
from kvobs.dashboards._promql import UP, changes, row
from kvobs.dashboards._text import description

Form = Literal["provisioned", "grafana.com"]
FORMS: tuple[Form, ...] = ("provisioned", "grafana.com")
TAG = "kvobs"
SCHEMA = 39  # of Grafana 10.3 and newer
OLDEST = "10.3.0"
JAEGER = "http://localhost:16686"
SERVICE = "unknown_service"  # OpenTelemetry's where OTEL_SERVICE_NAME says nothing
INPUT = "DS_PROMETHEUS"
_NAMES = {"stat": "Stat", "timeseries": "Time series", "heatmap": "Heatmap", "state-timeline": "State timeline",
          "table": "Table", "barchart": "Bar chart", "text": "Text"}
WIDTH = 24


def text(board: Board, form: Form = "provisioned") -> str:
    """The board's file."""
    return json.dumps(document(board, form), indent=1, ensure_ascii=False) + "\n"


def document(board: Board, form: Form = "provisioned") -> dict[str, Any]:
    """The board as Grafana reads it."""
    shared = form == "grafana.com"
    source = {"type": "prometheus", "uid": f"${{{INPUT}}}" if shared else "${datasource}"}
    panels = list(_placed(board, source))
    head: dict[str, Any] = {"__inputs": _inputs(), "__elements": {}, "__requires": _requires(board)} if shared else {}
    variables = _variables(source)
    return {**head, "id": None, "uid": board.uid, "title": f"kvobs / {board.title}", "description": board.description,
            "tags": [TAG], "editable": False, "graphTooltip": 1, "timezone": "browser", "schemaVersion": SCHEMA,
            "version": 1, "refresh": "30s", "time": {"from": "now-1h", "to": "now"}, "timepicker": {},
            "fiscalYearStartMonth": 0, "weekStart": "",
            "links": [{"title": "kvobs", "type": "dashboards", "icon": "external link", "tooltip": "", "tags": [TAG],
                       "asDropdown": True, "targetBlank": False, "includeVars": True, "keepTime": True, "url": ""}],
            "templating": {"list": variables if shared else [_datasource(), *variables]},
            "annotations": {"list": _annotations(source)}, "panels": panels}


def _placed(board: Board, source: dict[str, str]) -> Iterator[dict[str, Any]]:
    numbers = iter(range(1, 1000))
    drawn, y = _flow(board.strip, 0, source, numbers, board.points)
    yield from drawn
    for section in board.sections:
        panels, bottom = _flow(section.panels, y + 1, source, numbers, board.points)
        head = {"type": "row", "id": next(numbers), "title": section.title, "collapsed": section.collapsed,
                "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y}, "panels": panels if section.collapsed else []}
        yield from (head,) if section.collapsed else (head, *panels)
        y = y + 1 if section.collapsed else bottom


def _flow(panels: tuple[Panel, ...], y: int, source: dict[str, str], numbers: Iterator[int],
          points: int) -> tuple[list[dict[str, Any]], int]:
    """The panels from row ``y`` of the grid on, and the first row below them."""
    drawn: list[dict[str, Any]] = []
    x = tallest = 0
    for panel in panels:
        if x + panel.width > WIDTH:
            x, y, tallest = 0, y + tallest, 0
        drawn.append(_panel(panel, next(numbers), {"h": panel.height, "w": panel.width, "x": x, "y": y}, source,
                            points))
        x, tallest = x + panel.width, max(tallest, panel.height)
    return drawn, y + tallest


def _panel(panel: Panel, number: int, at: dict[str, int], source: dict[str, str], points: int) -> dict[str, Any]:
    common = {"id": number, "type": panel.kind, "title": panel.title, "gridPos": at, "options": panel.options}
    if panel.kind == "text":
        return common
    now = panel.kind in ("stat", "table", "barchart")
    heat = panel.kind == "heatmap"
    targets = [{"refId": chr(ord("A") + index), "datasource": source, "expr": one.expr.text,
                "legendFormat": "{{le}}" if heat else one.name, "editorMode": "code", "instant": now, "range": not now,
                "exemplar": one.exemplars,
                "format": "heatmap" if heat else "table" if panel.kind in ("table", "barchart") else "time_series"}
               for index, one in enumerate(panel.queries)]
    return {**common, "description": description(panel), "datasource": source, "targets": targets,
            "fieldConfig": {"defaults": {"unit": panel.unit, "noValue": panel.absent, **panel.defaults},
                            "overrides": list(panel.overrides)},
            **({"maxDataPoints": points} if points and not now else {}),
            **({"transformations": list(panel.transformations)} if panel.transformations else {}),
            **({"links": list(panel.links)} if panel.links else {})}


def _annotations(source: dict[str, str]) -> list[dict[str, Any]]:
    return [{"name": "Breaker", "enable": True, "hide": False, "iconColor": "orange", "datasource": source,
             "expr": changes("kvobs.breaker.level", "instance", "scope", "mode").text, "step": "15s",
             "titleFormat": "Breaker {{scope}}", "tagKeys": "instance,mode",
             "textFormat": "The level of {{scope}} changed on {{instance}} (mode {{mode}})."}]


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "regex": "",
            "hide": 0, "multi": False, "includeAll": False, "refresh": 1, "options": [], "skipUrlSync": False}


def _variables(source: dict[str, str]) -> list[dict[str, Any]]:
    here = 'job=~"$job", instance=~"$instance"'
    models = "|".join(prometheus_name(row(name)) for name in (
        "kvobs.kv.usage", "kvobs.turns", "kvobs.requests", "kvobs.engine.requests"))
    devices = "|".join(prometheus_name(row(name)) for name in (
        "kvobs.kv.usage", "kvobs.alloc.operations", "kvobs.allocator.usage", "kvobs.device.memory"))
    return [_query("job", "Job", prometheus_name(row("kvobs.availability")), ".+", source, "kvobs"),
            _query("instance", "Instance", f'{UP.name}{{job=~"$job"}}', ".+", source),
            _query("model", "Model", f'{{__name__=~"{models}", {here}}}', ".*", source),
            _query("device", "Device", f'{{__name__=~"{devices}", {here}}}', ".*", source),
            _textbox("jaeger", "Jaeger", JAEGER), _textbox("service", "Service in Jaeger", SERVICE)]


def _textbox(name: str, label: str, value: str) -> dict[str, Any]:
    return {"name": name, "label": label, "type": "textbox", "query": value, "hide": 0, "skipUrlSync": False,
            "current": {"text": value, "value": value}, "options": [{"selected": True, "text": value, "value": value}]}


def _query(name: str, label: str, selector: str, everything: str, source: dict[str, str],
           chosen: str = "") -> dict[str, Any]:
    asked = f"label_values({selector}, {name})"
    current = ({"selected": True, "text": [chosen], "value": [chosen]} if chosen
               else {"selected": True, "text": ["All"], "value": ["$__all"]})
    return {"name": name, "label": label, "type": "query", "datasource": source, "query": asked, "definition": asked,
            "multi": True, "includeAll": True, "allValue": everything, "refresh": 2, "sort": 1, "regex": "", "hide": 0,
            "options": [], "skipUrlSync": False, "current": current}


def _inputs() -> list[dict[str, str]]:
    return [{"name": INPUT, "label": "Prometheus", "description": "The Prometheus that scrapes kvobs",
             "type": "datasource", "pluginId": "prometheus", "pluginName": "Prometheus"}]


def _requires(board: Board) -> list[dict[str, str]]:
    kinds = sorted({panel.kind for panel in board.panels})
    return [{"type": "grafana", "id": "grafana", "name": "Grafana", "version": OLDEST},
            {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
            *({"type": "panel", "id": kind, "name": _NAMES[kind], "version": ""} for kind in kinds)]
