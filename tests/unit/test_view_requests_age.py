"""The page Requests while an engine is silent: what is old is said to be, and how long a state lasts is until now."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("altair")

from streamlit_app import requests_chart, requests_data, requests_words
from streamlit_app.requests_timeline import Phase, timeline
from tests.serving_store import BEGAN, POOL, SECOND, pool, row, states, write


def looked(path: Path, at: float, *, alive: bool, rows: tuple[str, ...] = ("running",)) -> requests_data.Requests:
    listed = [row(state, "s", state, 5 if state == "running" else 0) for state in rows]
    writer = write(path, [pool(), states(listed)], close=False)
    try:
        if not alive:
            writer.close()
        return requests_data.requests(str(path), ("engine", POOL), 60, BEGAN + int(at * SECOND))
    finally:
        writer.close()


@pytest.mark.parametrize(("at", "alive", "says"), [
    (102, True, "No request waits, as the engine told 2 s ago."),
    (104, True, "No request waited when the engine told last, 4 s ago."),
    (102, False, "No request waited when the engine told last, 2 s ago.")])
def test_that_none_waits_is_said_only_while_it_is_known(tmp_path: Path, at: float, alive: bool, says: str) -> None:
    """A word of at most three seconds from a running engine is of now; any other is of its own moment."""
    assert requests_words.none_waits(looked(tmp_path, at, alive=alive)) == says


@pytest.mark.parametrize(("at", "alive", "rows", "worries"), [
    (105, True, ("running",), False), (106, True, ("running",), True), (106, True, (), False),
    (106, False, ("running",), False)])
def test_silence_is_a_warning_only_with_open_requests(tmp_path: Path, at: float, alive: bool, rows: tuple[str, ...],
                                                      worries: bool) -> None:
    """More than five seconds without a word warns where requests are open in an engine that runs."""
    said = requests_words.worry(looked(tmp_path, at, alive=alive, rows=rows))
    assert bool(said) is worries
    assert ("is 6 s old" in said) is worries


def test_how_long_a_state_lasts_is_until_now(tmp_path: Path) -> None:
    """A phase that began at 90 s has lasted 35 s at 125 s, and of an ended process 10 s at its word of 100 s."""
    told = looked(tmp_path, 125, alive=True).states
    assert told is not None
    (now,), (then,) = requests_words.open_rows(told, BEGAN + 125 * SECOND), requests_words.open_rows(told)
    assert (now["for"], now["open for"], then["for"], then["open for"]) == ("35 s", "45 s", "10 s", "20 s")


def test_a_request_that_came_during_a_step_says_so() -> None:
    """The reason of the contract is told in words, and not as its key."""
    (said,) = requests_words.waiting(states([row("a", "", "waiting", reason="step")]))
    assert said == "1 waits: a step runs, and the engine takes new requests in after it."


def test_whole_ids_come_after_every_figure(tmp_path: Path) -> None:
    """A long id is shortened in the first column to what tells it apart, and whole after the figures."""
    name = "chatcmpl-95a140564c3f327b-9544b3577"
    told = states([row(name), row(name.replace("95a", "95b"))])
    writer = write(tmp_path, [pool(), told])
    writer.close()
    found = requests_data.requests(str(tmp_path), ("engine", POOL), 60, BEGAN + 100 * SECOND).states
    assert found is not None
    lines = requests_words.open_rows(found)
    assert lines[0]["whole id"] == name
    assert len({line["request"] for line in lines}) == 2
    assert max(len(str(line["request"])) for line in lines) <= requests_words.LABEL + len(" (2)")
    assert list(lines[0])[-2:] == ["whole id", "waits because"]


def test_the_legend_has_what_can_be_seen() -> None:
    """Of a minute, a wait of a millisecond has no pixel, and is not in the legend; one of a second is."""
    def legend(wait_ns: int) -> list[str]:
        ended = [Phase("a", "", "queued", 0, wait_ns, "", 0), Phase("a", "", "decode", wait_ns, 60 * SECOND, "ok", 1)]
        drawn = requests_chart.gantt(timeline(ended, None, (), 0, 60 * SECOND, 60), 8).to_dict()
        return list(drawn["layer"][0]["encoding"]["color"]["legend"]["values"])

    assert legend(SECOND // 1_000) == ["decode"]
    assert legend(SECOND) == ["queued", "decode"]
