"""The live view's charts: what they draw, read back from their Vega-Lite specification."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pandas")
pytest.importorskip("altair")

from kvobs.store import AttentionSecond, Stored
from streamlit_app import charts
from tests.events import turn

SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND


def second(held: int | None = None, **changes: object) -> tuple[Stored[AttentionSecond], int | None]:
    values: dict[str, object] = {
        "wall_ns": WALL, "cache_id": 1, "layers": "full", "t_ns": 0, "source": "transformers", "model": "m",
        "cache": "DynamicCache", "device": "cpu", "dtype": "float32", "session": "s", "turn": 1, "every": 3,
        "steps": 3, "hook_ns": 0, "tokens": 100, "queries": 40, "local_sum": 34.0, "chance_sum": 28.0, "entries": 200,
        "alive": 50, "blocks": 21, "pending": 6, "to_pending": 2, "to_active": 1, "reclaimable_bytes": 3 * 1024**2}
    return Stored("p", WALL, AttentionSecond(**values | changes)), held  # type: ignore[arg-type]


def test_shares_of_attention() -> None:
    """Sums divided by their counts; corrected for chance is (share - chance) / (1 - chance)."""
    row = charts.attention_frame([second(held=8 * 1024**2)]).iloc[0]
    assert row["within 64 tokens"] == pytest.approx(0.85)
    assert row["chance line"] == pytest.approx(0.7)
    assert row["corrected for chance"] == pytest.approx(0.5)
    assert row["alive (cosine > 0.15)"] == pytest.approx(0.25)
    assert (row["active"], row["pending evict"]) == (15, 6)
    assert (row["reclaimable"], row["held by the cache"]) == (3 * 1024**2, 8 * 1024**2)
    assert (row["to pending"], row["to active"]) == (2, 1)


def test_shares_without_a_denominator_are_absent() -> None:
    """Where nothing but sinks is in view there is no share, and where chance is one there is no correction."""
    table = charts.attention_frame([second(queries=0, local_sum=0.0, chance_sum=0.0, entries=0),
                                    second(local_sum=40.0, chance_sum=40.0)])
    assert table["within 64 tokens"].isna().tolist() == [True, False]
    assert table["corrected for chance"].isna().tolist() == [True, True]
    assert table["alive (cosine > 0.15)"].isna().tolist() == [True, False]


def drawn(found: Any) -> list[dict[str, Any]]:
    """The marks of a chart, each with the rows that it draws, as Vega-Lite's filter would select them."""
    told = found.to_dict()
    marks = []
    for layer in told.get("layer", [told]):
        rows = told["datasets"][layer.get("data", told.get("data"))["name"]]
        if layer.get("transform"):
            assert layer["transform"] == [{"filter": "datum.alone"}]
            rows = [row for row in rows if row["alone"]]
        marks.append({**layer, "rows": rows})
    return marks


def test_charts_of_nothing_are_none() -> None:
    """No data gives no chart."""
    assert charts.lines("t", "u", {"a": []}) is None
    assert charts.lines("t", "u", {}) is None
    assert charts.band("t", "u", [], []) is None
    assert charts.over(charts.attention_frame([second(queries=0)]), "t", "u", ["within 64 tokens"], "tokens") is None


@pytest.mark.parametrize("stacked", [False, True])
def test_one_sample_is_a_visible_mark(stacked: bool) -> None:
    """A stroke or an area through one sample shows nothing, so it has a point; longer lines have none."""
    single = drawn(charts.lines("t", "u", {"a": [(WALL, 1.0)]}, stacked=stacked))
    assert [mark["mark"]["type"] for mark in single][-1] == "point"
    assert [row["value"] for row in single[-1]["rows"]] == [1.0]
    two = drawn(charts.lines("t", "u", {"a": [(WALL, 1.0), (WALL + SECOND, 2.0)]}, stacked=stacked))
    assert [mark["mark"]["type"] for mark in two] == ["area" if stacked else "line"]
    assert [mark["mark"]["type"] for mark in drawn(charts.band("t", "u", [(WALL, 1.0)], []))][-1] == "point"


def test_no_stroke_crosses_a_gap() -> None:
    """Where a line had no value for more than two and a half of its usual distances a new run begins."""
    seconds = [0, 1, 2, 3, 10, 11, 12, 40, 50, 51]
    assert charts.runs([number * SECOND for number in seconds]) == [0, 0, 0, 0, 1, 1, 1, 2, 3, 3]
    assert charts.runs([0, 2 * SECOND, 4 * SECOND]) == [0, 0, 0]
    assert charts.runs([5]) == [0]
    assert charts.runs([]) == []
    marks = drawn(charts.lines("t", "u", {"a": [(WALL + number * SECOND, 1.0) for number in seconds]}))
    assert marks[0]["encoding"]["detail"]["field"] == "run"
    assert len(marks[-1]["rows"]) == 1


def test_lines_differ_by_more_than_colour() -> None:
    """Names keep their order, and no two of 36 lines share both colour and dash."""
    named = {f"{number:02}": [(WALL, 1.0), (WALL + SECOND, 2.0)] for number in reversed(range(36))}
    (mark,) = drawn(charts.lines("t", "u", named))
    colour, dash = (mark["encoding"][channel]["scale"] for channel in ("color", "strokeDash"))
    assert colour["domain"] == dash["domain"] == sorted(named)
    assert colour["range"][:6] == list(charts.PALETTE)
    assert len({(one, str(other)) for one, other in zip(colour["range"], dash["range"], strict=True)}) == 36


def test_every_chart_has_a_title_and_units() -> None:
    """Charts say what they show and in what."""
    samples = [(WALL, 1.0), (WALL + SECOND, 2.0)]
    table = charts.attention_frame([second(), second(tokens=101)])
    for chart in (charts.lines("about", "per second", {"a": samples}), charts.band("about", "per second", samples, []),
                  charts.over(table, "about", "per second", ["active"], "tokens"),
                  charts.over(table, "about", "per second", ["active"], "time", stacked=True)):
        told = chart.to_dict()
        assert told["title"] == "about"
        assert all(mark["encoding"]["y"]["title"] == "per second" for mark in told.get("layer", [told]))


def test_the_band_is_one_deviation_to_each_side() -> None:
    """Low and high are the mean less and plus the deviation, no less than zero; without a deviation there is none."""
    mean = [(WALL, 5.0), (WALL + SECOND, 1.0), (WALL + 2 * SECOND, 3.0)]
    rows = drawn(charts.band("t", "s", mean, [(WALL, 2.0), (WALL + SECOND, 4.0)]))[0]["rows"]
    assert [(row["low"], row["value"], row["high"]) for row in rows] == [
        (3.0, 5.0, 7.0), (0.0, 1.0, 5.0), (None, 3.0, None)]


def test_bytes_of_attention_have_one_unit() -> None:
    """Both lines are in the unit of the larger; where it is not known what was held that line is absent."""
    table = charts.attention_frame([second(held=8 * 1024**2), second(held=None, tokens=101)])
    (mark,) = drawn(charts.over_bytes(table, "t", ["held by the cache", "reclaimable"], "tokens"))
    assert mark["encoding"]["y"]["title"] == "MiB"
    assert [(row["tokens"], row["line"], row["value"]) for row in mark["rows"]] == [
        (100, "held by the cache", 8.0), (100, "reclaimable", 3.0), (101, "reclaimable", 3.0)]


def test_turns_are_drawn_as_they_were() -> None:
    """Held and slack add up to what was reserved in the unit of the axis; re-allocations are their own."""
    found = charts.turns([turn(turn=number, kv_bytes=number * 1024**2, kv_reserved_bytes=4 * 1024**2,
                               reallocations=7 * number) for number in (1, 2)])
    bars, points = drawn(found)
    assert bars["encoding"]["y"]["title"] == "KV (MiB)"
    assert [(row["turn"], row["part"], row["size"]) for row in bars["rows"]] == [
        (1, "held", 1), (2, "held", 2), (1, "slack", 3), (2, "slack", 2)]
    assert [(row["turn"], row["re-allocations"]) for row in points["rows"]] == [(1, 7), (2, 14)]


def test_bytes_are_scaled_together() -> None:
    """All lines of a chart of bytes share the unit of the largest value."""
    unit, scaled = charts.in_bytes({"a": [(0, 3 * 1024**2)], "b": [(0, 1024**2 / 2)]}, "/s")
    assert (unit, scaled) == ("MiB/s", {"a": [(0, 3.0)], "b": [(0, 0.5)]})
    assert charts.in_bytes({"a": [(0, 1023.0)]}) == ("B", {"a": [(0, 1023.0)]})


def test_a_mean_without_deviations_has_no_band() -> None:
    """Where no instant has a deviation there is a line and no area of nothing; where one has, there is an area."""
    mean = [(number * 10**9, 1.0) for number in range(3)]

    def marks(deviation: list[tuple[int, float]]) -> list[str]:
        found = charts.band("t", "s", mean, deviation).to_dict()
        return [layer["mark"]["type"] for layer in found["layer"]] if "layer" in found else [found["mark"]["type"]]

    assert "area" not in marks([])
    assert "area" in marks([(10**9, 0.5)])
