"""The boards before a real Prometheus that has scraped real processes through scripted incidents."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (extra prometheus).")
pytest.importorskip("opentelemetry.proto", reason="The OTLP exporters are not installed (extra otel).")
pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers", reason="transformers is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators",
                    reason="This transformers is older than 5.18; kvobs follows its continuous batching from there on.")

from kvobs.catalog import ROWS, prometheus_name
from kvobs.dashboards import WAIVED
from tests.dashboards import incidents
from tests.dashboards.answers import before, during, has_values, silent, told_by
from tests.dashboards.boards import GENERATED, Target, annotations, metrics_in, named, replaced, targets
from tests.dashboards.coverage import matrix, recorded
from tests.dashboards.explanations import EXPLAINED, SAME
from tests.dashboards.harness import RULES, Played, Server, prometheus
from tests.dashboards.waivers import reason, waivers
from tests.support import wait_until
from tests.vgpu import needs_vgpu

pytestmark = [pytest.mark.slow, pytest.mark.peer, pytest.mark.torch, needs_vgpu()]
RECORDED = "KVOBS_TEST_INCIDENTS"  # a directory that was played before, for who works on the boards


class Live(NamedTuple):
    """A Prometheus that saw it all, and what was played."""

    server: Server
    played: dict[str, Played]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The incidents, played once for all tests of this module."""
    if directory := os.environ.get(RECORDED):
        with prometheus(Path(directory), rules=RULES) as server:
            yield Live(server, recorded(Path(directory)))
        return
    with incidents.played(tmp_path_factory.mktemp("incidents")) as (server, played):
        yield Live(server, played)


def unanswered(live: Live, found: list[Target]) -> list[str]:
    """The queries that have data in no scenario although all that they read may be expected here."""
    given = waivers(vllm="vllm" in live.played)
    names = {prometheus_name(row): row.name for row in ROWS}
    return [target.name for target in silent(live.server, found, live.played)
            if not any(reason(names[name], given) for name in metrics_in(target.expr, list(names)))]


def test_every_query_returns_data(live: Live) -> None:
    """Each query of each panel has numbers in a scenario, unless it reads what is waived here for a reason."""
    assert len(targets()) > 200
    assert unanswered(live, targets()) == []


def test_annotations_mark_the_incidents(live: Live) -> None:
    """Each annotation has a mark in a scenario."""
    missing = [name for name, expr in annotations().items() if not any(
        has_values(live.server.range(replaced(expr, instances=one.matcher()), one.begin, one.end))
        for one in live.played.values())]
    assert annotations()
    assert missing == []


def test_every_waiver_is_needed(live: Live) -> None:
    """A metric that is waived here was told by no live process."""
    given = waivers(vllm="vllm" in live.played)
    covered = matrix(live.server, live.played)
    assert {one.row.name: one.scenarios for one in covered if one.waived and one.scenarios} == {}
    assert [pattern for pattern in given if not any(reason(one.row.name, {pattern: ""}) == "" for one in covered)] == []


def test_every_metric_is_charted_and_seen(live: Live) -> None:
    """Each metric of the catalog is read by a query and told by a live process, or waived by name."""
    covered = matrix(live.server, live.played)
    assert {one.row.name for one in covered if not one.panels} == set(WAIVED)
    assert [one.row.name for one in covered if not one.scenarios and not one.waived] == []


@pytest.mark.parametrize("scenario", EXPLAINED)
def test_the_incident_explains_itself(live: Live, scenario: str) -> None:
    """The panels that must move do, by as much as they must, and those that must not stay where they are."""
    if scenario not in live.played:
        pytest.skip(f"{scenario} was not played: KVOBS_TEST_VLLM names no environment.")
    one = live.played[scenario]
    wrong = []
    for says in EXPLAINED[scenario]:
        target = named(says.board, says.panel, says.ref)
        was, is_ = before(live.server, target, one), during(live.server, target, one)
        if not says.holds(was, is_):
            wrong.append(f"{says.board} / {says.panel} / {says.ref} {says.relation} {says.value:g} (x{says.times:g}): "
                         f"before {was}, in the incident {is_}")
    assert wrong == []


def test_what_moves_in_an_incident_does_not_move_in_the_calm(live: Live) -> None:
    """No panel that tells of an incident moves as much while nothing happens."""
    calm = live.played["calm"]
    moving = {says for scenario, told in EXPLAINED.items() for says in told if says.moves}
    meant = {says: named(says.board, says.panel, says.ref) for says in moving}
    moved = [says for says, target in meant.items()
             if says.holds(before(live.server, target, calm), during(live.server, target, calm))]
    assert len(moving) > 20
    assert moved == []


def test_no_incident_is_taken_for_another(live: Live) -> None:
    """What the panels say in an incident fits its own explanation and no other incident's."""
    told = {name: says for name, says in EXPLAINED.items() if name in live.played and any(one.moves for one in says)}

    def fits(explanation: str, one: Played) -> bool:
        """Whether all that is said holds; the panels that move are looked at first."""
        asked = ((says, named(says.board, says.panel, says.ref)) for says in
                 sorted(told[explanation], key=lambda says: not says.moves))
        return all(says.holds(before(live.server, target, one), during(live.server, target, one))
                   for says, target in asked)

    mistaken = [(explanation, name) for explanation in told for name in live.played
                if SAME.get(name, name) != explanation != name and fits(explanation, live.played[name])]
    assert len(told) >= 10
    assert mistaken == []


def test_what_is_absent_has_no_series(live: Live) -> None:
    """In a process without a serving engine, and without a bridge, their rows have no series rather than zeros."""
    calm = live.played["calm"]
    rows = [target for target in targets() if "bridge" in target.row or "vLLM" in target.row or "nvml" in target.row]
    assert len({target.row for target in rows}) >= 4
    assert [target.name for target, names in told_by(live.server, rows, {"calm": calm}).items() if names] == []


def test_a_process_that_does_not_answer_is_counted_and_goes_stale(live: Live) -> None:
    """While a process is stopped the tile counts it, its other series end within two scrapes, and come back after."""
    stopped = live.played["unreachable"]
    tile = named("fleet", "Unreachable")
    assert before(live.server, tile, stopped).usual == 0
    assert during(live.server, tile, stopped) == (1, 1, 1)
    begin, end = stopped.incident_begin + 3, stopped.incident_end - 1
    gauges = [target for target in targets()
              if "kvobs_allocator_usage_bytes" in target.expr and "kvobs_device_memory_bytes" not in target.expr]
    for target in gauges:
        expr = replaced(target.expr, instances=stopped.matcher())
        assert live.server.range(expr, begin, end) == [], target.name
        assert live.server.range(expr, end + 8, stopped.end), target.name
    assert gauges


def test_exemplars_lead_to_traces_that_were_sent(live: Live) -> None:
    """Each query that draws exemplars has some, and their traces are those that a receiver of spans got."""
    calm = live.played["calm"]
    drawn = [target for target in targets() if target.exemplars]
    for target in drawn:
        found = live.server.api("query_exemplars", query=replaced(target.expr, instances=calm.matcher()),
                                start=str(calm.begin), end=str(calm.end))
        traces = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
        assert traces, target.name
        assert traces <= set(calm.traces), target.name
    assert drawn


def test_a_renamed_metric_is_found(live: Live, tmp_path: Path) -> None:
    """A query whose metric was renamed returns nothing, and is named."""
    copied = shutil.copytree(GENERATED, tmp_path / "boards")
    path = copied / "kvobs-overview.json"
    board = json.loads(path.read_text())
    panel, = [one for one in board["panels"] if one["title"] == "KV buffers replaced"]
    panel["targets"][0]["expr"] = panel["targets"][0]["expr"].replace("kvobs_kv_reallocations_total",
                                                                     "kvobs_kv_reallocs_total")
    path.write_text(json.dumps(board))
    row = "Re-allocation: what growing costs"
    overview = [target for target in targets(copied) if target.board == "kvobs-overview"]
    assert unanswered(live, overview) == [f"kvobs-overview / {row} / KV buffers replaced / A"]


def test_rules_are_evaluated(live: Live) -> None:
    """Prometheus evaluates every recording and alerting rule without an error, on what it has scraped."""
    if not RULES:
        pytest.skip("dashboards/rules has no rules yet.")

    def rules() -> list[dict[str, Any]]:
        return [rule for group in live.server.api("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), 90, "every rule was evaluated")
    assert {rule["name"]: rule.get("lastError") for rule in rules() if rule["health"] != "ok"} == {}
    assert len(rules()) > 20
