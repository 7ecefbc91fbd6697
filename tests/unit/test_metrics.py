"""The fold: what each event does to the points, worked out by hand."""

from __future__ import annotations

import pytest

from kvobs import model
from kvobs.catalog import BY_NAME
from kvobs.metrics import Exemplar, Histogram, Metrics
from tests.events import blocks, origin, step, turn

MS = 1_000_000
WHO = ("tiny", "cpu", "DynamicCache")


class Ticks:
    """A clock that moves by one microsecond per reading."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1_000
        return self.now


def fresh(**settings: int) -> Metrics:
    return Metrics(wall=lambda: 1_700_000_000.5, clock=Ticks(), **settings)


def points(metrics: Metrics, name: str) -> dict[tuple[str, ...], object]:
    """The points of one metric, histograms as (counts, sum)."""
    found = {row.name: values for row, values in metrics.collect()}.get(name, {})
    return {key: (value.counts, pytest.approx(value.total)) if isinstance(value, Histogram) else value
            for key, value in found.items()}


def fold(*events: model.Event, now_ns: int = 0, **settings: int) -> Metrics:
    metrics = fresh(**settings)
    assert metrics.fold(events) == len(events)
    metrics.refresh(now_ns)
    return metrics


def test_nothing_seen_is_nothing_shown() -> None:
    """Without events no metric has a point but the cost of looking."""
    assert [row.name for row, _ in fold().collect()] == ["kvobs.self.window.duration"]


def test_a_step() -> None:
    """A step's bytes, buffers, tokens and times arrive in their metrics under its origin and phase."""
    metrics = fold(step(prefill=True, tokens=9), step(), now_ns=1_000)
    expected: dict[str, dict[tuple[str, ...], object]] = {
        "kvobs.kv.usage": {(*WHO, "held"): 1_000, (*WHO, "slack"): 200},
        "kvobs.kv.buffer.largest": {WHO: 100},
        "kvobs.kv.caches": {WHO: 1},
        "kvobs.kv.fragmentation.article": {WHO: 1_100 / 1_200},
        "kvobs.kv.reallocations": {(*WHO, "prefill"): 4, (*WHO, "decode"): 4},
        "kvobs.kv.written": {WHO: 200},
        "kvobs.kv.copied": {WHO: 1_800},
        "kvobs.step.tokens": {("tiny", "cpu", "prefill"): 9, ("tiny", "cpu", "decode"): 1},
        "kvobs.self.hook.duration": {("transformers",): pytest.approx(1e-4)},
        "kvobs.self.events": {(): 2},
        "kvobs.window.step.mean": {("tiny", "cpu"): pytest.approx(0.06)},
    }
    for name, values in expected.items():
        assert points(metrics, name) == values, name
    bounds = BY_NAME["kvobs.step.duration"].buckets
    one = [int(low < 0.06 <= high) for low, high in zip((0.0, *bounds), (*bounds, 9e9), strict=True)]
    assert points(metrics, "kvobs.step.duration") == {
        ("tiny", "cpu", phase): (one, 0.06) for phase in ("prefill", "decode")}


def test_layers_on_several_devices_are_split() -> None:
    """Where the layers sit on two devices, each device's gauges hold its own share."""
    metrics = fold(step(by_device=(("cpu", 600, 700, 90), ("meta", 400, 500, 100))))
    assert points(metrics, "kvobs.kv.usage") == {
        ("tiny", "cpu", "DynamicCache", "held"): 600, ("tiny", "cpu", "DynamicCache", "slack"): 100,
        ("tiny", "meta", "DynamicCache", "held"): 400, ("tiny", "meta", "DynamicCache", "slack"): 100}
    assert points(metrics, "kvobs.kv.buffer.largest") == {
        ("tiny", "cpu", "DynamicCache"): 90, ("tiny", "meta", "DynamicCache"): 100}


def test_caches_add_up_and_go() -> None:
    """Live caches sum, their largest buffer is a maximum; a freed cache counts no more and leaves no 0 behind."""
    metrics = fold(step(cache_id=1, kv_largest_bytes=100), step(cache_id=2, kv_largest_bytes=300))
    assert points(metrics, "kvobs.kv.caches") == {WHO: 2}
    assert points(metrics, "kvobs.kv.usage")[*WHO, "held"] == 2_000
    assert points(metrics, "kvobs.kv.buffer.largest") == {WHO: 300}
    metrics.fold([model.CacheGone(5, 2)])
    metrics.refresh(0)
    assert points(metrics, "kvobs.kv.usage")[*WHO, "held"] == 1_000
    assert points(metrics, "kvobs.kv.buffer.largest") == {WHO: 100}
    metrics.fold([model.CacheGone(5, 1), model.CacheGone(5, 99)])
    metrics.refresh(0)
    for name in ("kvobs.kv.usage", "kvobs.kv.caches", "kvobs.kv.buffer.largest", "kvobs.kv.fragmentation.article"):
        assert points(metrics, name) == {}, name
    assert points(metrics, "kvobs.kv.written") == {WHO: 200}


def test_an_empty_cache_has_no_rate() -> None:
    """The article's rate over nothing is absent, the usage is an honest 0."""
    metrics = fold(step(kv_bytes=0, kv_reserved_bytes=0, kv_largest_bytes=0))
    assert points(metrics, "kvobs.kv.fragmentation.article") == {}
    assert points(metrics, "kvobs.kv.usage") == {(*WHO, "held"): 0, (*WHO, "slack"): 0}


def test_a_migration() -> None:
    """Bytes, buffers and (where it was timed) host time per pair of devices."""
    move = model.Migration(1, origin(), 1, "cpu", "meta", 2, 64, 1_500 * 1_000)
    metrics = fold(move, model.Migration(2, origin(), 1, "cpu", "meta", 1, 32, None))
    assert points(metrics, "kvobs.migration.io") == {("cpu", "meta"): 96}
    assert points(metrics, "kvobs.migration.operations") == {("cpu", "meta"): 3}
    (counts, total), = points(metrics, "kvobs.migration.duration").values()
    assert sum(counts) == 1
    assert total == 0.0015


def test_a_rewrite() -> None:
    """Buffers rearranged between steps count as re-allocations and copies, under their own phase."""
    metrics = fold(step(), model.Rewrite(5, origin(), 1, 6, 4_000))
    assert points(metrics, "kvobs.kv.reallocations") == {(*WHO, "decode"): 4, (*WHO, "rewrite"): 6}
    assert points(metrics, "kvobs.kv.copied") == {WHO: 4_900}
    assert points(metrics, "kvobs.kv.written") == {WHO: 100}


def test_a_paged_pool() -> None:
    """Counts since the pool began become increments; states are gauges; a pool that goes leaves its counters."""
    who = ("tiny", "cpu", "PagedAttentionCache")
    metrics = fold(blocks(), blocks(used=4, cached=1, allocations=9, failures=1, preemptions=2))
    assert points(metrics, "kvobs.kv.blocks") == {(*who, "used"): 4, (*who, "cached"): 1, (*who, "free"): 11}
    assert points(metrics, "kvobs.kv.block.allocations") == {who: 9}
    assert points(metrics, "kvobs.kv.block.failures") == {who: 1}
    assert points(metrics, "kvobs.kv.preemptions") == {who: 2}
    metrics.fold([blocks(cache_id=8, used=1, cached=0, free=1, allocations=1, failures=0, preemptions=0)])
    metrics.refresh(0)
    assert points(metrics, "kvobs.kv.blocks") == {(*who, "used"): 5, (*who, "cached"): 1, (*who, "free"): 12}
    assert points(metrics, "kvobs.kv.block.allocations") == {who: 10}
    metrics.fold([model.CacheGone(1, 7), model.CacheGone(1, 8)])
    metrics.refresh(0)
    assert points(metrics, "kvobs.kv.blocks") == {}
    assert points(metrics, "kvobs.kv.block.allocations") == {who: 10}


def test_blocks_given_back_are_not_held() -> None:
    """After a scheduler step the bytes held are the used blocks', even if the last forward pass saw more."""
    paged = origin(cache="PagedAttentionCache")
    metrics = fold(step(cache_id=7, origin=paged, kv_bytes=40_960, kv_reserved_bytes=65_536, kv_largest_bytes=32_768),
                   blocks(used=3))
    who = ("tiny", "cpu", "PagedAttentionCache")
    assert points(metrics, "kvobs.kv.usage") == {(*who, "held"): 12_288, (*who, "slack"): 53_248}


def test_a_turn() -> None:
    """A turn's outcome and its standard GenAI histograms, each with one observation of the right size."""
    metrics = fold(turn(), turn(outcome="error", ttft_ns=None, tpot_ns=None))
    assert points(metrics, "kvobs.turns") == {("tiny", "ok"): 1, ("tiny", "error"): 1}
    who = ("text_completion", "transformers", "tiny")
    for name, key, count, total in (
            ("gen_ai.server.request.duration", who, 2, 4.0),
            ("gen_ai.server.time_to_first_token", who, 1, 0.5),
            ("gen_ai.server.time_per_output_token", who, 1, 0.375),
            ("gen_ai.client.token.usage", (*who, "input"), 2, 22),
            ("gen_ai.client.token.usage", (*who, "output"), 2, 10)):
        counts, found = points(metrics, name)[key]  # type: ignore[misc]
        assert (sum(counts), found) == (count, total), name
    assert points(metrics, "kvobs.self.hook.duration") == {("transformers",): pytest.approx(18e-6)}


def test_a_sampled_turn_leaves_an_exemplar_and_others_do_not() -> None:
    """Only a sampled trace is offered as an exemplar, in the bucket of its value."""
    ids = {"trace_id": "a" * 32, "span_id": "b" * 16}
    for sampled in (False, True):
        metrics = fold(turn(sampled=sampled, **ids))
        (row, values), = [(r, v) for r, v in metrics.collect() if r.name == "gen_ai.server.time_to_first_token"]
        (histogram,) = values.values()
        assert isinstance(histogram, Histogram)
        found = {i: e for i, e in enumerate(histogram.exemplars) if e is not None}
        expected = Exemplar(ids["trace_id"], ids["span_id"], 0.5, 1_700_000_000.5)
        assert found == ({row.buckets.index(0.5): expected} if sampled else {})


@pytest.mark.parametrize(("value", "index"), [(0.0, 0), (1.0, 0), (1.1, 1), (2.0, 1), (2.1, 2), (1e9, 2)])
def test_bucket_boundaries_are_inclusive(value: float, index: int) -> None:
    """A value on a boundary belongs to the bucket that ends there, as OpenTelemetry and Prometheus say."""
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value, None)
    assert histogram.counts == [int(i == index) for i in range(3)]


@pytest.mark.parametrize("number", range(16))
def test_a_latency_on_the_boundary_is_within_it(number: int) -> None:
    """Nanoseconds become seconds without crossing a boundary: 12 ms keeps the 12 ms objective."""
    bound = BY_NAME["kvobs.alloc.latency"].buckets[number]
    latency = round(bound * 1e9)
    metrics = fold(model.Allocation(1, "cuda:0", 512, latency), model.Allocation(1, "cuda:0", 512, latency + 1))
    (counts, _), = points(metrics, "kvobs.alloc.latency").values()
    assert counts == [int(index in (number, number + 1)) for index in range(17)]


def test_an_allocator() -> None:
    """Latency, usage and the windows over them: largest unused share, smallest largest-free, variance."""
    metrics = fold(model.Allocation(1, "cuda:0", 512, 1_000_000), model.Allocation(2, "cuda:0", 512, 3_000_000),
                   model.AllocatorState(3, "cuda:0", 1_000, 250, 40), model.AllocatorState(4, "cuda:0", 1_000, 900, 90),
                   now_ns=5)
    assert points(metrics, "kvobs.allocator.usage") == {("cuda:0", "allocated"): 900, ("cuda:0", "unused"): 100}
    assert points(metrics, "kvobs.window.fragmentation") == {("cuda:0",): pytest.approx(0.75)}
    assert points(metrics, "kvobs.window.largest_free") == {("cuda:0",): 40}
    assert points(metrics, "kvobs.window.allocation.variance") == {("cuda:0",): pytest.approx(1e-6)}
    (counts, total), = points(metrics, "kvobs.alloc.latency").values()
    assert (sum(counts), total) == (2, 0.004)


def test_what_an_allocator_cannot_know_is_absent() -> None:
    """No largest free block and nothing reserved: no points, rather than zeros."""
    metrics = fold(model.AllocatorState(3, "cuda:0", 0, 0, None))
    assert points(metrics, "kvobs.window.fragmentation") == {}
    assert points(metrics, "kvobs.window.largest_free") == {}


def test_windows_empty_with_time() -> None:
    """A window's points are there until its last sample is as old as the window is wide, then they are gone."""
    metrics = fold(step(t_ns=10 * MS), now_ns=73 * MS)
    assert points(metrics, "kvobs.window.step.mean") == {("tiny", "cpu"): pytest.approx(0.06)}
    metrics.refresh(74 * MS)
    assert points(metrics, "kvobs.window.step.mean") == {}
    metrics.fold([step(t_ns=80 * MS, duration_ns=2 * MS)])
    metrics.refresh(80 * MS)
    assert points(metrics, "kvobs.window.step.mean") == {("tiny", "cpu"): pytest.approx(0.002)}


def test_emptied_windows_make_room() -> None:
    """Windows are bounded; one that cannot be kept is counted, one that emptied frees its place."""
    many = [step(t_ns=1, origin=origin(f"m{number}")) for number in range(5)]
    metrics = fold(*many, now_ns=1, max_series=1)
    assert len(metrics._windows.windows) == 4
    assert points(metrics, "kvobs.self.series.overflow")["kvobs.window.step.mean",] >= 1
    metrics.refresh(10**12)
    assert len(metrics._windows.windows) == 0


def test_errors_and_failures() -> None:
    """Out-of-memory errors count per model (or unknown), failed hooks per source."""
    metrics = fold(model.OutOfMemory(1, origin(), "s", "m"), model.OutOfMemory(1, None, "", "m"),
                   model.HookFailed(1, "transformers", "h", "e"), model.HookFailed(1, "transformers", "g", "e"))
    assert points(metrics, "kvobs.out_of_memory") == {("tiny",): 1, ("unknown",): 1}
    assert points(metrics, "kvobs.self.hook.failures") == {("transformers",): 2}


def test_the_first_error_of_a_known_model_is_growth() -> None:
    """A model with a step or a turn has had 0 errors, and its source 0 failed hooks, before the first of them."""
    metrics = fold(step(t_ns=1, origin=origin("known")))
    assert points(metrics, "kvobs.out_of_memory") == {("known",): 0}
    assert points(metrics, "kvobs.self.hook.failures") == {(origin().source,): 0}
    metrics.fold([step(t_ns=2, origin=origin("known")), model.OutOfMemory(3, origin("known"), "s", "m")])
    assert points(metrics, "kvobs.out_of_memory") == {("known",): 1}


def test_a_newer_fact_about_a_subject_replaces_the_older() -> None:
    """Availability has one point per subject, the latest, with its reason."""
    metrics = fold(model.Availability("cuda", False, "No driver."), model.Availability("x", True, ""),
                   model.Availability("cuda", True, ""))
    assert points(metrics, "kvobs.availability") == {("cuda", ""): 1, ("x", ""): 1}


def test_too_many_series_fold_into_other() -> None:
    """Beyond the bound counters add up in 'other', and each folded point is counted under the metric's name."""
    moves = [model.Migration(1, origin(), 1, f"d{number}", "cpu", 1, 10, None) for number in range(5)]
    metrics = fold(*moves, max_series=2)
    assert points(metrics, "kvobs.migration.io") == {("d0", "cpu"): 10, ("d1", "cpu"): 10, ("other", "other"): 30}
    assert points(metrics, "kvobs.self.series.overflow")["kvobs.migration.io",] == 3


def test_gauges_combine_in_other() -> None:
    """Gauges that fold into 'other' sum where they sum across ranks and keep the largest where they do not."""
    caches = [step(cache_id=number, origin=origin(f"m{number}"), kv_largest_bytes=largest)
              for number, largest in enumerate((10, 900, 30, 20))]
    metrics = fold(*caches, max_series=1)
    other = ("other", "other", "other")
    assert points(metrics, "kvobs.kv.caches") == {("m0", "cpu", "DynamicCache"): 1, other: 3}
    assert points(metrics, "kvobs.kv.buffer.largest") == {("m0", "cpu", "DynamicCache"): 10, other: 900}


def test_other_begins_anew_at_each_refresh() -> None:
    """A gauge's 'other' holds what is alive now: refreshing twice adds nothing."""
    metrics = fold(*[step(cache_id=n, origin=origin(f"m{n}")) for n in range(3)], max_series=1)
    metrics.refresh(0)
    assert points(metrics, "kvobs.kv.caches")["other", "other", "other"] == 2


def test_set_and_count_from_outside() -> None:
    """Counters add what they are given and ignore 0; a gauge set to None is absent."""
    metrics = fresh()
    metrics.count("kvobs.self.events.dropped", ("queue",), 2)
    metrics.count("kvobs.self.events.dropped", ("queue",), 3)
    metrics.count("kvobs.self.events.dropped", ("store",), 0)
    metrics.set("kvobs.self.store.size", (), 4_096)
    assert points(metrics, "kvobs.self.events.dropped") == {("queue",): 5}
    assert points(metrics, "kvobs.self.store.size") == {(): 4_096}
    metrics.set("kvobs.self.store.size", (), 512)
    assert points(metrics, "kvobs.self.store.size") == {(): 512}
    metrics.set("kvobs.self.store.size", (), None)
    assert points(metrics, "kvobs.self.store.size") == {}


def test_observations_are_handed_over_once() -> None:
    """Exporters that record histograms themselves get each observation exactly once, with its trace."""
    metrics = fold(turn(trace_id="a" * 32, span_id="b" * 16, sampled=True), step())
    taken = metrics.take_observations()
    assert metrics.take_observations() == []
    assert {(o.row.name, o.value, o.trace_id) for o in taken if o.row.name != "gen_ai.client.token.usage"} == {
        ("gen_ai.server.request.duration", 2.0, "a" * 32), ("gen_ai.server.time_to_first_token", 0.5, "a" * 32),
        ("gen_ai.server.time_per_output_token", 0.375, "a" * 32), ("kvobs.step.duration", 0.06, "")}


def test_a_collected_histogram_is_a_copy() -> None:
    """What a reader got does not change while the drain thread goes on."""
    metrics = fold(step())
    (before,) = {row.name: values for row, values in metrics.collect()}["kvobs.step.duration"].values()
    metrics.fold([step()])
    assert isinstance(before, Histogram)
    assert sum(before.counts) == 1


def test_the_cost_of_folding_is_counted() -> None:
    """With a clock of one microsecond per reading, fold and window durations are the readings between."""
    metrics = fresh()
    metrics.fold([step()])
    # Readings: start 1, window 2 and 3, end 4.
    assert points(metrics, "kvobs.self.fold.duration") == {(): pytest.approx(3e-6)}
    assert points(metrics, "kvobs.self.window.duration") == {(): pytest.approx(1e-6)}


def test_every_point_has_its_row_s_attributes() -> None:
    """Whatever is folded, a point has as many attribute values as its row has names."""
    from tests.events import EXAMPLES

    for row, values in fold(*EXAMPLES, now_ns=10).collect():
        assert all(len(key) == len(row.attributes) for key in values), row.name


def test_known_counters_begin_at_zero() -> None:
    """A counter that was begun shows 0 until it counts, and beginning it again takes nothing back."""
    metrics = fresh()
    metrics.begin("kvobs.self.events.dropped", ("queue",), ("otlp",))
    metrics.count("kvobs.self.events.dropped", ("queue",), 2)
    metrics.begin("kvobs.self.events.dropped", ("queue",))
    assert points(metrics, "kvobs.self.events.dropped") == {("queue",): 2, ("otlp",): 0}
