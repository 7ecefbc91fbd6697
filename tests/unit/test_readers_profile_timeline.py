"""Memory timelines of torch's profiler: against a plain second reading, torch's own two exports, and real files."""

from __future__ import annotations

import gzip
import itertools
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.allocator.readers import _profile_json, _timeline
from kvobs.allocator.recording import UNKNOWN, Usage

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "profiler" / "memory_timeline.raw.gz"
ROWS = st.lists(st.tuples(st.integers(0, 1 << 60), st.sampled_from([2, 3, 4]), st.integers(-(1 << 40), 1 << 40),
                          st.integers(0, 7)), min_size=1, max_size=40)
BEFORE = st.lists(st.tuples(st.just(-1), st.just(1), st.integers(0, 1 << 40), st.integers(0, 7)), max_size=5)


def usage_of(document: Any) -> Usage:
    return _profile_json.parse(json.dumps(document).encode(), "t.json").usage[0]


def torch_points(rows: list[tuple[int, int, int, int]]) -> tuple[list[int], list[list[int]]]:
    """Second implementation, from torch's description of its plot: one point per microsecond, sizes by category."""
    known = [row[0] for row in rows if row[0] > 0]
    first = min(known) if known else None
    moments = [(UNKNOWN if first is None else int(first / 1000)) if row[0] <= 0 else int(row[0] / 1000) for row in rows]
    times, sizes, sums = [], [], Counter[int]()
    for moment, group in itertools.groupby(zip(moments, rows, strict=True), key=lambda pair: pair[0]):
        for _, (_, _, size, category) in group:
            sums[category] += size
        times.append(moment)
        sizes.append([sums[category] for category in range(8)])
    return times, sizes


@given(BEFORE, ROWS)
def test_rows_sum_up_by_category(before: list[tuple[int, int, int, int]],
                                 rows: list[tuple[int, int, int, int]]) -> None:
    """Raw rows give the same points as a plain second implementation, and allocated is the sum of the categories."""
    history = before + sorted(rows, key=lambda row: row[0])
    usage = usage_of(history)
    times, sizes = torch_points(history)
    assert list(usage.time_us) == times
    assert [list(point) for point in zip(*usage.categories.values(), strict=True)] == sizes
    assert list(usage.allocated) == [sum(point) for point in sizes]
    assert set(usage.reserved) == {UNKNOWN}


@given(st.lists(st.lists(st.integers(0, 1 << 50), min_size=8, max_size=8), min_size=1, max_size=20))
def test_plot_points_come_back(sizes: list[list[int]]) -> None:
    """The other form's times and sizes by category are read as they were written, without its column of zeros."""
    usage = usage_of([list(range(len(sizes))), [[0, *row] for row in sizes]])
    assert list(usage.time_us) == list(range(len(sizes)))
    assert [list(point) for point in zip(*usage.categories.values(), strict=True)] == sizes


def test_torch_s_two_exports_of_one_profile_agree(tmp_path: Path) -> None:
    """The raw rows and the plot points that torch itself writes for one profile read as the same usage."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.profiler import ProfilerActivity, profile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True,
                     with_stack=True) as made:
            layer, rows = torch.nn.Linear(32, 32), torch.randn(4, 32)
            layer(rows).sum().backward()
        for name in ("p.raw.json.gz", "p.json"):
            made.export_memory_timeline(str(tmp_path / name), device="cpu")
    raw = _timeline.parse(gzip.decompress((tmp_path / "p.raw.json.gz").read_bytes()), "raw").usage[0]
    plot = _timeline.parse((tmp_path / "p.json").read_bytes(), "plot").usage[0]
    assert raw == plot
    assert raw.categories["parameter"][-1] == (32 * 32 + 32) * 4
    assert max(raw.allocated) > 0


@pytest.mark.parametrize(("text", "says"), [
    (b"[]", "holds neither"),
    (b"[[1, 9, 3, 4]]", "action 1-4"),
    (b"[[1, 2, 3, 8]]", "action 1-4"),
    (b"[[1, 2, 3, 4], [1, 2, 3", "cut off"),
    (b"[[1, 2, 3]]", "no memory timeline"),
    (b"[[], []]", "holds no points"),
    (b"[[1], [[0, 1, 2]]]", "9 sizes for each of its 1 times"),
    (b"[[1, 2], [[0, 1, 2, 3, 4, 5, 6, 7, 8]]]", "its 2 times"),
    (b"[[9223372036854775807, 2, 3, 4]]", "action 1-4"),
    (b"[[1, 2, 99999999999999999999999999, 4]]", "Row 1 .* impossible"),
    (b"[[9223372036854775807], [[0, 1, 2, 3, 4, 5, 6, 7, 8]]]", "larger than any"),
    (b"<html>\n<head><meta charset=\"utf-8\" /><title>GPU Memory Timeline HTML</title></head>", "only a picture"),
    (b"<!DOCTYPE html><html></html>", "HTML page"),
])
def test_what_is_wrong_is_said_in_a_sentence(text: bytes, says: str) -> None:
    """A timeline that is cut off, empty, of another form or only a picture is refused with the reason."""
    with pytest.raises(ValueError, match=says):
        _profile_json.parse(text, "t.json")


def test_sums_that_no_device_has_are_refused() -> None:
    """Sizes that each are possible but add up beyond every device do not overflow a column: the file is refused."""
    with pytest.raises(ValueError, match="more bytes than any device"):
        usage_of([[1, 2, 1 << 50, 0]] * 2)


def test_a_real_timeline() -> None:
    """The public timeline's 16,845 rows end at the plain sum of its sizes and peak where a plain running sum does."""
    if not SHARED.is_file():
        pytest.skip(f"{SHARED.name} of the shared data is not here.")
    data = gzip.decompress(SHARED.read_bytes())
    rows = json.loads(data)
    assert len(rows) == 16_845
    recording = _timeline.parse(data, SHARED.name)
    usage = recording.usage[0]
    times, sizes = torch_points(rows)
    assert list(usage.time_us) == times
    assert list(usage.allocated) == [sum(point) for point in sizes]
    assert usage.allocated[-1] == sum(row[2] for row in rows) == 332_060_904
    assert any("645 of 16845 rows" in note for note in recording.notes)
