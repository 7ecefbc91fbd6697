"""The boards' queries: they parse, name only what the catalog has, and add up only what may be added up."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvobs import dashboards
from kvobs.catalog import ROWS
from tests.dashboard_faults import faults, metrics_of
from tests.dashboard_lint import drawn, expressions, lint
from tests.promql import Node, parse
from tests.support import program

Board = dict[str, Any]
BOARDS: dict[str, Board] = {name: json.loads(text) for name, text in dashboards.boards().items()}
NAMES = sorted(BOARDS)
HERE = 'job=~"$job", instance=~"$instance"'


def without_variables(text: str) -> str:
    """An expression as Grafana sends it, with everything chosen."""
    return re.sub(r"\$(?:job|instance)\b", ".+", re.sub(r"\$(?:model|device)\b", ".*",
                                                        text.replace("$__rate_interval", "1m")))


def test_prometheus_parses_every_expression(tmp_path: Path) -> None:
    """promtool takes all expressions of all boards, annotations included, as recording rules."""
    texts = [without_variables(text) for board in BOARDS.values() for _, text in expressions(board)]
    assert len(texts) > 250
    assert not any("$" in text for text in texts)
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "boards", "rules": [
        {"record": f"board:number:{number}", "expr": text} for number, text in enumerate(texts)]}]}))
    done = subprocess.run([program("promtool", "prometheus"), "check", "rules", str(file)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(texts)} rules found" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_boards_say_nothing_that_the_catalog_forbids(name: str) -> None:
    """Names and labels are the catalog's; nothing is summed that must not be; no denominator can be 0."""
    assert faults(BOARDS[name]) == []


def test_every_metric_is_charted_or_waived() -> None:
    """Each metric of the catalog is read by some expression of some board, or waived with a reason, never both."""
    charted = set().union(*(metrics_of(board) for board in BOARDS.values()))
    waived = dashboards.WAIVED
    assert charted | waived.keys() == {row.name for row in ROWS}
    assert charted.isdisjoint(waived)
    assert all(len(reason.split()) >= 5 for reason in waived.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_tile_reads_what_its_panel_says(name: str) -> None:
    """The rows that a panel's description names are exactly the metrics that its expressions read."""
    for panel in drawn(BOARDS[name]):
        read = metrics_of({"panels": [panel], "annotations": {"list": []}})
        named = {row.name for row in ROWS if re.search(rf"^{re.escape(_prometheus(row.name))}: ", panel["description"],
                                                       re.MULTILINE)}
        assert named == read, panel["title"]


def _prometheus(name: str) -> str:
    from kvobs.catalog import BY_NAME, prometheus_name
    return prometheus_name(BY_NAME[name])


def _planted(text: str, name: str = "kvobs-overview.json") -> Board:
    board = copy.deepcopy(BOARDS[name])
    drawn(board)[-1]["targets"][0]["expr"] = text
    return board


def test_a_planted_rename_is_caught() -> None:
    """Had the catalog renamed a metric, every board that still says the old name would be named, with the panel."""
    for name, board in BOARDS.items():
        text = json.dumps(board)
        old = sorted(set(re.findall(r"\b(?:kvobs|gen_ai)_\w+(?=\{)", text)))
        for metric in old[:3]:
            found = faults(json.loads(re.sub(rf"\b{metric}\b(?=\{{)", f"{metric}_old", text)))
            assert found, (name, metric)
            assert all(f"{metric}_old is no metric of the catalog" in fault for fault in found)


@pytest.mark.parametrize(("expression", "fault"), [
    (f"sum by (device) (kvobs_window_fragmentation_ratio{{{HERE}}})", "sum over kvobs_window_fragmentation_ratio"),
    (f"avg (kvobs_engine_kv_utilization_ratio{{{HERE}}})", "avg over kvobs_engine_kv_utilization_ratio"),
    (f"sum (hw_gpu_memory_usage_bytes{{{HERE}}})", "of which the catalog allows the max"),
    (f"sum (rate(hw_energy_joules_total{{{HERE}}}[$__rate_interval]))", "of which the catalog allows the max"),
    (f"max (kvobs_window_largest_free_bytes{{{HERE}}})", "of which the catalog allows the min"),
    (f"sum (sum by (instance) (kvobs_kv_caches{{{HERE}}}) / (sum by (instance) (kvobs_kv_caches{{{HERE}}}) > 0))",
     "shares are not added up"),
    (f"avg by (job) (2 * (max by (job, instance) (kvobs_kv_caches{{{HERE}}}) / 3))", "shares are not added up"),
    (f"sum (kvobs_kv_caches{{{HERE}}}) / sum (kvobs_kv_caches{{{HERE}}})", "a denominator may be 0"),
    (f"sum (kvobs_kv_caches{{{HERE}}}) / (sum (kvobs_kv_caches{{{HERE}}}) > bool 0)", "a denominator may be 0"),
    (f"sum by (region) (kvobs_kv_caches{{{HERE}}})", "kvobs_kv_caches has no label region"),
    (f'sum (kvobs_kv_caches{{{HERE}, state="held"}})', "kvobs_kv_caches has no label state"),
    (f"sum (rate(kvobs_alloc_latency_seconds_total{{{HERE}}}[$__rate_interval]))", "is no metric of the catalog"),
    (f'sum (kvobs_kv_usage_bytes{{{HERE}, state="keeping"}})', "may be keeping"),
    (f'sum (rate(kvobs_turns_total{{{HERE}, outcome=~"error|crashed"}}[$__rate_interval]))', "may be crashed"),
    (f"kvobs_kv_caches{{{HERE}}}", "kvobs_kv_caches is not aggregated"),
    (f"sum (rate(kvobs_engine_tokens_total{{{HERE}}}[$__rate_interval]))", "added up over targets"),
])
def test_planted_lies_are_caught(expression: str, fault: str) -> None:
    """A sum of shares, a mean across ranks, a wrong rank, an unguarded denominator or a foreign label is named."""
    assert any(fault in one for one in faults(_planted(expression)))


def test_a_planted_fixed_data_source_is_caught() -> None:
    """A panel, a query, a variable or an annotation with a data source of its own is named."""
    for place in range(4):
        board = copy.deepcopy(BOARDS["kvobs-overview.json"])
        where = (drawn(board)[3], drawn(board)[5]["targets"][0], board["templating"]["list"][1],
                 board["annotations"]["list"][0])[place]
        where["datasource"] = {"type": "prometheus", "uid": "P1809F7CD0C75ACF3"}
        assert len(lint(board)) == 1, place


@pytest.mark.parametrize("text", ["sum(", "up)", "sum by (a (up)", "up{a=}", "1 +", "rate(up[5m]", "up $ 3", ""])
def test_the_reader_of_promql_refuses_what_prometheus_refuses(text: str, tmp_path: Path) -> None:
    """What does not parse is an error to the tests' own reader, as it is to promtool."""
    with pytest.raises(ValueError, match=r"is expected|cannot begin|left over|no token"):
        parse(text)
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "a", "rules": [{"record": "a:b", "expr": text}]}]}))
    assert subprocess.run([program("promtool", "prometheus"), "check", "rules", str(file)],
                          capture_output=True).returncode != 0


def test_the_reader_of_promql_sees_precedence_and_place() -> None:
    """A tree written by hand: guards, aggregations, ranges and matchers are where the language puts them."""
    def of(name: str, **matchers: str) -> Node:
        return Node("series", name, matchers=tuple((label, "=", value) for label, value in matchers.items()))

    counted = Node("aggregation", "sum", (Node("call", "rate", (
        Node("series", "a", matchers=(("x", "=", "1"),), range="5m"),)),), ("y", "z"))
    guard = Node("binary", ">", (of("b"), Node("number", "0")))
    assert parse('sum by (y, z) (rate(a{x="1"}[5m])) / (b > 0) or c - d * 2') == Node("binary", "or", (
        Node("binary", "/", (counted, guard)),
        Node("binary", "-", (of("c"), Node("binary", "*", (of("d"), Node("number", "2")))))))
