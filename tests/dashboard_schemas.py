"""Grafana's official JSON Schemas, as a shared folder has them."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.dashboard_lint import every_panel
from tests.support import ROOT

SCHEMAS = ROOT.parent / "shared" / "schemas" / "grafana"
# What the schemas leave open: the options and the custom part of the fields of each kind of panel.
KINDS = {"stat": "stat", "timeseries": "timeseries", "heatmap": "heatmap", "state-timeline": "statetimeline",
         "table": "table", "barchart": "barchart", "text": "text"}


@lru_cache
def _schema(name: str, folder: Path = SCHEMAS) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / f"{name}.jsonschema.json").read_text(encoding="utf-8"))
    for definition, key in (("DynamicConfigValue", "value"), ("MatcherConfig", "options")):
        if definition in loaded["definitions"]:  # of any type in Grafana's source; the schemas' generator lost that
            loaded["definitions"][definition]["properties"][key] = {}
    return loaded


def _errors(schema: dict[str, Any], definition: str, value: object) -> list[str]:
    import jsonschema

    schema = {key: part for key, part in schema.items() if key != "$ref"}
    validator = jsonschema.Draft7Validator({**schema, "allOf": [{"$ref": f"#/definitions/{definition}"}]})
    return [f"{definition}: {'/'.join(map(str, one.absolute_path))}: {one.message[:200]}"
            for one in validator.iter_errors(value)]


def schema_errors(board: dict[str, Any]) -> list[str]:
    """What the official schemas refuse in a board's JSON; ``__inputs`` and the like are not theirs."""
    plain = {key: value for key, value in board.items() if not key.startswith("__")}
    found = _errors(_schema("dashboard"), "Dashboard", plain)
    for panel in every_panel(board):
        schema = _schema(KINDS[panel["type"]])
        found += [f"{panel['title']}: {one}" for one in _errors(schema, "Options", panel["options"])]
        custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom")
        if custom is not None and "FieldConfig" in schema["definitions"]:
            found += [f"{panel['title']}: {one}" for one in _errors(schema, "FieldConfig", custom)]
        for target in panel.get("targets", ()):
            found += [f"{panel['title']}: {one}" for one in _errors(_schema("prometheus"), "Dataquery", target)]
    return found


def unit_names() -> set[str]:
    """Every unit that Grafana knows."""
    return {one["const"] for one in _schema("units")["definitions"].values() if "const" in one}
