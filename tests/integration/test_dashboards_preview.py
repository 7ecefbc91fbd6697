"""Panels drawn with @grafana/ui in a real browser show what the test knows they must; so do the generated boards."""

from __future__ import annotations

import json
import os
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.dashboards_draw import CannotBuildError, Picture, Studio, built, studio
from scripts.dashboards_query import Board, Prometheus, View, drawing, panels_of
from tests.peers import prometheus
from tests.preview_board import Sample, everything, vector
from tests.support import ROOT, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.peer]
GENERATED = sorted((ROOT / "dashboards" / "generated").glob("*.json"))


@pytest.fixture(scope="module")
def artist() -> Iterator[Studio]:
    try:
        page = built()
    except CannotBuildError as error:
        pytest.skip(f"The page of scripts/preview cannot be built here. {error}")
    with studio(page) as drawn:
        yield drawn


@pytest.fixture(scope="module")
def sample(artist: Studio) -> Picture:
    return artist.draw(everything())


def named(picture: Picture, title: str) -> dict[str, Any]:
    found = [panel for panel in picture.panels if panel["title"] == title]
    assert len(found) == 1, title
    return found[0]


def test_nothing_goes_wrong_and_nothing_is_fetched(sample: Picture) -> None:
    """Neither a panel nor the page reports an error, and the page asks for no file that was not built with it."""
    assert sample.problems == []
    assert {panel["title"]: panel["error"] for panel in sample.panels if panel["error"]} == {}
    assert sample.png.startswith(b"\x89PNG")
    assert len(sample.png) < 250_000


@pytest.mark.parametrize(("title", "text"), [
    ("Used", "1.50 GiB"), ("Latency", "12 ms"), ("Objective", "99.5%"), ("Nothing lost", "0"),
    ("Absent", "no device here"), ("Level", "offload"),
])
def test_a_tile_says_its_value_in_its_unit(sample: Picture, title: str, text: str) -> None:
    """1610612736 By, 0.012 s and a share of 0.995 are written in their units; zero is 0; absent is the board's text."""
    assert named(sample, title)["values"] == [text]


def test_series_have_their_names_and_axes_their_units(sample: Picture) -> None:
    """Each series is named in the legend by its labels or its override, and the axis counts in the panel's unit."""
    ranks, shares = named(sample, "Two ranks"), named(sample, "Shares")
    assert ranks["legend"] == ["rank 0", "rank 1"]
    assert {"0 B", "16 MiB", "32 MiB"} <= set(ranks["written"])
    assert shares["legend"] == ["used", "the limit"]
    assert {"0%", "40%", "100%"} <= set(shares["written"])


def test_a_panel_without_data_says_why(sample: Picture) -> None:
    """An empty chart shows the board's text for no data, and no axis."""
    empty = named(sample, "Absent series")
    assert (empty["message"], empty["empty"], empty["written"]) == ("needs a breaker", True, [])


def test_a_table_joins_its_queries(sample: Picture) -> None:
    """Two queries become one row per pair of labels; a zero is a zero and a value that is absent is an empty cell."""
    head, *rows = named(sample, "Moves")["cells"]
    assert head == ["dst", "src", "moved", "took"]
    assert rows == [["host", "gpu:0", "3 MiB", "250 ms"], ["gpu:0", "host", "0 B", ""]]


def test_what_grafana_does_not_export_says_who_drew_it(sample: Picture) -> None:
    """The heatmap, the state timeline and the stacked bars are labelled as ours; nothing else is."""
    assert {panel["title"] for panel in sample.panels if panel["own"]} == {"Buckets", "Breaker", "Where memory is"}
    assert {"1 ms", "SLO 12 ms", "+Inf"} <= set(named(sample, "Buckets")["written"])
    breaker = named(sample, "Breaker")
    assert {"device 0", "normal", "reorganise"} <= set(breaker["written"])
    assert breaker["legend"] == ["normal", "reorganise"]
    bars = named(sample, "Where memory is")
    assert bars["legend"] == ["tensors", "unexplained"]
    assert {"6 GiB", "2 GiB"} <= set(bars["text"].split("\n"))


def test_exemplars_stand_where_their_values_are(sample: Picture) -> None:
    """Of three exemplars on a chart the one beyond its axis is left out; a heatmap has a bucket for each of three."""
    found = {panel["title"]: panel["exemplars"] for panel in sample.panels if panel["exemplars"]}
    assert found == {"Two ranks": 2, "Buckets": 3}


def test_bars_and_words_are_there(sample: Picture) -> None:
    """A bar gauge names its bars and a text panel renders its Markdown."""
    assert {"small", "20%", "large", "85%"} <= set(named(sample, "Pools")["text"].replace("\n%", "%").split("\n"))
    assert "Read this first." in named(sample, "Words")["text"]


def test_a_fault_is_seen(artist: Studio) -> None:
    """A transformation that nobody knows, a refused query and a panel of an unknown type each show as an error."""
    plan = everything()
    panels = {panel["title"]: panel for panel in plan["board"]["panels"]}
    panels["Moves"]["transformations"] = [{"id": "nonsense", "options": {}}]
    panels["Pools"]["type"] = "nonsense"
    plan["answers"][str(panels["Used"]["id"])]["targets"]["A"] = {"error": "parse error"}
    errors = {panel["title"]: panel["error"] for panel in artist.draw(plan).panels if panel["error"]}
    assert errors == {"Moves": "Unknown transformation nonsense.", "Used": "parse error",
                      "Pools": "No renderer for panels of type nonsense."}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus whose only target is down: it answers every query, and knows nothing of kvobs."""
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(folder, "127.0.0.1:9") as running:
        wait_until(lambda: running.value("up") == 0, what="Prometheus knows that the target is down")
        yield Prometheus(running.url)


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.stem)
def test_every_board_is_drawn_where_nothing_is_known(artist: Studio, server: Prometheus, path: Path) -> None:
    """No panel of a generated board fails, each title is on the page and uncut, and what is absent says so in words."""
    board = json.loads(path.read_text(encoding="utf-8"))
    end = server.get("query", query="time()")["result"][0]
    drawn = artist.draw(drawing(board, View(end - 60, end, scrape_s=0.5), server))
    assert drawn.problems == []
    assert [(panel["title"], panel["error"]) for panel in drawn.panels if panel["error"]] == []
    assert sorted(panel["title"] for panel in drawn.panels) == sorted(one["title"] for one in panels_of(board))
    assert [panel["title"] for panel in drawn.panels if panel["title"] not in drawn.text or panel["cut"]] == []
    assert board["title"] in drawn.text
    said = {one["id"]: one["fieldConfig"]["defaults"]["noValue"] for one in panels_of(board) if one["type"] != "text"}
    for panel in drawn.panels:
        if panel["empty"] and panel["type"] != "text":
            assert said[panel["id"]] in (panel["message"], *panel["values"]), panel["title"]


def test_every_unit_is_one_that_grafana_knows(artist: Studio) -> None:
    """A unit that Grafana does not know is written behind the value as it is; none of the boards has one."""
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in GENERATED]
    units = {unit for board in boards for panel in panels_of(board) for unit in units_of(panel)}
    assert {"bytes", "s", "percentunit"} <= units
    tiles = Sample()
    for unit in sorted(units | {"nonsense"}):
        tiles.add("stat", unit, [vector(({}, 8192))], defaults={"unit": unit})
    drawn = {panel["title"]: panel["values"][0] for panel in artist.draw(tiles.drawing()).panels}
    assert [unit for unit, text in drawn.items() if text == f"8192 {unit}"] == ["nonsense"]


def units_of(panel: dict[str, Any]) -> Iterator[str]:
    config = panel.get("fieldConfig", {})
    yield from (unit for unit in [config.get("defaults", {}).get("unit")] if unit)
    changed = (one for rule in config.get("overrides", []) for one in rule["properties"])
    yield from (one["value"] for one in changed if one["id"] == "unit")
    yield from (unit for unit in [panel.get("options", {}).get("yAxis", {}).get("unit")] if unit)


def test_a_query_is_asked_as_grafana_asks_it(server: Prometheus) -> None:
    """Several values are alternatives, all is the board's word for all, and a rate looks back four scrapes at least."""
    board = json.loads((ROOT / "dashboards" / "generated" / "kvobs-overview.json").read_text(encoding="utf-8"))
    filled = Board(board, View(0, 3600, {"instance": ("a.b:1", "c")}, scrape_s=15), server)
    assert filled.filled('{instance=~"$instance"}') == r'{instance=~"(a\\.b:1|c)"}'
    assert filled.filled("${device} [[model]]") == ".* .*"
    assert filled.filled("[$__rate_interval]", 15) == "[60s]"
    assert filled.filled("[$__rate_interval]", 120) == "[135s]"
    with pytest.raises(ValueError, match="no variable nonsense"):
        filled.filled("$nonsense")


@pytest.mark.skipif("KVOBS_TEST_GRAFANA" not in os.environ,
                    reason="KVOBS_TEST_GRAFANA names no Grafana (a URL, with user:password@ where it wants them).")
@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.stem)
def test_a_real_grafana_takes_the_board(path: Path) -> None:
    """Grafana imports the board, and gives back the panels that it was given."""
    address = urllib.parse.urlsplit(os.environ["KVOBS_TEST_GRAFANA"])
    board = json.loads(path.read_text(encoding="utf-8"))
    taken = grafana(address, "/api/dashboards/db", {"dashboard": board, "overwrite": True})
    assert taken["uid"] == board["uid"]
    found = grafana(address, f"/api/dashboards/uid/{board['uid']}")["dashboard"]
    assert [one["title"] for one in panels_of(found)] == [one["title"] for one in panels_of(board)]


def grafana(address: urllib.parse.SplitResult, path: str, body: dict[str, Any] | None = None) -> Any:
    import base64

    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if address.username:
        said = f"{address.username}:{address.password or ''}".encode()
        headers["Authorization"] = "Basic " + base64.b64encode(said).decode()
    host = f"{address.hostname}:{address.port}" if address.port else address.hostname
    request = urllib.request.Request(f"{address.scheme}://{host}{address.path.rstrip('/')}{path}", headers=headers,
                                     data=None if body is None else json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)
