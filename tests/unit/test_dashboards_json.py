"""The boards' JSON against Grafana's schemas, the linter's rules and what both forms must have in common."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvobs import dashboards
from tests.dashboard_lint import RULES, drawn, every_panel, lint
from tests.dashboard_schemas import SCHEMAS, schema_errors, unit_names
from tests.promql import parse

Board = dict[str, Any]
BOARDS: dict[str, Board] = {name: json.loads(text) for name, text in dashboards.boards().items()}
SHARED: dict[str, Board] = {name: json.loads(text) for name, text in dashboards.boards("grafana.com").items()}
# Links and provisioning point at these; by hand, since a changed uid breaks them.
UIDS = ["kvobs-overview", "kvobs-kv-cache", "kvobs-allocator", "kvobs-migration", "kvobs-requests", "kvobs-slo-breaker",
        "kvobs-fleet", "kvobs-telemetry"]
NAMES = sorted(BOARDS)


def test_the_eight_boards_keep_their_uids() -> None:
    """Uids are stable, and the file's name is the uid; no board brings a number of its own."""
    assert [board["uid"] for board in BOARDS.values()] == UIDS
    assert list(BOARDS) == [f"{uid}.json" for uid in UIDS]
    assert all(board["id"] is None for board in BOARDS.values())


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_meet_grafanas_schemas(name: str) -> None:
    """Board, panels' options, their fields and queries are what Grafana's official JSON Schemas allow."""
    pytest.importorskip("jsonschema", reason="jsonschema is not installed.")
    if not SCHEMAS.is_dir():
        pytest.skip("The shared folder with Grafana's schemas is not here.")
    assert schema_errors(BOARDS[name]) == []
    assert schema_errors(SHARED[name]) == []
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in drawn(BOARDS[name])} <= unit_names()


def test_the_schemas_refuse_what_is_no_board() -> None:
    """The schema check sees a misspelt option, a missing field and a wrong type, deep within a collapsed row too."""
    pytest.importorskip("jsonschema", reason="jsonschema is not installed.")
    if not SCHEMAS.is_dir():
        pytest.skip("The shared folder with Grafana's schemas is not here.")
    for harm in (_misspelt, _typeless, _wrong_kind):
        board = copy.deepcopy(BOARDS["kvobs-kv-cache.json"])
        harm(board)
        assert schema_errors(board) != [], harm.__name__


def _misspelt(board: Board) -> None:
    every_panel(board)[-1]["options"]["tooltips"] = {}


def _typeless(board: Board) -> None:
    del every_panel(board)[-1]["type"]
    every_panel(board)[-1]["type"] = "timeseries"
    del every_panel(board)[-1]["gridPos"]["h"]


def _wrong_kind(board: Board) -> None:
    board["refresh"] = 30


@pytest.mark.parametrize("name", NAMES)
def test_boards_obey_the_linter(name: str) -> None:
    """None of the fifteen rules has a complaint about any panel, those in collapsed rows included."""
    assert len(RULES) == 15
    assert lint(BOARDS[name]) == []


def _of(board: Board, name: str) -> Board:
    return next(one for one in board["templating"]["list"] if one["name"] == name)


def _panel(board: Board) -> Board:
    return drawn(board)[-1]


def _set(panel: Board, text: str) -> None:
    panel["targets"][0]["expr"] = text


HARM: dict[str, Callable[[Board], object]] = {
    "template-datasource": lambda board: _of(board, "datasource").update(name="source"),
    "template-job": lambda board: _of(board, "job").update(multi=False),
    "template-instance": lambda board: _of(board, "instance").update(allValue=".*"),
    "template-label-promql": lambda board: _of(board, "model").update(query="label_values(up{, model)"),
    "template-on-time-change-reload": lambda board: _of(board, "device").update(refresh=1),
    "panel-datasource": lambda board: _panel(board)["targets"][0].update(
        datasource={"type": "prometheus", "uid": "P1809F7CD0C75ACF3"}),
    "panel-title-description": lambda board: _panel(board).update(description=""),
    "panel-units": lambda board: _panel(board)["fieldConfig"]["defaults"].pop("unit"),
    "panel-no-targets": lambda board: _panel(board).update(targets=[]),
    "target-promql": lambda board: _set(_panel(board), "sum(up"),
    "target-rate-interval": lambda board: _set(
        _panel(board), 'sum (rate(a_total{job=~"$job", instance=~"$instance"}[5m]))'),
    "target-job": lambda board: _set(_panel(board), 'max (up{instance=~"$instance"})'),
    "target-instance": lambda board: _set(_panel(board), 'max (up{job=~"$job"})'),
    "target-counter-agg": lambda board: _set(_panel(board), 'sum (a_total{job=~"$job", instance=~"$instance"})'),
    "uneditable-dashboard": lambda board: board.update(editable=True)}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_of_the_linter_sees_its_harm(rule: str) -> None:
    """A board that breaks one rule is complained about under this rule's name and under no other."""
    board = copy.deepcopy(BOARDS["kvobs-kv-cache.json"])
    HARM[rule](board)
    assert {complaint.split(":")[0] for complaint in lint(board)} == {rule}


@pytest.mark.parametrize("name", NAMES)
def test_the_forms_differ_by_the_data_source_alone(name: str) -> None:
    """The form for grafana.com, with its input replaced by the variable, is the provisioned form."""
    shared = copy.deepcopy(SHARED[name])
    heads = {key: shared.pop(key) for key in list(shared) if key.startswith("__")}
    assert [one["name"] for one in heads["__inputs"]] == ["DS_PROMETHEUS"]
    assert {one["id"] for one in heads["__requires"] if one["type"] == "panel"} == {
        panel["type"] for panel in every_panel(shared)}
    text = json.dumps(shared)
    assert "${datasource}" not in text
    back = json.loads(text.replace("${DS_PROMETHEUS}", "${datasource}"))
    plain = copy.deepcopy(BOARDS[name])
    plain["templating"]["list"] = [one for one in plain["templating"]["list"] if one["name"] != "datasource"]
    assert back == plain


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_numbers_and_titles_of_their_own(name: str) -> None:
    """Ids and titles of panels occur once per board, and what a panel says without data is never empty."""
    panels = every_panel(BOARDS[name])
    rows = [panel for panel in BOARDS[name]["panels"] if panel["type"] == "row"]
    ids = [panel["id"] for panel in (*panels, *rows)]
    titles = [panel["title"] for panel in panels]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)
    assert all(panel["fieldConfig"]["defaults"]["noValue"] for panel in drawn(BOARDS[name]))


@pytest.mark.parametrize("name", NAMES)
def test_no_panel_covers_another(name: str) -> None:
    """Panels lie within the grid's 24 columns and share no cell, each collapsed row looked at by itself."""
    board = BOARDS[name]
    open_panels = [panel for panel in board["panels"] if not panel.get("collapsed")]
    for panels in (open_panels, *(panel["panels"] for panel in board["panels"] if panel.get("collapsed"))):
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not cells & taken, panel["title"]
            taken |= cells


@pytest.mark.parametrize("name", NAMES)
def test_the_strip_stands_first_and_says_who_is_unreachable(name: str) -> None:
    """Every board begins with tiles before its first row, and the first of them counts unreachable targets."""
    kinds = [panel["type"] for panel in BOARDS[name]["panels"]]
    strip = kinds[:kinds.index("row")]
    assert len(strip) >= 6
    assert set(strip) == {"stat"}
    assert BOARDS[name]["panels"][0]["title"] == "Unreachable"


def test_a_tile_shows_one_number() -> None:
    """What a tile asks for is joined over all labels: it never shows the first of several series."""
    for board in BOARDS.values():
        for panel in drawn(board):
            if panel["type"] == "stat":
                [target] = panel["targets"]
                tree = parse(target["expr"])
                ends = [tree] if tree.kind == "aggregation" else [
                    node for node, _ in tree.walk() if node.kind == "aggregation" and node.labels not in ((), ("le",))]
                assert all(node.labels == () for node in ends), panel["title"]
                assert target["instant"] is True
                assert target["range"] is False


def test_rows_stand_in_causal_order() -> None:
    """The overview goes from the symptom to its cause and remedy; optional rows are collapsed and stand last."""
    rows = [panel["title"].split(":")[0] for panel in BOARDS["kvobs-overview.json"]["panels"] if panel["type"] == "row"]
    assert rows == ["Symptom", "Pressure", "Fragmentation", "Re-allocation", "Migration", "Breaker",
                    "Health of the telemetry itself"]
    for board in BOARDS.values():
        collapsed = [panel["collapsed"] for panel in board["panels"] if panel["type"] == "row"]
        assert collapsed == sorted(collapsed)


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_name_question_metric_and_formula(name: str) -> None:
    """A panel's description begins with a question, and names every metric that it reads with its formula."""
    for panel in drawn(BOARDS[name]):
        description = panel["description"]
        assert description.split("\n\n")[0].endswith("?"), panel["title"]
        assert "Formula: " in description, panel["title"]


def test_the_latency_heatmap_has_the_line() -> None:
    """The heatmap names the edge at 12 ms."""
    board = BOARDS["kvobs-allocator.json"]
    [panel] = [panel for panel in every_panel(board) if panel["type"] == "heatmap"]
    assert panel["targets"][0]["format"] == "heatmap"
    [edge] = panel["fieldConfig"]["overrides"]
    assert edge["matcher"] == {"id": "byName", "options": "0.012"}
    assert edge["properties"] == [{"id": "displayName", "value": "12 ms = objective"}]


def test_exemplars_lead_to_traces_and_ordinary_points_do_not() -> None:
    """Where exemplars are asked for, the field trace_id alone links to its trace; nothing else links to one."""
    asking = 0
    for board in BOARDS.values():
        assert [_of(board, name)["type"] for name in ("jaeger", "service")] == ["textbox", "textbox"]
        for panel in drawn(board):
            exemplars = any(target["exemplar"] for target in panel["targets"])
            asking += exemplars
            links = {(one["matcher"]["id"], one["matcher"]["options"]): change["value"]
                     for one in panel["fieldConfig"]["overrides"] for change in one["properties"]
                     if change["id"] == "links"}
            assert "links" not in panel["fieldConfig"]["defaults"], panel["title"]
            assert links == ({("byName", "trace_id"): [
                {"title": "Trace in Jaeger", "url": "${jaeger}/trace/${__value.raw}", "targetBlank": True}]}
                if exemplars else {}), panel["title"]
            assert [link["url"].partition("&")[0] for link in panel.get("links", ())] == (
                ["${jaeger}/search?service=${service}"] if exemplars else []), panel["title"]
    assert asking >= 4


def test_only_histograms_of_turns_are_asked_for_exemplars() -> None:
    """An exemplar is a turn's trace: what is observed outside a turn, as allocations and moves are, has none."""
    asked = {node.name.removesuffix("_bucket") for board in BOARDS.values() for panel in drawn(board)
             for target in panel["targets"] if target["exemplar"] for node, _ in parse(target["expr"]).series()}
    assert asked == {f"gen_ai_server_{name}_seconds" for name in (
        "request_duration", "time_to_first_token", "time_per_output_token")}


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_say_of_which_time_a_point_tells(name: str) -> None:
    """Per second is said where a rate is drawn as one and nowhere else; a count within a window is called that."""
    for panel in drawn(BOARDS[name]):
        texts, description = [target["expr"] for target in panel["targets"]], panel["description"]
        calls = [{node.name for node, _ in parse(text).walk()} for text in texts]
        assert ("Counts are those within" in description) == any("increase" in one for one in calls), panel["title"]
        windows = {"rate", "increase", "max_over_time"} & set().union(*calls)
        assert ("$__rate_interval" in description) == bool(windows), panel["title"]
        if "rate" not in set().union(*calls):
            assert "per second" not in description.split("Formula: ")[-1], panel["title"]


def test_only_what_adds_up_is_stacked() -> None:
    """Every process tells of its whole device: areas of processes that share one are not put upon each other."""
    stacked = {panel["title"] for board in BOARDS.values() for panel in drawn(board)
               if panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
               and any("kvobs_device_memory_bytes" in target["expr"] for target in panel["targets"])}
    assert stacked == set()
