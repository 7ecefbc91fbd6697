"""Durations of calls for device memory: summaries against the statistics module, estimates by hand."""

from __future__ import annotations

import math
import statistics
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.allocator.calls import FAST, PROFILES, SLOW, Costs, call_name, cost_ns, costs_of, estimates, summary
from kvobs.allocator.recording import Calls

ROWS = st.lists(st.tuples(st.integers(0, 1 << 61), st.integers(0, 1 << 40), st.sampled_from(
    ["cudaMalloc", "cudaFree", "cuMemMap"])), max_size=60)


def calls(*rows: tuple[int, int, str]) -> Calls:
    return Calls(tuple(row[2] for row in rows), array("q", [row[0] for row in rows]),
                 array("q", [row[1] for row in rows]))


@given(ROWS)
def test_summaries_are_what_statistics_says(rows: list[tuple[int, int, str]]) -> None:
    """Counts, totals, medians, nearest-rank percentiles and first calls are those of a plain count over the rows."""
    found = {entry.name: entry for entry in summary(calls(*rows))}
    assert set(found) == {name for *_, name in rows}
    for name, entry in found.items():
        durations = [duration for _, duration, other in rows if other == name]
        assert (entry.count, entry.total_ns, entry.max_ns) == (len(durations), sum(durations), max(durations))
        assert entry.median_ns == math.floor(statistics.median(durations))
        assert entry.p95_ns in durations
        assert sum(duration <= entry.p95_ns for duration in durations) >= 0.95 * len(durations)
        assert sum(duration < entry.p95_ns for duration in durations) < 0.95 * len(durations)
        assert entry.first_ns == min((row for row in rows if row[2] == name), key=lambda row: row[0])[1]
    totals = [entry.total_ns for entry in summary(calls(*rows))]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(("name", "expected"), [
    ("cudaMalloc", "cudaMalloc"), ("cudaMalloc_v3020", "cudaMalloc"), ("cuMemAlloc_v2", "cuMemAlloc"),
    ("cuMemFree_v2_ptds", "cuMemFree"), ("cudaMallocAsync_ptsz_v11020", "cudaMallocAsync"), ("my_view", "my_view")])
def test_a_call_is_known_without_its_version(name: str, expected: str) -> None:
    """CUDA's and Nsight's versions and per-thread variants of a call count as that call."""
    assert call_name(name) == expected


def test_an_estimate_is_counts_times_durations() -> None:
    """Ten device allocations, four frees and 25 mapped pages cost what the two sources say, by hand."""
    assert cost_ns(FAST, 10, 4, 25).ns == 10 * 364_500 + 4 * 319_000 + 25 * 193_000
    assert cost_ns(SLOW, mapped_pages=25).ns == 14_200_000
    assert all(profile.source in cost_ns(profile, 1).source for profile in PROFILES)


def test_an_estimate_says_what_it_does_not_know() -> None:
    """Unmapping, of which no source tells the time, is named and not counted as zero; alone it gives no number."""
    assert cost_ns(FAST, device_allocs=2, unmapped_pages=3).missing == ("unmap",)
    assert cost_ns(FAST, device_allocs=2, unmapped_pages=3).ns == 2 * 364_500
    assert cost_ns(FAST, unmapped_pages=3).ns is None
    assert cost_ns(FAST).ns == 0


def test_a_recording_s_own_calls_come_first() -> None:
    """Where a file recorded what is asked about, its medians estimate; where it did not, both profiles do."""
    own = calls((0, 1_000, "cudaMalloc"), (1, 3_000, "cudaMalloc"), (2, 500, "cudaFree"))
    assert [estimate.ns for estimate in estimates(own, 2, 1)] == [2 * 2_000 + 500]
    assert len(estimates(own, 2, 1, mapped_pages=1)) == len(PROFILES)
    assert len(estimates(Calls(), 2, 1)) == len(PROFILES)
    assert costs_of(Calls()) is None


def test_mapping_includes_its_handle_and_access() -> None:
    """A page costs its creation, mapping and access, and to unmap it its release, where they were recorded."""
    own = calls((0, 100, "cuMemCreate"), (1, 10, "cuMemMap"), (2, 1, "cuMemSetAccess"), (3, 20, "cuMemUnmap"),
                (4, 5, "cuMemRelease"))
    assert costs_of(own) == Costs("recorded", "medians of the calls that this file recorded", None, None, 111, 25)
