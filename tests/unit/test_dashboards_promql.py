"""Queries as functions of rows: what the catalog does not allow cannot be written."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from kvobs.dashboards import _promql as promql
from kvobs.dashboards._panels import lines
from kvobs.dashboards._promql import Expr, quantile, rate, ratio, state, within
from kvobs.dashboards._units import grafana_unit

HERE = 'job=~"$job", instance=~"$instance"'
REFUSED: dict[str, Callable[[], object]] = {
    "kvobs.kv.usages": lambda: state("kvobs.kv.usages"),
    "is a counter, not a gauge": lambda: state("kvobs.kv.written"),
    "is joined across ranks by its sum, not by its max": lambda: promql.highest("kvobs.kv.usage"),
    "is a gauge, not a counter": lambda: rate("kvobs.kv.usage"),
    "is a counter, not a histogram": lambda: quantile(0.5, "kvobs.kv.written"),
    "has no label region": lambda: state("kvobs.kv.usage", "region"),
    "has no label level": lambda: state("kvobs.kv.usage", level="3"),
    "a sum over targets may count an engine twice": lambda: rate("kvobs.engine.tokens"),
    "has no bucket that ends at 0.013": lambda: within(0.013, "kvobs.alloc.latency"),
    "a share needs equal units": lambda: ratio(rate("kvobs.migration.io"), rate("kvobs.migration.operations")),
    "allowed are equal labels": lambda: ratio(rate("kvobs.turns", "outcome"), rate("kvobs.turns")),
    "Parts of one expression differ": lambda: promql.total(state("kvobs.kv.usage"), state("kvobs.kv.caches")),
    "One panel has one unit": lambda: lines("a", "b?", state("kvobs.kv.usage"), state("kvobs.kv.caches")),
    "No unit of Grafana is known for 's2'": lambda: grafana_unit("s2"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_the_catalog_does_not_allow_is_an_error(words: str) -> None:
    """An unknown name, a wrong kind, a foreign label or mixed units end the build with a word on what is wrong."""
    with pytest.raises((ValueError, KeyError), match=re.escape(words)):
        REFUSED[words]()


@pytest.mark.parametrize(("name", "operator"), [
    ("kvobs.kv.usage", "sum"), ("kvobs.window.fragmentation", "max"), ("kvobs.window.largest_free", "min"),
    ("hw.gpu.memory.usage", "max"), ("kvobs.slo.budget", "min")])
def test_ranks_are_joined_as_the_catalog_says(name: str, operator: str) -> None:
    """The aggregation of a gauge is that of its row."""
    assert state(name).text.startswith(f"{operator} (")


def test_variables_narrow_where_the_label_is() -> None:
    """Every selector is narrowed by job and instance, and by model and device where the metric has these."""
    assert promql.series(promql.row("kvobs.step.tokens"), phase="decode") == (
        f'kvobs_step_tokens_total{{{HERE}, model=~"$model", device=~"$device", phase="decode"}}')
    assert promql.series(promql.row("gen_ai.server.request.duration"), "_count") == (
        f'gen_ai_server_request_duration_seconds_count{{{HERE}, gen_ai_request_model=~"$model"}}')
    assert promql.series(promql.UP) == f"up{{{HERE}}}"


@pytest.mark.parametrize(("text", "wrapped"), [
    ("sum by (a) (b - c)", False), ("a - b", True), ("(a - b) / (c > 0)", True), ('a{b=~"x or y"}', False),
    ("a or b", True), ("max (a) > 0", True), ("rate(a[1m])", False)])
def test_parts_are_put_in_parentheses_where_needed(text: str, wrapped: bool) -> None:
    """A part that ends in an operator's reach is enclosed; one that is closed by itself is not."""
    inner = promql.less(Expr("x", (), (), "1"), Expr(text, (), (), "1")).text
    assert inner == (f"x - ({text})" if wrapped else f"x - {text}")


@pytest.mark.parametrize(("ucum", "grafana"), [("By", "bytes"), ("By/s", "binBps"), ("s", "s"), ("1", "percentunit"),
                                               ("{block}", "short"), ("{block}/s", "cps"), ("{request}/s", "reqps"),
                                               ("Cel", "celsius"), ("W", "watt"), ("J/s", "watt")])
def test_units_are_grafanas(ucum: str, grafana: str) -> None:
    """The catalog's units, and what becomes of them per second, have the names that Grafana gives them."""
    assert grafana_unit(ucum) == grafana
