"""What the live view works out from a store, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pandas")
pytest.importorskip("altair")

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.catalog import BY_NAME
from kvobs.model import FlightRecord, Turn
from kvobs.store import Process, Series, StoreWriter
from streamlit_app import data, units
from tests.events import turn

SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND


def one(metric: str, values: list[float], process: str = "p", start: int = 0, **attributes: str) -> Series:
    return Series(process, metric, attributes, [WALL + (start + index) * SECOND for index in range(len(values))],
                  values)


def shown(found: list[Series], now: int = 10) -> dict[str, data.Figure]:
    return {figure.key: figure for figure in data.figures(found, WALL + now * SECOND)}


def test_rates_are_growth_per_second() -> None:
    """Differences over time; a fall (a new beginning) gives no rate, neither a negative one nor a jump."""
    samples = [(0, 10.0), (SECOND, 30.0), (3 * SECOND, 40.0), (4 * SECOND, 5.0), (5 * SECOND, 6.0)]
    assert data.rate(samples) == [(SECOND, 20.0), (3 * SECOND, 5.0), (5 * SECOND, 1.0)]
    assert data.rate(samples[:1]) == []


def test_series_add_up_as_the_catalog_says() -> None:
    """Bytes of two devices add up at each instant, the largest buffer is the largest."""
    usage = [one("kvobs.kv.usage", [1, 2], device="a"), one("kvobs.kv.usage", [10], start=1, device="b")]
    assert data.over_time(usage) == [(WALL, 1), (WALL + SECOND, 12)]
    largest = [one("kvobs.kv.buffer.largest", [4], device="a"), one("kvobs.kv.buffer.largest", [9], device="b")]
    assert data.over_time(largest) == [(WALL, 9)]


def test_the_strip_says_what_the_series_say() -> None:
    """Newest values with units and ages, rates of counters, the jitter as the root of the variance, words of levels."""
    found = [one("kvobs.kv.usage", [2048, 1_572_864], state="held"), one("kvobs.kv.usage", [0, 512], state="slack"),
             one("kvobs.kv.reallocations", [100, 160], phase="decode"), one("kvobs.step.tokens", [5, 16]),
             one("kvobs.window.step.variance", [1, 0.0004]), one("kvobs.self.throttle", [0, 2]),
             one("kvobs.self.overhead", [0.01, 0.025])]
    strip = shown(found, now=3)
    assert (strip["kv-held"].text, strip["kv-held"].raw, strip["kv-held"].age_s) == ("1.50 MiB", "1,572,864 B", 2.0)
    assert strip["kv-slack"].raw == "512 B"
    assert (strip["reallocations"].text, strip["tokens"].text) == ("60", "11")
    assert strip["jitter"].text == "20 ms"
    assert strip["guard"].text == data.GUARD[2]
    assert strip["overhead"].text == "2.5 %"


def test_what_has_no_value_is_absent() -> None:
    """A metric that nobody reports, and a gauge that ended before the last sample, are absent and not zero."""
    found = [one("kvobs.kv.usage", [7], state="held"), one("kvobs.self.overhead", [0.1, 0.1, 0.1])]
    strip = shown(found)
    assert (strip["kv-held"].text, strip["kv-held"].raw, strip["kv-held"].age_s) == ("absent", "no value", None)
    assert strip["dropped"].text == "absent"


def test_several_processes_add_up_where_that_has_a_meaning() -> None:
    """Bytes and rates of two processes add up, the overhead is the larger one, ages are of the newest."""
    found = [one("kvobs.kv.usage", [100], "a", state="held"), one("kvobs.kv.usage", [11], "b", state="held", start=1),
             one("kvobs.kv.reallocations", [0, 5], "a"), one("kvobs.kv.reallocations", [100, 107], "b"),
             one("kvobs.self.overhead", [0.1, 0.2], "a"), one("kvobs.self.overhead", [0.1, 0.05], "b")]
    found = [series for series in found if series.metric != "kvobs.kv.usage" or series.process == "b"]
    strip = shown(found)
    assert strip["kv-held"].raw == "11 B"
    assert strip["reallocations"].raw == "12 /s"
    assert strip["overhead"].text == "20.0 %"


@pytest.mark.parametrize(("value", "text"), [
    (0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (1.5 * 1024**3, "1.50 GiB"), (2**60, "1,024.00 PiB")])
def test_sizes(value: float, text: str) -> None:
    """Bytes have the binary unit that leaves less than 1,024 of them."""
    assert units.size(value) == text


@pytest.mark.parametrize(("value", "text"), [
    (0.0000123, "12.3 µs"), (0.0123, "12.3 ms"), (5.5, "5.5 s"), (240, "4 min"), (9000, "2.5 h")])
def test_durations(value: float, text: str) -> None:
    """A duration has the unit that people would use."""
    assert units.seconds(value) == text


def test_nothing_yet_says_what_to_do(tmp_path: Path) -> None:
    """A directory that is missing or empty is not an error, and the sentence says how to begin."""
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(data.NothingYet, match=r"Start a process with:$") as found:
            data.live(str(place), None, 60)
        assert found.value.command == "kvobs run -- python serve.py"


def test_a_range_ends_where_an_ended_process_ended(tmp_path: Path) -> None:
    """Of a process that ended an hour ago the last minute before its end is shown, with its age."""
    now = [0]
    writer = StoreWriter(tmp_path, 64 * 1024**2, "p", clock=lambda: now[0], wall=lambda: WALL)
    for second in range(100):
        now[0] = second * SECOND
        writer.write_points([(BY_NAME["kvobs.kv.usage"], {("m", "cpu", "x", "held"): float(second)})])
        writer.commit()
    writer.close()
    found = data.live(str(tmp_path), None, 60, now_ns=WALL + 3_700 * SECOND)
    (held,) = found.series
    assert held.values == [float(second) for second in range(100 - len(held.values), 100)]
    assert 58 <= len(held.values) <= 61
    assert (found.running, found.age_s) == (False, 3_601.0)


def test_thinning_keeps_the_last_row() -> None:
    """Many rows become at most as many as are wanted, evenly, and the newest is among them."""
    thin = data.thinned(range(1_001), 100)
    assert len(thin) <= 100
    assert thin[-1] == 1_000
    assert len({later - earlier for earlier, later in itertools.pairwise(thin)}) == 1
    assert data.thinned(range(7), 7) == list(range(7))


def test_the_tables_of_turns() -> None:
    """A turn's two lines hold its own numbers; what cannot be divided is absent."""
    pytest.importorskip("streamlit")
    from streamlit_app.views import turns

    line, work = turns.sizes(turn()), turns.work(turn())
    assert (line["prompt"], line["of it cached"], line["new"], line["KV held"]) == (11, 4, 5, "1,000 B")
    assert line["fragmentation (article)"] == "75.0 %"
    assert (work["re-allocations"], work["migrations"], work["share across devices"]) == (20, 2, "9.1 %")
    assert (work["copied / written"], work["TTFT"], work["per token"]) == ("3.0", "500 ms", "375 ms")
    bare: Turn = turn(kv_reserved_bytes=0, reallocations=0, migrations=(), bytes_written=0, ttft_ns=None, tpot_ns=None)
    assert turns.sizes(bare)["fragmentation (article)"] == "absent"
    assert {turns.work(bare)[name] for name in ("share across devices", "copied / written", "TTFT", "per token")} == {
        "absent"}


def process(name: str, alive: bool, heartbeat: int = 0) -> Process:
    return Process(name, alive, 7, "h", "3", ("python", "serve.py"), 0, 0, None, heartbeat, None, 0)


def test_figures_add_up_what_is_held_at_one_time() -> None:
    """Running processes count, silent or not; of ended ones those that ended with the last, within three seconds."""
    last = {"a": 100 * SECOND, "b": 98 * SECOND, "c": 10 * SECOND}
    told = [data.told_of([process(name, name in running) for name in "abcd"], last)
            for running in ("", "c", "bd", "abcd")]
    assert told == [["a", "b"], ["c"], ["b", "d"], ["a", "b", "c", "d"]]
    assert data.told_of([process("d", False)], last) == []


def live_store(directory: Path, name: str, until: int, step: float = 1.0) -> StoreWriter:
    """A writer that is left open, so that its process counts as running; a point per second until then."""
    now = [0]
    writer = StoreWriter(directory, 64 * 1024**2, name, clock=lambda: now[0], wall=lambda: WALL)
    for second in range(until + 1):
        now[0] = second * SECOND
        writer.write_points([(BY_NAME["kvobs.kv.usage"], {("m", "cpu", "x", "held"): 100.0 + second}),
                             (BY_NAME["kvobs.kv.reallocations"], {("m", "cpu", "x", "decode"): step * second})])
        writer.commit()
    return writer


def test_figures_do_not_depend_on_the_range(tmp_path: Path) -> None:
    """The strip tells the last second whatever the charts span, also of a running process that fell silent long ago."""
    writer = live_store(tmp_path, "p", 900, step=3.0)
    try:
        told = [data.live(str(tmp_path), None, reach, now_ns=WALL + 1_000 * SECOND) for reach in (60, 300, 3_600, None)]
    finally:
        writer.close()
    for found in told:
        strip = {figure.key: figure for figure in found.figures}
        assert (strip["kv-held"].raw, strip["kv-held"].age_s) == ("1,000 B", 100.0)
        assert strip["reallocations"].raw == "3 /s"
        assert (found.running, found.age_s, len(found.stale)) == (True, 100.0, 1)
    assert [bool(found.series) for found in told] == [False, True, True, True]
    assert [found.every_s for found in told[:3]] == pytest.approx([0.15, 0.75, 9.0], abs=0.01)


def test_what_an_ended_process_held_is_not_added(tmp_path: Path) -> None:
    """With all processes chosen the bytes and rates are of those that run, while charts keep the one that ended."""
    live_store(tmp_path, "old", 50).close()
    writer = live_store(tmp_path, "new", 60)
    try:
        found = data.live(str(tmp_path), None, 300, now_ns=WALL + 60 * SECOND)
    finally:
        writer.close()
    strip = {figure.key: figure for figure in found.figures}
    assert (strip["kv-held"].raw, strip["reallocations"].raw) == ("160 B", "1 /s")
    assert (found.told, found.chosen) == (1, 2)
    assert {series.process for series in found.series} == {"old", "new"}


def test_a_chosen_process_is_read_alone(tmp_path: Path) -> None:
    """Facts, figures and series are of the chosen process; the picker still has all."""
    live_store(tmp_path, "a", 5).close()
    live_store(tmp_path, "b", 7).close()
    found = data.live(str(tmp_path), "a", None, now_ns=WALL + 9 * SECOND)
    assert {series.process for series in found.series} == {"a"}
    assert {one.process for one in found.processes} == {"a", "b"}
    assert {figure.key: figure for figure in found.figures}["kv-held"].raw == "105 B"


def test_pickers_notice_what_is_new(tmp_path: Path) -> None:
    """What the pickers depend on changes with the first store, each process, its end and each session."""
    looks: list[tuple[object, object]] = []

    def look() -> None:
        looks.append((data.processes_seen(str(tmp_path)), data.sessions_seen(str(tmp_path))))

    look()
    writer = StoreWriter(tmp_path, 64 * 1024**2, "a")
    writer.commit()
    look()
    writer.write([turn(session="anna")])
    writer.commit()
    look()
    writer.write([turn(session="anna", turn=3)])
    writer.commit()
    look()
    writer.close()
    look()
    look()
    assert [len({str(one[0]) for one in looks[:number]}) for number in range(1, 7)] == [1, 2, 2, 2, 3, 3]
    assert [len({str(one[1]) for one in looks[:number]}) for number in range(1, 7)] == [1, 2, 3, 3, 4, 4]


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zs", "Zl", "Zp"])))
def test_plain_text_reads_as_itself(text: str) -> None:
    """Markdown reads the escaped text as that very text and nothing else, by an independent parser."""
    markdown = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")
    tokens = markdown.MarkdownIt("commonmark").parse(units.plain(text))
    assert "".join(child.content for token in tokens for child in token.children or ()) == text
    assert {child.type for token in tokens for child in token.children or ()} <= {"text", "text_special"}
    assert [token.type for token in tokens] == (
        ["paragraph_open", "inline", "paragraph_close"] if text else [])


def flight(snapshot: str) -> FlightRecord:
    return FlightRecord(0, "out_of_memory", "cuda:0", 512, "no memory", "", snapshot)


def test_verdicts_of_a_flight_record() -> None:
    """The verdict on what failed and the one on the next step; undecided between two, or untold with the reason."""
    both = flight(json.dumps({
        "verdict": {"verdict": None, "between": ["SERVED", "CAPACITY"], "sentence": "It depends."},
        "next_step": {"estimated": True, "verdict": None, "reason": "There were too many."}}))
    assert data.verdicts(both) == [
        data.Judged("The request that failed", "SERVED or CAPACITY", "It depends."),
        data.Judged("The next step, estimated", "no verdict", "There were too many.")]
    older = flight('{"verdict":{"verdict":"GROW","sentence":"It grows."}}')
    assert data.verdicts(older) == [data.Judged("The request that failed", "GROW", "It grows.")]


@pytest.mark.parametrize("snapshot", ["", "{", "[]", "null", "7", '{"verdict":7,"next_step":[]}', '{"totals":{}}'])
def test_a_flight_record_without_verdicts_has_none(snapshot: str) -> None:
    """Records of older versions, of other engines, or damaged ones say nothing instead of failing."""
    assert data.verdicts(flight(snapshot)) == []
