"""What the page Requests works out: who is listed, how counters grew, which phases are drawn, bars that add up."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("altair")

from kvobs import model
from kvobs.store import Stored
from streamlit_app import data, requests_chart, requests_data, requests_words
from streamlit_app.requests_timeline import Phase, timeline
from tests.serving_store import BEGAN, ORIGIN, POOL, SECOND, phase, pool, preemption, row, states, work, write

KEY = ("engine", POOL)


def looked(path: Path, range_s: float = 60, at: float = 100) -> requests_data.Requests:
    return requests_data.requests(str(path), KEY, range_s, BEGAN + int(at * SECOND))


def test_growth_is_from_the_last_word_before_the_range(tmp_path: Path) -> None:
    """Counts are the newest word less the one before the range, however long ago that was told."""
    write(tmp_path, [pool(5, preemptions=2, failures=10), pool(6, preemptions=3, failures=15),
                     pool(50, preemptions=4, failures=21), pool(99, preemptions=9, failures=40)])
    growth = looked(tmp_path).blocks_growth
    assert growth is not None
    assert (growth.grown["preemptions"], growth.grown["failures"]) == (9 - 3, 40 - 15)
    assert (growth.partial, growth.from_ns) == (False, BEGAN + 40 * SECOND)


def test_growth_of_a_pool_that_began_within_the_range_is_all_of_it(tmp_path: Path) -> None:
    """Counters begin at nothing: what a young process told first counts too."""
    write(tmp_path, [work(50, evictions=7), work(99, evictions=12)])
    growth = looked(tmp_path, 300).work_growth
    assert growth is not None
    assert (growth.grown["evictions"], growth.partial, growth.from_ns) == (12, False, BEGAN)


def test_growth_over_deleted_rows_is_said_to_be_partial(tmp_path: Path) -> None:
    """Where the store lost what was before, the count begins with the first word that is left, and says so."""
    write(tmp_path, [pool(70, preemptions=5), pool(99, preemptions=8)], first_point=60)
    growth = looked(tmp_path).blocks_growth
    assert growth is not None
    assert (growth.grown["preemptions"], growth.partial, growth.from_ns) == (3, True, BEGAN + 70 * SECOND)
    assert requests_words.since(growth, "1 min") == "Counted since 22:14:30 UTC, for the store lost what was before."


def test_an_idle_pool_has_no_growth(tmp_path: Path) -> None:
    """A pool that told nothing within the range did nothing, and its states are its last ones."""
    write(tmp_path, [pool(10, preemptions=5), states(at=10)])
    found = looked(tmp_path)
    assert found.blocks_growth is not None
    assert found.blocks_growth.grown["preemptions"] == 0
    assert found.pool is not None
    assert (found.pool.record.used, found.told_s, found.age_s) == (60, 90.0, 0.0)


def test_counters_of_another_pool_and_process_are_not_mixed_in(tmp_path: Path) -> None:
    """Each pool of each process is told by itself."""
    other = pool(99, preemptions=50)
    write(tmp_path, [pool(99, preemptions=1), model.Blocks(**{name: getattr(other, name) for name in
                     other.__struct_fields__} | {"cache_id": 9})])
    write(tmp_path, [pool(99, preemptions=70)], "second")
    growth = looked(tmp_path).blocks_growth
    assert growth is not None
    assert growth.grown["preemptions"] == 1
    assert len(requests_data.engines(str(tmp_path))) == 3


def test_running_engines_come_first_and_say_their_ranks(tmp_path: Path) -> None:
    """Of several ranks each has its own entry, by its ranks; one that ended comes last."""
    write(tmp_path, [states()], "ended", role="dp=0")
    writer = write(tmp_path, [states(at=50)], "alive", role="dp=1", close=False)
    try:
        named = requests_data.engines(str(tmp_path), BEGAN + 100 * SECOND)
    finally:
        writer.close()
    assert [key[0] for key in named] == ["alive", "ended"]
    assert [name.split(" · ") for name in named.values()] == [
        ["engine_core dp=1", "tiny", f"PID {os.getpid()}"], ["engine_core dp=0", "tiny", f"PID {os.getpid()}", "ended"]]


def test_without_a_pool_the_reason_is_told(tmp_path: Path) -> None:
    """What the engines' sources say of themselves is the reason, other sources' reasons are not."""
    write(tmp_path, [model.Availability("vllm", False, "vLLM 0.1 is too old."),
                     model.Availability("cuda", False, "No device.")])
    with pytest.raises(data.NothingYet, match=r"^vLLM 0\.1 is too old\. No pool of KV blocks") as refused:
        requests_data.engines(str(tmp_path))
    assert refused.value.command == requests_data.COMMAND


def test_a_freed_pool_is_gone(tmp_path: Path) -> None:
    """The event that a pool was freed is heard, that of another cache is not."""
    write(tmp_path, [pool(90), model.CacheGone(95 * SECOND, 8)])
    assert not looked(tmp_path).gone
    write(tmp_path / "two", [pool(90), model.CacheGone(95 * SECOND, POOL)])
    assert looked(tmp_path / "two").gone


@pytest.mark.parametrize("seed", range(5))
def test_reading_backwards_finds_the_same_rows(seed: int) -> None:
    """Slices that double give, in order of time, exactly the rows since the instant that is told with them."""
    chance = random.Random(seed)
    times = sorted(chance.randrange(1_000 * SECOND) for _ in range(200))
    for enough in (1, 20, 1_000):
        since, until = 100 * SECOND, 900 * SECOND
        found, begin = requests_data.backwards(lambda low, high: [one for one in times if low <= one < high], since,
                                               until, lambda rows, least=enough: len(rows) >= least)  # type: ignore[misc]
        assert found == [one for one in times if begin <= one < until]
        assert len(found) >= min(enough, sum(since <= one < until for one in times))
        assert begin >= since


def a_phase(request: str, begin: int, end: int, name: str = "decode") -> Phase:
    return Phase(request, "", name, begin, end, "", 1)


def test_the_timeline_has_those_that_were_active_last(tmp_path: Path) -> None:
    """Of more requests than are drawn the ones that were active last are, the newest first, and the rest is counted."""
    ended = [a_phase(f"r{number}", number, 100 + number) for number in range(10)]
    found = timeline(ended, None, (), 0, 200, 3)
    assert (found.requests, found.left_out) == (["r9", "r8", "r7"], 7)
    assert {one.request for one in found.phases} == {"r9", "r8", "r7"}


def test_open_phases_end_where_they_were_told_last() -> None:
    """An open phase goes to the instant of the snapshot; one that ended after the snapshot is drawn as it ended."""
    told = Stored("p", 50, states([row("open", since_ns=30), row("over", since_ns=30), row("came back", since_ns=45)]))
    ended = [a_phase("over", 30, 60), a_phase("came back", 20, 45, "preempted")]
    found = timeline(ended, told, (), 0, 100, 60)
    assert sorted((one.request, one.phase, one.begin_ns, one.end_ns, one.open) for one in found.phases) == [
        ("came back", "decode", 45, 50, True), ("came back", "preempted", 20, 45, False),
        ("open", "decode", 30, 50, True), ("over", "decode", 30, 60, False)]


def test_too_many_phases_shorten_the_timeline() -> None:
    """Where more phases are known than are drawn, the time begins where they are complete from."""
    ended = [a_phase("r", number, number + 1) for number in range(100)]
    found = timeline(ended, None, (), 0, 100, 60, most_phases=10)
    assert (found.begin_ns, [one.end_ns for one in found.phases]) == (90, list(range(91, 101)))


def test_preemptions_are_marked_on_drawn_requests(tmp_path: Path) -> None:
    """A mark lies at its instant on its victim; those of requests that are not drawn have none, all are listed."""
    write(tmp_path, [pool(99), phase("a", "decode", 80, 90), preemption("a", "b", 90), preemption("x", "a", 91)])
    found = looked(tmp_path)
    assert [(one.record.request, one.wall_ns) for one in found.timeline.marks] == [("a", BEGAN + 90 * SECOND)]
    assert [one.record.request for one in found.preemptions] == ["x", "a"]


def widths(found: list[requests_chart.Part]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in found:
        sums[part.bar] = sums.get(part.bar, 0) + part.width
    return sums


@pytest.mark.parametrize("seed", range(20))
def test_every_bar_adds_up_to_the_pool(seed: int) -> None:
    """Whoever holds how much, shared or not listed: each bar is as long as the pool is large."""
    chance = random.Random(seed)
    rows = [row(f"r{number}", chance.choice(["", *"abcdefghij"]), blocks=chance.randrange(12))
            for number in range(chance.randrange(1, 30))]
    sessions = requests_chart.sessions_of(rows)
    found = requests_chart.parts(pool(), work(), rows, sessions)
    assert all(total == pytest.approx(60 + 25 + 14 + 1) for total in widths(found).values())
    for one in rows:
        assert (one.request, one.blocks) in [(part.name, part.blocks) for part in found] or not one.blocks


def test_shared_blocks_are_divided_and_the_rest_is_said_to_be_unlisted() -> None:
    """Two requests of 45 share 60 blocks as 30 and 30; two of 20 leave 20 that nobody listed holds."""
    def by_request(blocks: int) -> list[tuple[str, int, float]]:
        rows = [row("a", "s", blocks=blocks), row("b", "t", blocks=blocks)]
        return [(part.name, part.blocks, part.width) for part in requests_chart.parts(pool(), work(), rows, ["s", "t"])
                if part.bar == "by request"]

    rest = [("pinned", 1, 1), ("cached", 25, 25), ("free", 14, 14)]
    assert by_request(45) == [("a", 45, pytest.approx(30)), ("b", 45, pytest.approx(30)), *rest]
    assert by_request(20) == [("a", 20, 20), ("b", 20, 20), ("unlisted", 20, 20), *rest]


@pytest.mark.parametrize(("held", "at", "says"), [
    (60, 99, []),
    (70, 100, ["The listed requests held 70 blocks together, and 60 are in use. Requests share the blocks of a common "
               "prefix, so each is drawn with its share of those in use."]),
    (50, 99, ["The requests' word is 1 s older than the pool's. The listed requests held 50 blocks together, and 60 "
              "are in use."])])
def test_what_the_bars_cannot_say_is_said(tmp_path: Path, held: int, at: float, says: list[str]) -> None:
    """Sums that differ are told with both numbers, and two moments are told apart."""
    write(tmp_path, [states([row("a", blocks=held)], at), pool(100)])
    assert requests_words.account(looked(tmp_path, at=101)) == says


def test_sessions_keep_their_colours() -> None:
    """A session keeps its colour while others come and go, and no two have the same."""
    first = requests_chart.sessions_of([row("1", "anna", blocks=5), row("2", "ben", blocks=9)])
    assert first == requests_chart.sessions_of([row("1", "anna", blocks=50), row("2", "ben", blocks=9)])
    second = requests_chart.sessions_of([row("1", "anna", blocks=5), row("3", "carl", blocks=30)], first)
    assert {name: second.index(name) for name in ("anna", "ben")} == {name: first.index(name) for name in first if name}
    assert "carl" in second
    many = [row(str(number), str(number), blocks=number) for number in range(1, 12)]
    sessions = requests_chart.sessions_of(many, second)
    assert sorted(sessions) == ["10", "11", "6", "7", "8", "9"]
    shades = requests_chart.colours(requests_chart.parts(pool(used=66), None, many, sessions), sessions)
    assert len(set(shades.values())) == len(shades)


def test_names_that_look_alike_are_told_apart() -> None:
    """Requests whose shortened names are equal have labels of their own, and so have sessions."""
    alike = [f"chatcmpl-{middle}-0123456789" for middle in "abc"]
    assert len(set(requests_words.names(alike).values())) == 3
    long = ["x" * 50 + "1", "x" * 50 + "2"]
    assert len({requests_chart.legend_of(name, long) for name in long}) == 2


def test_an_account_that_does_not_add_up_is_told(tmp_path: Path) -> None:
    """Blocks in no state are an error on the page; a sound pool has none."""
    write(tmp_path, [pool(99), work(99, unexplained=2)])
    assert requests_words.sound(looked(tmp_path)) == "The pool's account does not add up: 2 blocks are in no state."
    write(tmp_path / "two", [pool(99), work(99)])
    assert requests_words.sound(looked(tmp_path / "two")) == ""


def test_origin_is_what_the_store_says(tmp_path: Path) -> None:
    """The pool's origin and the facts of its source are those that were written."""
    write(tmp_path, [pool(99), model.Availability("vllm: page pinning", False, "It has one size of pages."),
                     model.Availability("torch", True, "")])
    found = looked(tmp_path)
    assert found.origin == ORIGIN
    assert [fact.record.subject for fact in found.facts] == ["vllm: page pinning"]
