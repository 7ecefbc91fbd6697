"""The page Requests, run by Streamlit's own test runner over stores of a serving engine with figures known by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("altair")

from kvobs import model
from tests.events import step
from tests.serving_store import ORIGIN, POOL, SECOND, phase, pool, preemption, row, states, work, write
from tests.unit.test_view_pages import read, run, text

ROWS = (
    row("running-1", "anna", blocks=40), row("running-2", "ben", blocks=20, phase="prefill"),
    row("victim-1", "anna", "preempted", reason="blocks", preemptions=1, since_ns=95 * SECOND),
    row("waiting-1", "", "waiting", reason="turn", since_ns=99 * SECOND))
EVENTS: tuple[model.Event, ...] = (
    pool(30, failures=100, preemptions=1),
    work(30, evictions=1_000, queried_tokens=500, hit_tokens=500, recomputed_evicted_tokens=8),
    phase("victim-1", "queued", 80, 85), phase("victim-1", "prefill", 85, 87), phase("victim-1", "decode", 87, 95),
    preemption("victim-1", "running-1", 95, session="anna"),
    phase("done-1", "decode", 60, 90, outcome="ok"),
    step(t_ns=98 * SECOND, origin=ORIGIN, cache_id=POOL, tokens=1_000),
    pool(100, failures=142, preemptions=2),
    work(100, tail_tokens=96, tail_bytes=12_288, evictions=1_029, dropped=2, queried_tokens=700, hit_tokens=550,
         resumed_queried_tokens=64, resumed_hit_tokens=32, recomputed_preempted_tokens=64, recomputed_evicted_tokens=44,
         failures_waiting=30),
    states(ROWS, next_request="victim-1", next_needs=3, next_verdict="WAIT", next_sentence="It waits for a block."),
)


def one_minute(store: Path) -> Any:
    found = run("requests", store)
    found.sidebar.radio[0].set_value("1 min").run()
    assert not found.exception, found.exception
    return found


def charts(found: Any) -> list[dict[str, Any]]:
    return [json.loads(chart.proto.spec) for chart in found.get("vega_lite_chart")]


def figures(found: Any) -> dict[str, str]:
    return {metric.label: metric.value for metric in found.metric}


def test_the_page_says_what_the_store_says(tmp_path: Path) -> None:
    """States are the last ones, counts the differences over the range, and shares their quotients."""
    write(tmp_path, EVENTS)
    found = one_minute(tmp_path)
    assert not found.error
    assert figures(found) == {
        "Running": "2", "Waiting": "1", "Preempted": "1", "Blocks used": "60", "Blocks cached": "25",
        "Blocks free": "14", "Blocks pinned": "1", "Tail waste": "96 tokens", "Preemptions, 1 min": "1",
        "Evictions, 1 min": "29", "Refusals, 1 min": "42", "Prefix hits, 1 min": "25.0 %", "Recomputed, 1 min": "100"}
    said = text(found)
    for words in ("of 8 slots", "240.00 KiB", "12.00 KiB", "2 more dropped", "30 of waiting requests",
                  "50 of 200 tokens", "10.0 % of 1,000 computed", "The process has ended"):
        assert words in said


def test_why_requests_wait_and_what_becomes_of_the_next(tmp_path: Path) -> None:
    """Reasons are told in words with their numbers; the verdict is said to be estimated, with its needs."""
    write(tmp_path, EVENTS)
    said = text(run("requests", tmp_path))
    assert "- 1 waits after a preemption: the pool has too few blocks." in said
    assert "- 1 waits: others come first." in said
    assert ("Next, estimated: victim-1: **WAIT**. It waits for a block. It needs 3 blocks beyond its cached prefix."
            in said)


def test_the_tables_have_a_line_per_request_and_per_preemption(tmp_path: Path) -> None:
    """Open requests with their blocks and reasons, those that run first; a preemption with its victim and its cause."""
    write(tmp_path, EVENTS)
    requests, preemptions = (table.value.to_dict("records") for table in run("requests", tmp_path).dataframe)
    assert [(one["request"], one["session"], one["state"], one["waits because"], one["blocks"], one["for"])
            for one in requests] == [
        ("running-1", "anna", "running, decode", "-", 40, "10 s"),
        ("running-2", "ben", "running, prefill", "-", 20, "10 s"),
        ("victim-1", "anna", "preempted, blocks", "the pool has too few blocks", 0, "5 s"),
        ("waiting-1", "-", "waiting, turn", "others come first", 0, "1 s")]
    assert preemptions == [{
        "when (UTC)": "22:14:55.000", "victim": "victim-1", "session": "anna", "for whom": "running-1",
        "tokens lost": 96, "blocks": 3, "cause": "the pool had no block left", "victim's whole id": "victim-1",
        "whole id of whom": "running-1", "held then": "running-1 5, victim-1 3"}]


def test_the_charts_have_the_pool_and_the_phases(tmp_path: Path) -> None:
    """The bars hold the pool's states and each holder; the timeline each phase, the open ones too, and the mark."""
    write(tmp_path, EVENTS)
    found = one_minute(tmp_path)
    bars, gantt = charts(found)
    assert bars["encoding"]["color"]["scale"]["domain"] == [
        "in use", "session anna", "session ben", "pinned", "cached, held by nobody", "free"]
    phases, _, marks = gantt["layer"]
    assert phases["encoding"]["y"]["sort"] == ["waiting-1", "running-1", "running-2", "victim-1", "done-1"]
    assert phases["encoding"]["color"]["scale"]["domain"] == ["queued", "prefill", "decode", "preempted, waits"]
    assert marks["mark"]["shape"] == "diamond"


def test_an_engine_without_requests_is_said_to_be_idle(tmp_path: Path) -> None:
    """A running engine whose last word is old and knows no request is idle, one that knows some is not well."""
    writer = write(tmp_path, [pool(), states()], close=False)
    other = write(tmp_path / "busy", EVENTS, close=False)
    try:
        assert "Idle: no request has moved in the engine for" in text(run("requests", tmp_path))
        assert "although some are open in it" in text(run("requests", tmp_path / "busy"))
    finally:
        writer.close()
        other.close()


def test_a_pool_that_tells_little_has_absent_figures(tmp_path: Path) -> None:
    """A pool of which only its blocks are known shows these; what it does not tell is absent and not zero."""
    write(tmp_path, [pool(preemptions=4)])
    found = one_minute(tmp_path)
    assert {name: value for name, value in figures(found).items() if value != "absent"} == {
        "Blocks used": "60", "Blocks cached": "25", "Blocks free": "14", "Preemptions, 1 min": "4",
        "Refusals, 1 min": "0"}
    assert "This pool does not tell which requests are in its engine." in text(found)
    assert "No request was told of in the last 1 min." in text(found)


def test_a_broken_account_and_a_freed_pool_are_in_plain_sight(tmp_path: Path) -> None:
    """Blocks in no state are an error, and a freed pool a warning."""
    write(tmp_path, [pool(90), work(90, unexplained=-3), model.CacheGone(95 * SECOND, POOL)])
    found = run("requests", tmp_path)
    assert [read(str(error.value)) for error in found.error] == [
        "The pool's account does not add up: 3 blocks are in more than one state."]
    assert "The engine has freed this pool" in text(found)


def test_each_rank_is_shown_by_itself(tmp_path: Path) -> None:
    """Two engine cores are two entries of the picker, and each shows its own figures."""
    write(tmp_path, [pool(used=1), states()], "first", role="dp=0 tp=0")
    write(tmp_path, [pool(used=2), states()], "second", role="dp=1 tp=0")
    found = run("requests", tmp_path)
    (picker,) = found.sidebar.selectbox
    assert sorted(option[:21] for option in picker.options) == ["engine_core dp=0 tp=0", "engine_core dp=1 tp=0"]
    for process, used in (("first", "1"), ("second", "2")):
        found.sidebar.selectbox[0].select((process, POOL)).run()
        assert figures(found)["Blocks used"] == used


def test_more_requests_than_are_drawn_are_counted(tmp_path: Path) -> None:
    """The timeline has sixty requests, and the page says how many more there were."""
    write(tmp_path, [pool(), states(more=7), *(phase(f"r{number}", "decode", 50, 90 + number / 100)
                                                for number in range(75))])
    found = one_minute(tmp_path)
    assert "The 60 requests that were active last, since 22:14:45 UTC; 15 more were active since then." in text(found)
    assert "7 more are not listed" in text(found)
    assert len(charts(found)[1]["layer"][0]["encoding"]["y"]["sort"]) == 60


def test_without_a_pool_the_page_says_how_to_begin(tmp_path: Path) -> None:
    """A store without a pool, and no store at all, give a sentence and a command."""
    assert "kvobs run --" in text(run("requests", tmp_path / "none"))
    write(tmp_path, [model.Availability("vllm", False, "vLLM has not been imported in this process.")])
    said = text(run("requests", tmp_path))
    assert "vLLM has not been imported in this process. No pool of KV blocks has been told of." in said


@pytest.mark.parametrize("name", ["![x](http://evil.example/x.png)", "<b>x</b>", "`a` $b$ :red[c]", "", "x" * 4_000])
def test_hostile_names_are_text(tmp_path: Path, name: str) -> None:
    """Whatever requests, sessions, models and sentences are called, nothing of it is read as markup."""
    origin = model.Origin("vllm", name, name, name, name)
    write(tmp_path, [
        pool(origin=origin), states([row(name, name, blocks=3), row(f"{name}2", name, "waiting", reason=name)],
                                    origin=origin, next_request=name, next_verdict=name, next_sentence=name),
        phase(name, name, 80, 90, outcome=name), preemption(name, name, 90, cause=name),
        model.Availability(f"vllm {name}", False, name)])
    found = run("requests", tmp_path)
    marked = [str(element.value) for kind in (found.markdown, found.caption, found.warning, found.info)
              for element in kind]
    marked += [str(cell) for table in found.table for cell in table.value.to_numpy().ravel()]
    assert not [one for one in marked if re.search(r"(?<!\\)[<\[\]`$#|]", one)]
    assert not any(element.allow_html for element in found.markdown)
