"""What the live view works out from a store, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pandas")
pytest.importorskip("altair")

import itertools

from kvobs.catalog import BY_NAME
from kvobs.model import Turn
from kvobs.store import AttentionSecond, Series, Stored, StoreWriter
from streamlit_app import charts, data, units
from tests.events import turn

SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND


def one(metric: str, values: list[float], process: str = "p", start: int = 0, **attributes: str) -> Series:
    return Series(process, metric, attributes, [WALL + (start + index) * SECOND for index in range(len(values))],
                  values, [None] * len(values))


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
        with pytest.raises(data.NothingYet, match=r"kvobs run -- python serve\.py"):
            data.live(str(place), None, 60)


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


def second(**changes: object) -> Stored[AttentionSecond]:
    values: dict[str, object] = {
        "wall_ns": WALL, "cache_id": 1, "layers": "full", "t_ns": 0, "source": "transformers", "model": "m",
        "cache": "DynamicCache", "device": "cpu", "dtype": "float32", "session": "s", "turn": 1, "every": 3,
        "steps": 3, "hook_ns": 0, "tokens": 100, "queries": 40, "local_sum": 34.0, "chance_sum": 28.0, "entries": 200,
        "alive": 50, "blocks": 21, "pending": 6, "to_pending": 2, "to_active": 1, "reclaimable_bytes": 3 * 1024**2}
    return Stored("p", WALL, AttentionSecond(**values | changes))  # type: ignore[arg-type]


def test_shares_of_attention() -> None:
    """Sums divided by their counts; corrected for chance is (share - chance) / (1 - chance)."""
    row = charts.attention_frame([second()]).iloc[0]
    assert row["within 64 tokens"] == pytest.approx(0.85)
    assert row["chance line"] == pytest.approx(0.7)
    assert row["corrected for chance"] == pytest.approx(0.5)
    assert row["alive (cosine > 0.15)"] == pytest.approx(0.25)
    assert (row["active"], row["pending evict"], row["reclaimable (MiB)"]) == (15, 6, 3)


def test_shares_without_a_denominator_are_absent() -> None:
    """Where nothing but sinks is in view there is no share, and where chance is one there is no correction."""
    table = charts.attention_frame([second(queries=0, local_sum=0.0, chance_sum=0.0, entries=0),
                                    second(local_sum=40.0, chance_sum=40.0)])
    assert table["within 64 tokens"].isna().tolist() == [True, False]
    assert table["corrected for chance"].isna().tolist() == [True, True]
    assert table["alive (cosine > 0.15)"].isna().tolist() == [True, False]


def test_thinning_keeps_the_last_row() -> None:
    """Many rows become at most as many as are wanted, evenly, and the newest is among them."""
    rows = [second(t_ns=number) for number in range(1_001)]
    thin = data.thinned(rows, 100)
    assert len(thin) <= 100
    assert thin[-1] is rows[-1]
    steps = {later.record.t_ns - earlier.record.t_ns for earlier, later in itertools.pairwise(thin)}
    assert len(steps) == 1


def test_charts_of_nothing_are_none() -> None:
    """No data gives no chart, one point gives a visible mark, names keep their colour and dash."""
    assert charts.lines("t", "u", {"a": []}) is None
    assert charts.band("t", "u", [], []) is None
    single = charts.lines("t", "u", {"a": [(WALL, 1.0)]}).to_dict()
    assert single["mark"]["point"] is True
    two = charts.lines("t", "u", {"b": [(WALL, 1.0), (WALL + 1, 2.0)], "a": [(WALL, 1.0)]}).to_dict()
    assert two["encoding"]["color"]["scale"] == {"domain": ["a", "b"], "range": list(charts.PALETTE[:2])}
    assert two["encoding"]["strokeDash"]["scale"]["range"] == [list(dash) for dash in charts.DASHES[:2]]


def test_bytes_are_scaled_together() -> None:
    """All lines of a chart of bytes share the unit of the largest value."""
    unit, scaled = charts.in_bytes({"a": [(0, 3 * 1024**2)], "b": [(0, 1024**2 / 2)]}, "/s")
    assert (unit, scaled) == ("MiB/s", {"a": [(0, 3.0)], "b": [(0, 0.5)]})


def test_the_tables_of_turns() -> None:
    """A turn's two lines hold its own numbers; what cannot be divided is absent."""
    pytest.importorskip("streamlit")
    from streamlit_app.views import turns

    line, work = turns.sizes(turn()), turns.work(turn())
    assert (line["prompt"], line["of it cached"], line["new"], line["KV held"]) == (11, 4, 5, "1,000 B")
    assert line["fragmentation (article)"] == "75.0 %"
    assert (work["re-allocations"], work["migrations"], work["share across devices"]) == (20, 2, "9.1 %")
    assert (work["copied / written"], work["TTFT"], work["per token"]) == (3.0, "500 ms", "375 ms")
    bare: Turn = turn(kv_reserved_bytes=0, reallocations=0, migrations=(), bytes_written=0, ttft_ns=None, tpot_ns=None)
    assert turns.sizes(bare)["fragmentation (article)"] == "absent"
    assert [turns.work(bare)[name] for name in ("share across devices", "copied / written", "TTFT", "per token")] == [
        "absent", None, "absent", "absent"]
