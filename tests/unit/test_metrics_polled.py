"""The fold of sampled attention, polls and pauses, worked out by hand."""

from __future__ import annotations

import pytest

from kvobs import model
from tests.events import attention, blocks, origin, step, turn
from tests.unit.test_metrics import fold, points


def test_a_sampled_step() -> None:
    """Sums become counters, states of live caches gauges; the interval is the longest; a freed cache takes its own."""
    samples = [attention(), attention(layers="sliding", every=5, pending=0, reclaimable_bytes=0, blocks=4),
               attention(cache_id=2, pending=21, reclaimable_bytes=1)]
    metrics = fold(*samples, attention(pending=7))
    full, sliding = ("tiny", "cpu", "full"), ("tiny", "cpu", "sliding")
    assert points(metrics, "kvobs.attention.queries") == {full: 36, sliding: 12}
    assert points(metrics, "kvobs.attention.local") == {full: 28.5, sliding: 9.5}
    assert points(metrics, "kvobs.attention.entries")[*full, "dead"] == 450
    assert points(metrics, "kvobs.attention.transitions") == {
        (*full, "pending"): 6, (*full, "active"): 3, (*sliding, "pending"): 2, (*sliding, "active"): 1}
    assert points(metrics, "kvobs.attention.blocks") == {
        (*full, "pending"): 28, (*full, "active"): 14, (*sliding, "pending"): 0, (*sliding, "active"): 4}
    assert points(metrics, "kvobs.attention.reclaimable") == {full: 12_289, sliding: 0}
    assert points(metrics, "kvobs.attention.interval") == {("tiny",): 5}
    metrics.fold([model.CacheGone(9, 1)])
    metrics.refresh(0)
    assert points(metrics, "kvobs.attention.reclaimable") == {full: 1}


def test_cache_updates() -> None:
    """Each layer's update is one observation of its kind."""
    metrics = fold(model.CacheUpdates(1, origin(), 1, "full", (20_000, 30_000)))
    assert points(metrics, "kvobs.kv.update.duration")["tiny", "cpu", "full"][1] == pytest.approx(5e-5)


def test_a_poll_replaces_its_own_gauges_and_adds_what_counters_grew() -> None:
    """A gauge that the next poll does not name is gone; a counter grows by differences, and anew after a reset."""
    def poll(t_ns: int, source: str, *readings: tuple[str, tuple[str, ...], float]) -> model.Poll:
        return model.Poll(t_ns, source, 1_000_000, readings)

    metrics = fold(poll(0, "host", ("kvobs.heap.usage", ("used",), 5.0), ("process.paging.faults", ("minor",), 100.0)),
                   poll(0, "other", ("kvobs.heap.trimmable", (), 9.0)))
    assert points(metrics, "kvobs.heap.usage") == {("used",): 5}
    metrics.fold([poll(1, "host", ("kvobs.heap.usage", ("free",), 6.0), ("process.paging.faults", ("minor",), 130.0))])
    metrics.refresh(1)
    assert points(metrics, "kvobs.heap.usage") == {("free",): 6}
    assert points(metrics, "kvobs.heap.trimmable") == {(): 9}
    assert points(metrics, "process.paging.faults") == {("minor",): 130}
    metrics.fold([poll(2, "host", ("process.paging.faults", ("minor",), 20.0))])
    metrics.refresh(2)
    assert points(metrics, "process.paging.faults") == {("minor",): 150}
    assert points(metrics, "kvobs.self.poll.duration") == {("host",): 0.003, ("other",): 0.001}


def test_a_source_that_falls_silent_has_no_values() -> None:
    """After 5 s without a poll or a state its gauges are gone; its counters stay what they were."""
    metrics = fold(model.Poll(0, "host", 0, (("kvobs.heap.trimmable", (), 9.0), ("hw.energy", ("g", "n"), 3.0))),
                   model.AllocatorState(0, "cuda:0", 10, 4, None), now_ns=5_000_000_000)
    assert points(metrics, "kvobs.heap.trimmable") == {(): 9}
    assert points(metrics, "kvobs.allocator.usage") == {("cuda:0", "allocated"): 4, ("cuda:0", "unused"): 6}
    metrics.refresh(5_000_000_001)
    assert points(metrics, "kvobs.heap.trimmable") == {}
    assert points(metrics, "kvobs.allocator.usage") == {}
    assert points(metrics, "hw.energy") == {("g", "n"): 3}


HIDDEN = ("kvobs.kv.usage", "kvobs.kv.caches", "kvobs.kv.blocks", "kvobs.attention.blocks")


def test_a_pause_hides_what_nobody_looks_at() -> None:
    """While paused caches, pools and attention have no gauges, those of late events neither; counters go on."""
    metrics = fold(step(), attention(), blocks(allocations=5))
    assert all(points(metrics, name) for name in HIDDEN)
    metrics.pause(caches=True, attention=True)
    metrics.fold([step(cache_id=2), attention(cache_id=2)])  # they were on their way when the pause began
    metrics.refresh(0)
    assert [points(metrics, name) for name in HIDDEN] == [{}] * 4
    metrics.pause(caches=False, attention=False)
    metrics.fold([step(cache_id=3), blocks(allocations=7)])
    metrics.refresh(0)
    assert points(metrics, "kvobs.kv.block.allocations") == {("tiny", "cpu", "PagedAttentionCache"): 7}
    assert points(metrics, "kvobs.kv.caches") == {("tiny", "cpu", "DynamicCache"): 1}
    assert points(metrics, "kvobs.attention.blocks") == {}


def test_without_deep_sampling_only_attention_is_hidden() -> None:
    """When the guard takes deep sampling away, the last states of blocks vanish and the caches' sizes stay."""
    metrics = fold(step(), attention())
    metrics.pause(caches=False, attention=True)
    metrics.fold([attention()])
    metrics.refresh(0)
    for name in ("blocks", "reclaimable", "interval"):
        assert points(metrics, f"kvobs.attention.{name}") == {}
    assert points(metrics, "kvobs.kv.caches") == {("tiny", "cpu", "DynamicCache"): 1}
    assert points(metrics, "kvobs.attention.queries") == {("tiny", "cpu", "full"): 24}
    metrics.pause(caches=False, attention=False)
    metrics.refresh(0)
    assert points(metrics, "kvobs.attention.blocks") == {}
    assert points(metrics, "kvobs.kv.caches") == {("tiny", "cpu", "DynamicCache"): 1}


def test_engine_time_is_hooks_and_passes() -> None:
    """The guard's two sums are the hooks' seconds and the forward passes' seconds, over all series."""
    metrics = fold(step(hook_ns=1_000_000, duration_ns=60_000_000), turn(hook_ns=2_000_000),
                   step(origin=origin("other"), hook_ns=0, duration_ns=40_000_000))
    assert metrics.engine_time() == pytest.approx((0.003, 0.1))
