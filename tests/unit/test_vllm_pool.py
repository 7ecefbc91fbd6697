"""What the ledger of a vLLM pool tells of evicted blocks: ages, idle times, hashes; and of blocks it does not own."""

from __future__ import annotations

import gc
import weakref

import pytest
from opentelemetry import trace

from kvobs.bus import Bus
from kvobs.catalog import EVICTION_BOUNDS_NS
from kvobs.config import Config
from kvobs.model import Evictions, Origin
from kvobs.sessions import Names, TurnNumbers
from kvobs.sources import Wiring
from kvobs.sources._eviction_times import Times
from kvobs.sources._patch import Patches
from kvobs.sources.vllm import _pool
from kvobs.sources.vllm._hooks import EngineHooks
from kvobs.sources.vllm._requests import Desk
from tests.vllm_pool import Pool, Watched

ORIGIN = Origin("vllm", "tiny", "BlockPool", "cpu", "bfloat16")


class Clock:
    """A monotonic clock that stands still."""

    def __init__(self) -> None:
        self.now = 1_000

    def monotonic_ns(self) -> int:
        """Now."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that ledgers look at."""
    found = Clock()
    monkeypatch.setattr(_pool, "time", found)
    return found


def buckets(*durations_ns: int) -> list[int]:
    """Durations by bucket, counted bound by bound."""
    found = [0] * (len(EVICTION_BOUNDS_NS) + 1)
    for duration in durations_ns:
        found[sum(bound < duration for bound in EVICTION_BOUNDS_NS)] += 1
    return found


def test_age_runs_from_hand_out_and_idle_time_from_the_last_holder(clock: Clock) -> None:
    """Handed out at 1 s, given back at 4 s, hit at 10 s until 11 s, evicted at 31 s: a block 30 s old, 20 s idle."""
    pool, second = Watched(2), 1_000_000_000
    clock.now = second
    blocks = pool.get_new_blocks(1)
    blocks[0].block_hash = b"a"
    clock.now = 4 * second
    pool.free_blocks(blocks)
    clock.now = 10 * second
    pool.touch(blocks)
    clock.now = 11 * second
    pool.free_blocks(blocks)
    clock.now = 31 * second
    pool.get_new_blocks(1)
    assert pool.ledger.times.take(31 * second, ORIGIN, 7) == Evictions(
        31 * second, ORIGIN, 7, tuple(buckets(30 * second)), 30 * second, tuple(buckets(20 * second)), 20 * second)
    assert pool.ledger.times.take(32 * second, ORIGIN, 7) is None


def test_a_duration_on_a_bound_is_in_its_bucket() -> None:
    """Bounds are inclusive above, and what is above them all has a bucket of its own."""
    for bound in EVICTION_BOUNDS_NS:
        for duration in (bound, bound + 1):
            times = Times()
            times.add(duration, 3)
            assert (times.counts, times.sum_ns) == ([3 * number for number in buckets(duration)], 3 * duration)


def test_the_age_of_blocks_from_before_the_ledger_is_not_told(clock: Clock) -> None:
    """Content that was there when kvobs began, or went on after a pause, is evicted without an age."""
    pool = Watched(3)
    (seen,) = pool.get_new_blocks(1)
    pool.ledger.resume(1)
    pool.free_blocks([seen])
    for block in pool.blocks[1:]:
        block.block_hash = bytes([block.block_id])
    pool.ledger.cached = pool.ledger.audit()
    clock.now += 7_000_000_000
    pool.get_new_blocks(2)
    ages, idles = pool.ledger.times.ages, pool.ledger.times.idles
    assert (pool.ledger.evictions, sum(ages.counts), sum(idles.counts), idles.sum_ns) == (2, 0, 1, 7_000_000_000)


def test_so_many_hashes_are_remembered_the_newest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of evicted hashes is bounded, and the oldest are forgotten."""
    monkeypatch.setattr(_pool, "MOST_HASHES", 3)
    pool = Watched(2)
    for number in range(5):
        blocks = pool.get_new_blocks(1)
        blocks[0].block_hash = bytes([number])
        pool.free_blocks(blocks)
    pool.get_new_blocks(1)
    assert list(pool.ledger.evicted_hashes) == [b"\2", b"\3", b"\4"]


def test_blocks_of_another_pool_are_counted_there() -> None:
    """A call that frees blocks of two pools changes each pool's ledger by its own."""
    here, there = Watched(4), Watched(4)
    mine, other = here.get_new_blocks(2), there.get_new_blocks(1)
    for block in mine + other:
        block.block_hash = b"x"
    here.free_blocks(mine + other)
    assert (here.ledger.cached, here.ledger.free) == (2, 1)
    assert (there.ledger.cached, there.ledger.free) == (1, 2)


def test_a_refused_allocation_leaves_nothing_open() -> None:
    """After an allocation that failed, content that is lost otherwise counts as dropped, not as evicted."""
    pool = Watched(3)
    blocks = pool.get_new_blocks(2)
    blocks[0].block_hash = b"x"
    with pytest.raises(ValueError, match="too few"):
        pool.get_new_blocks(1)
    pool.evict_blocks(blocks)
    assert (pool.ledger.allocations, pool.ledger.evictions, pool.ledger.dropped) == (2, 0, 1)


def test_the_ledger_does_not_keep_its_pool_alive() -> None:
    """When nobody else has the pool, it is gone."""
    pool: Pool | None = Pool(3)
    ledger = _pool.PoolLedger(pool, 0)
    del pool
    gc.collect()
    assert ledger.pool is None


def test_an_observation_that_ended_leaves_nothing_with_the_pool() -> None:
    """The pool lives on when kvobs is taken out, and keeps nothing that was known of it."""
    pool, events = Pool(3), list[object]()
    wiring = Wiring(Config(), Bus(10), lambda: trace.get_tracer("kvobs"))
    desk = Desk(wiring.tracer, events.append, Names("off"), TurnNumbers())
    hooks = EngineHooks(wiring, events.append, Patches("vllm", events.append), desk)
    known = weakref.ref(hooks._ledger(pool))
    assert known() is not None
    hooks.uninstall()
    del hooks
    gc.collect()
    assert known() is None
    assert len(pool.blocks) == 3


def test_tables_of_several_groups_are_flattened() -> None:
    """Blocks come as one list, or as one list per group of layers."""
    first, second, third = Pool(3).blocks
    assert _pool.flat([first, second]) == _pool.flat(([first], (second,))) == [first, second]
    assert _pool.flat([[], [third]]) == [third]
