"""Native counters: what two readings of one say, and values that stand for counted ones."""

from __future__ import annotations

import bisect
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.catalog import LATENCY_BOUNDS_NS as BOUNDS_NS
from kvobs.catalog import LATENCY_BUCKETS
from kvobs.metrics import Metrics
from kvobs.metrics._counted import representatives
from kvobs.model import AllocationLatencies, LatencyCounts, Poll
from kvobs.sources._alloc_counts import Growth


def counts(latencies: list[int], **fields: Any) -> LatencyCounts:
    """A reading after these latencies (ns)."""
    buckets = [0] * (len(BOUNDS_NS) + 1)
    for latency in latencies:
        buckets[bisect.bisect_left(BOUNDS_NS, latency)] += 1
    values: dict[str, Any] = {
        "allocations": len(latencies), "frees": 0, "allocated_bytes": 64 * len(latencies), "freed_bytes": 0,
        "buckets": tuple(buckets), "sum_ns": sum(latencies), "sampled_every": 1}
    return LatencyCounts(**values | fields)


def total(readings: Any, name: str, *attributes: str) -> float:
    (value,) = [value for metric, key, value in readings if (metric, key) == (name, ("cpu", *attributes))]
    return float(value)


NS = st.sampled_from([1, 999, 1000, 1001, 12_000_000, 12_000_001, 2_500_000_000, 2_500_000_001, 10**10]) | st.integers(
    1, 10**10)


@given(st.lists(st.lists(NS, max_size=6), min_size=1, max_size=6))
def test_a_histogram_in_bulk_is_the_histogram_one_by_one(program: list[list[int]]) -> None:
    """Folding counted latencies reading by reading gives the buckets, sum and count of observing every single one."""
    bulk = Metrics(clock=lambda: 0)
    growth, seen = Growth("cpu"), list[int]()
    for latencies in program:
        seen += latencies
        event, readings = growth.take(0, counts(seen))
        assert (event is None) == (not latencies)
        bulk.fold([Poll(0, "cpu_alloc", 0, readings), *([event] if event else [])])
    found = {row.name: points for row, points in bulk.collect()}
    if seen:
        histogram = found["kvobs.alloc.latency"]["cpu",]
        assert histogram.counts == [  # type: ignore[union-attr]
            sum(low < latency / 1e9 <= high for latency in seen)
            for low, high in zip((0.0, *LATENCY_BUCKETS), (*LATENCY_BUCKETS, math.inf), strict=True)]
        assert math.isclose(histogram.total, sum(seen) / 1e9, rel_tol=1e-9)  # type: ignore[union-attr]
    assert found["kvobs.alloc.slow"]["cpu",] == sum(latency > 12_000_000 for latency in seen)
    # What is recorded for OpenTelemetry is as many values, in the same buckets, with the same sum.
    recorded = [(seen.value, seen.times) for seen in bulk.take_observations()]
    assert sum(times for _, times in recorded) == len(seen)
    assert math.isclose(math.fsum(value * times for value, times in recorded), sum(seen) / 1e9, rel_tol=1e-8)


@given(st.lists(NS, min_size=1, max_size=30))
def test_representatives_lie_in_their_buckets_and_keep_the_sum(latencies: list[int]) -> None:
    """Each non-empty bucket has one value inside it, as often as it counts, and together they have the true sum."""
    made = counts(latencies)
    found = list(representatives(LATENCY_BUCKETS, made.buckets, made.sum_ns / 1e9))
    again = [0] * (len(LATENCY_BUCKETS) + 1)
    for value, times in found:
        again[bisect.bisect_left(LATENCY_BUCKETS, value)] += times
    assert tuple(again) == made.buckets
    assert math.isclose(math.fsum(value * times for value, times in found), made.sum_ns / 1e9, rel_tol=1e-8)


def test_a_sum_that_contradicts_the_counts_moves_no_bucket() -> None:
    """A torn reading whose sum is too small or too large for its counts still records the counts that it has."""
    buckets = (0, 2, 1, *(0,) * (len(LATENCY_BUCKETS) - 2))
    for wrong in (0.0, 1e-9, 5.0):
        found = list(representatives(LATENCY_BUCKETS, buckets, wrong))
        assert [times for _, times in found] == [2, 1]
        assert 1e-6 < found[0][0] <= 1e-5 < found[1][0] <= 1e-4


def test_what_is_alive_at_the_beginning_counts_as_allocated() -> None:
    """A source that begins late, or in a forked child, tells what is alive as allocated and nothing more."""
    since = counts([5, 10**8], frees=1, freed_bytes=64, untracked=3)
    growth = Growth("cpu", since)
    event, readings = growth.take(0, since)
    assert event is None
    assert total(readings, "kvobs.alloc.operations", "allocate") == 1
    assert total(readings, "kvobs.alloc.io", "allocate") == 64
    assert [total(readings, "kvobs.alloc.operations", kind) for kind in ("free", "untracked")] == [0, 0]
    assert total(readings, "kvobs.alloc.slow") == 0
    event, readings = growth.take(1, counts([5, 10**8, 7], frees=3, freed_bytes=192, untracked=4))
    assert event == AllocationLatencies(1, "cpu", (1, *(0,) * len(BOUNDS_NS)), 7)
    assert total(readings, "kvobs.alloc.operations", "allocate") == total(readings, "kvobs.alloc.operations", "free")
    assert total(readings, "kvobs.alloc.io", "allocate") == total(readings, "kvobs.alloc.io", "free") == 128
    assert total(readings, "kvobs.alloc.operations", "untracked") == 1


@pytest.mark.parametrize("field", ["allocations", "frees", "allocated_bytes", "freed_bytes", "sum_ns", "untracked"])
def test_a_counter_that_went_back_has_begun_anew(field: str) -> None:
    """When any count is smaller than before, all of the new reading happened since: none is lost or negative."""
    growth = Growth("cpu")
    growth.take(0, counts([5, 5], frees=2, freed_bytes=128, untracked=2))
    fields = {"frees": 2, "freed_bytes": 128, "untracked": 2, "allocations": 2, "allocated_bytes": 128, "sum_ns": 10}
    event, readings = growth.take(1, counts([5, 5], **fields | {field: fields[field] - 1}))
    assert event is not None
    assert sum(event.counts) == 2
    assert total(readings, "kvobs.alloc.operations", "allocate") == (3 if field == "allocations" else 4)
    assert total(readings, "kvobs.alloc.operations", "free") == (3 if field == "frees" else 4)
