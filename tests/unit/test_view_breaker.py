"""The page Breaker, run by Streamlit's own test runner over a store whose decisions are known by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("altair")

from kvobs import model
from kvobs.breaker.simulator import hindsight
from kvobs.catalog import BY_NAME
from kvobs.store import Point, Stored, StoreWriter
from streamlit_app import breaker_chart, breaker_data, breaker_words
from tests.events import step
from tests.unit.test_view_pages import run, text

SECOND = 1_000_000_000
BEGAN = 1_700_000_000 * SECOND
LEVELS = [0] * 10 + [1] * 5 + [2] * 5 + [0] * 10  # of cuda:0, by second


def decided(at: int, level: int, before: str, after: str, scope: str = "cuda:0", mode: str = "act") -> model.Decided:
    return model.Decided(at * SECOND, scope, "mine", mode, level, before, after, f"Level {level} is {after}.",
                         (("headroom", 0.05), ("verdict", "CAPACITY")), ("level 3: not yet",), at)


def taken(at: float, level: int, kind: str, *, undo: bool = False, done: bool = True, size: int = 0,
          took_ms: int = 5, late: bool = False) -> model.ActionTaken:
    return model.ActionTaken(int(at * SECOND), "torch", level, kind, undo, 1, done, size, took_ms * 1_000_000, late,
                             "" if done else "Nothing is idle.")


EVENTS: list[model.Event] = [
    decided(10, 1, "closed", "open"), taken(10.5, 1, "empty_cache", size=3 << 20),
    taken(11, 1, "malloc_trim", size=1 << 20, took_ms=250, late=True),
    decided(15, 2, "closed", "open"), taken(15.5, 2, "offload", done=False),
    decided(20, 2, "open", "half-open"), taken(20.5, 2, "offload", undo=True),
    decided(21, 1, "open", "closed"), decided(25, 1, "closed", "open"), taken(25.5, 1, "empty_cache", size=1 << 20),
    model.Availability("breaker policy", True, "mine of a file."),
    model.Availability("breaker signal waiting", False, "Nothing has told it."),
    step(t_ns=29 * SECOND)]


def write(directory: Path, mode: str = "act") -> None:
    now = [0]
    writer = StoreWriter(directory, 256 * 1024**2, "p1", clock=lambda: now[0], wall=lambda: BEGAN)
    for second, level in enumerate(LEVELS):
        now[0] = second * SECOND
        writer.write_points([
            (BY_NAME["kvobs.breaker.level"], {("cuda:0", mode): float(level), ("cuda:1", mode): 0.0}),
            (BY_NAME["kvobs.slo.target"], {("first-token",): 0.99}),
            (BY_NAME["kvobs.slo.events"], {("first-token",): 200.0}),
            (BY_NAME["kvobs.slo.good"], {("first-token",): 190.0}),
            (BY_NAME["kvobs.slo.burn"], {("first-token", "5m"): 5.0}),
            (BY_NAME["kvobs.out_of_memory"], {("cuda:0",): float(second >= 18)})])
    writer.write(EVENTS)
    writer.close()


def charts(found: Any) -> list[dict[str, Any]]:
    return [json.loads(chart.proto.spec) for chart in found.get("vega_lite_chart")]


def test_the_page_says_what_the_store_says(tmp_path: Path) -> None:
    """Mode, level, decisions, bytes and untold signals are those that were written; what is not known is not 0."""
    write(tmp_path)
    found = run("breaker", tmp_path)
    assert not found.error
    figures = {metric.label: metric.value for metric in found.metric}
    assert figures == {"Mode": "act", "Level now": "0 normal", "Decisions, 15 min": "5", "Actions done, 15 min": "3",
                       "Signals not told": "1"}
    said = text(found)
    for words in ("mine of a file.", f"{5 << 20:,} B regained", "3 opened a level", "waiting", "has ended"):
        assert words in said
    objectives, decisions, actions = (frame.value for frame in found.dataframe)
    assert objectives.to_dict("records") == [{
        "objective": "first-token", "target": "99.0 %", "good / all": "190 / 200", "budget left": "not known yet",
        "burn 5m": "5.00", "burn 1h": "not known yet", "burn 30m": "not known yet", "burn 6h": "not known yet",
        "alerts": "none"}]
    assert list(decisions["effect"]) == [
        "empty_cache of torch: 5 ms, 1.00 MiB regained", "no action answered",
        "undo offload of torch: 5 ms, 0 B regained", "offload of torch: refused. Nothing is idle.",
        "empty_cache of torch: 5 ms, 3.00 MiB regained; malloc_trim of torch: 250 ms, late, 1.00 MiB regained"]
    assert set(decisions["signals"]) == {"headroom 0.05, verdict CAPACITY"}
    assert set(decisions["not done instead"]) == {"level 3: not yet"}
    told = {row["action"]: row for row in actions.to_dict("records")}
    assert (told["empty_cache"]["ordered"], told["empty_cache"]["sum"]) == (2, "4.00 MiB")
    assert told["empty_cache"]["bytes regained, median"] == "2.00 MiB"
    assert (told["malloc_trim"]["late"], told["malloc_trim"]["limit"]) == (1, "200 ms")
    assert (told["offload"]["refused"], told["offload"]["sum"]) == (1, "none done")


def test_the_timeline_has_a_bar_per_level_that_held(tmp_path: Path) -> None:
    """Each scope's bars are of one level and touch each other, from its first to its last sample."""
    write(tmp_path)
    page = breaker_data.breaker(str(tmp_path), "p1", 900)
    mine = [((one.begin_ns - BEGAN) // SECOND, (one.end_ns - BEGAN) // SECOND, one.level) for one in page.spans
            if one.scope == "cuda:0"]
    assert sorted(mine) == [(0, 10, 0), (10, 15, 1), (15, 20, 2), (20, 29, 0)]
    assert [one.level for one in page.spans if one.scope == "cuda:1"] == [0]
    assert breaker_chart.timeline([], [], 0, 1) is None
    drawn = breaker_chart.timeline(page.spans, page.decisions, page.begin_ns, page.end_ns).to_dict()
    rows = [row for data in drawn["datasets"].values() for row in data]
    assert {row["level"] for row in rows if "level" in row} == {"0 normal", "1 reorganise", "2 offload"}
    assert sum("reason" in row for row in rows) == 5
    assert len(charts(run("breaker", tmp_path))) == 1


def test_a_gap_in_the_samples_is_a_gap_in_the_bars() -> None:
    """Where nothing was told for more than ten seconds, no level is drawn."""
    told = [Point("p", at * SECOND, {"scope": "s", "mode": "act"}, 1.0, None, None, None) for at in (0, 1, 30, 31)]
    assert [(one.begin_ns // SECOND, one.end_ns // SECOND) for one in breaker_data.spans(told, 0, 99 * SECOND)] == [
        (0, 1), (30, 31)]


def test_an_answer_belongs_to_the_decision_that_ordered_it() -> None:
    """Also when it comes after the next decision, when another scope decides meanwhile, and minutes later while the
    level stays open; what an end without a decision takes back belongs to none.
    """
    made = [Stored("p", one.t_ns, one) for one in [
        decided(1, 1, "closed", "open", "a"), decided(2, 2, "closed", "open", "a"), decided(3, 1, "open", "half-open"),
        decided(4, 1, "half-open", "closed", "a"), decided(9, 1, "closed", "open", "b")]]
    answers = [Stored("p", one.t_ns, one) for one in [
        taken(0.5, 1, "early"), taken(2.5, 1, "beside"), taken(3.5, 1, "late"), taken(4.5, 1, "undone", undo=True),
        taken(200, 1, "again"), taken(300, 2, "again"), taken(301, 1, "ends", undo=True)]]
    assert [[one.kind for one in every] for every in breaker_data.became(made, answers)] == [
        ["beside", "late"], ["again"], ["undone"], [], ["again"]]


def test_a_process_whose_policy_was_refused_says_why(tmp_path: Path) -> None:
    """It has no level, and the page tells the reason instead of a figure."""
    writer = StoreWriter(tmp_path, 256 * 1024**2, "p1")
    writer.write([model.Availability("breaker", False, "The policy x.toml needs 3 tables."), step()])
    writer.close()
    found = run("breaker", tmp_path)
    assert not found.error
    assert {metric.label: metric.value for metric in found.metric}["Level now"] == "not known yet"
    assert any("needs 3 tables" in table.value.to_string() for table in found.table)


def test_hindsight_counts_openings_and_troubles_by_hand(tmp_path: Path) -> None:
    """One error at second 18: both openings before it (within 60 s) were followed by it, the third, at 25, was not."""
    write(tmp_path)
    found = breaker_data.judged(str(tmp_path), "p1")
    assert (found.opened, found.followed, len(found.troubles), found.foreseen) == (3, 2, 1, 1)
    said = breaker_words.hindsight(found, "act")
    assert said[0].startswith("Trouble followed within 60 s of 2 of 3 (67 %, 95 % interval 9 to 99 %)")
    assert "counts against it" in said[-1]
    done = subprocess.run([sys.executable, "-m", "kvobs", "breaker", "hindsight", str(tmp_path), "--json"],
                          capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [{"process": "p1", "opened": 3, "followed": 2, "precision": 2 / 3, "troubles": 1,
                                        "foreseen": 1, "recall": 1.0}]
    page = run("breaker", tmp_path)
    page.button(key="breaker-judge").click().run()
    assert "2 of 3 (67 %" in text(page)


def test_levels_of_two_scopes_are_not_mixed_up() -> None:
    """While one device's level 1 closes, the other's stays open: trouble then was foreseen."""
    made = [decided(1, 1, "closed", "open", "a"), decided(2, 1, "closed", "open", "b"),
            decided(3, 1, "open", "closed", "a")]
    errors = [Point("p", at * SECOND, {"device": "b"}, float(at >= 90), None, None, None) for at in range(100)]
    found = hindsight("p", made, [one.t_ns for one in made], {"kvobs.out_of_memory": errors}, 60)
    assert (found.foreseen, len(found.troubles), found.opened, found.followed) == (1, 1, 2, 0)
    assert hindsight("p", [], [], {"kvobs.out_of_memory": errors}, 60).precision is None


def test_another_policy_is_replayed_and_a_bad_one_refused(tmp_path: Path) -> None:
    """A policy on the errors opens one second after the error came; what is no policy is one sentence."""
    write(tmp_path)
    page = run("breaker", tmp_path)
    page.selectbox(key="breaker-policy").set_value("a policy of your own").run()
    page.text_area(key="breaker-toml").set_value("name = 3").run()
    page.button(key="breaker-replay").click().run()
    assert len(page.error) == 1
    assert "needs 3 tables" in text(page)
    level = '[[level]]\nany = [{ signal = "out_of_memory", above = 0 }]\n'
    page.text_area(key="breaker-toml").set_value(f'name = "errors"\n{3 * level}').run()
    page.button(key="breaker-replay").click().run()
    assert not page.error
    assert "Modelled: errors would have made" in text(page)


def test_who_has_no_breaker_is_told_how_to_get_one(tmp_path: Path) -> None:
    """A store without levels says what to do."""
    writer = StoreWriter(tmp_path, 256 * 1024**2, "p1")
    writer.write([step()])
    writer.close()
    found = run("breaker", tmp_path)
    assert "No process of this store has a breaker." in text(found)
    assert "KVOBS_BREAKER=observe" in text(found)
