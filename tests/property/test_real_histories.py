"""The replay of histories that a second, independent account of PyTorch's allocator wrote down."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.allocator import core
from kvobs.allocator import recording as rec
from kvobs.allocator.recording import DeviceRecording
from kvobs.allocator.replay import replay
from kvobs.allocator.replayed import Replay
from kvobs.allocator.settings import INTERVALS, Settings, from_snapshot, parse
from kvobs.allocator.state import ALLOCATED, PENDING
from tests.real_histories import Real
from tests.real_memory import KIB, MIB, Piece

ENGINES = ("Python", pytest.param("C++", marks=pytest.mark.skipif(core.why_not() is not None,
                                                                  reason=str(core.why_not()))))
SIZES = (1, 512, 3_000, 64 * KIB, MIB, MIB + 1, 3 * MIB, 7 * MIB, 10 * MIB, 12 * MIB + 5, 21 * MIB, 33 * MIB, 48 * MIB)
ROOMY = 1 << 40  # bytes: addresses of expandable segments never run out
seeds = st.integers(0, 10_000)


def told(real: Real) -> Settings:
    """What a snapshot says of the settings: no memory fraction."""
    return Settings(max_split_size=real.max_split, expandable_segments=real.expandable,
                    garbage_collection_threshold=real.threshold, roundup_power2_divisions=(real.divisions,) * INTERVALS)


def program(real: Real, seed: int, operations: int, pools: tuple[int, ...] = (), waits: bool = True) -> None:
    """Two threads on two streams; the second sometimes captures."""
    chance = random.Random(seed)
    live: list[Piece] = []
    for _ in range(operations):
        what = chance.random()
        if what < 0.5 or not live:
            try:
                live.append(real.malloc(chance.choice(SIZES), chance.choice((0, 7)), chance.choice((0, 1))))
            except MemoryError:
                for _ in range(len(live) // 2):
                    real.free(live.pop(chance.randrange(len(live))))
        elif what < 0.9:
            real.free(live.pop(chance.randrange(len(live))))
        elif what < 0.94 and waits:
            real.record_stream(chance.choice(live), chance.choice((0, 7)))
        elif what < 0.97:
            real.reach(chance.choice((0, 7)))
        elif what < 0.98:
            if not real.mine:
                real.empty_cache()
        elif pools and real.mine:
            real.end(next(iter(real.mine)))
        elif pools:
            real.begin(chance.choice(pools), 1)
    for pool in list(real.mine):
        real.end(pool)


def replayed(made: DeviceRecording, settings_told: Settings, engine: str) -> Replay:
    found = replay(made, settings_told, engine)
    if len(found.reserved):
        blocks = [block for segment in made.state for block in segment.blocks]
        assert found.reserved[-1] == sum(segment.size for segment in made.state)
        assert found.allocated[-1] == sum(block.size for block in blocks if block.state == ALLOCATED)
        assert found.active[-1] == sum(block.size for block in blocks if block.state >= PENDING)
    return found


def all_told(found: Replay) -> bool:
    return found.usable and not found.reason and all(
        score.checked == score.matched for score in (found.addresses, found.device_allocs, found.device_frees))


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=60, deadline=None)
@given(seed=seeds, expandable=st.booleans(), max_split=st.sampled_from([None, 30 * MIB]),
       divisions=st.sampled_from([0, 4]), capacity=st.sampled_from([150, 300, 900]),
       fraction=st.sampled_from([None, 0.5]), ring=st.sampled_from([None, 200]))
def test_every_fact_is_told(engine: str, seed: int, expandable: bool, max_split: int | None, divisions: int,
                            capacity: int, fraction: float | None, ring: int | None) -> None:
    """Addresses, device calls and OOMs come out, on a device that gives addresses again, whatever the settings."""
    real = Real(capacity * MIB, expandable=expandable, max_split=None if expandable else max_split,
                divisions=divisions, fraction=fraction, ring=ring, space=ROOMY)
    program(real, seed, 400, waits=not expandable)
    found = replayed(real.recording(), told(real), engine)
    if ring is None or not expandable:
        assert all_told(found), found.reason
    else:  # the first request may have begun before the ring did
        assert found.addresses.checked - found.addresses.matched <= 1
    assert all(oom.reproduced for oom in found.ooms)
    assert len(found.ooms) == real.recording().events.action.count(rec.OOM)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=30, deadline=None)
@given(seed=seeds, capacity=st.sampled_from([150, 300]), space=st.sampled_from([None, ROOMY]))
def test_what_cannot_be_known_is_scored_down(engine: str, seed: int, capacity: int, space: int | None) -> None:
    """Where memory runs out under expandable segments, files do not tell whether a program emptied the cache or a
    request did, nor when the addresses of a segment are used up: nearly all comes out, and the rest is said.
    """
    real = Real(capacity * MIB, expandable=True, space=space)
    program(real, seed, 500)
    found = replayed(real.recording(), told(real), engine)
    scores = found.addresses, found.device_allocs, found.device_frees
    differing = sum(score.checked - score.matched for score in scores)
    assert differing <= 0.05 * sum(score.checked for score in scores)
    assert found.usable
    assert bool(differing) == ("recorded facts differ" in found.reason)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=30, deadline=None)
@given(seed=seeds, expandable=st.booleans(), capacity=st.sampled_from([400, 900]), told_pools=st.booleans())
def test_captures(engine: str, seed: int, expandable: bool, capacity: int, told_pools: bool) -> None:
    """Frees that wait for the end of a capture, and private pools, whether the events name them or only the state."""
    real = Real(capacity * MIB, expandable=expandable, told_pools=told_pools, space=ROOMY)
    # Pools that no event names and two threads on one stream cannot be told apart while expandable segments grow.
    program(real, seed, 400, (1, 2) if told_pools or not expandable else (), waits=not expandable)
    found = replayed(real.recording(), told(real), engine)
    assert all_told(found), found.reason


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=40, deadline=None)
@given(seed=seeds, expandable=st.booleans(), threshold=st.sampled_from([0.2, 0.5, 0.8]),
       fraction=st.sampled_from([0.4, 1.0]))
def test_garbage_collection_is_followed_by_age(engine: str, seed: int, expandable: bool, threshold: float,
                                               fraction: float) -> None:
    """Which segments collection returns comes out although neither the fraction nor the device's size is recorded."""
    real = Real(400 * MIB, expandable=expandable, threshold=threshold, fraction=fraction, space=ROOMY)
    program(real, seed, 400, waits=not expandable)
    found = replayed(real.recording(), told(real), engine)
    assert all_told(found), found.reason


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=20, deadline=None)
@given(seed=seeds, expandable=st.booleans(), skipped=st.sampled_from([rec.FREE_REQUESTED, rec.FREE_COMPLETED]),
       ring=st.sampled_from([None, 150]))
def test_one_kind_of_free_was_not_recorded(engine: str, seed: int, expandable: bool, skipped: int,
                                           ring: int | None) -> None:
    """Either request or completion of a free tells both where no block waits for a stream."""
    real = Real(400 * MIB, expandable=expandable, skipped=(skipped,), ring=ring, space=ROOMY)
    program(real, seed, 300, waits=False)
    found = replayed(real.recording(), told(real), engine)
    assert all_told(found), found.reason


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_to_free_that_wait_are_followed_without_their_completion(engine: str) -> None:
    """Without completions a pending block counts as free at once, unless the final state shows it: most comes out."""
    real = Real(400 * MIB, skipped=(rec.FREE_COMPLETED,))
    program(real, 3, 600)
    found = replay(real.recording(), told(real), engine)
    assert found.usable
    assert found.addresses.matched < found.addresses.checked
    assert "recorded facts differ" in found.reason


def _checkpoints(seed: int, expandable: bool) -> Real:
    chance = random.Random(seed)
    real = Real(4_000 * MIB, expandable=expandable, told_pools=chance.random() < 0.5, space=ROOMY)
    for piece in [real.malloc(chance.choice(SIZES)) for _ in range(20)][::2]:
        real.free(piece)
    live: list[Piece] = []

    def work(steps: int) -> None:
        real.begin(1, 1)
        for _ in range(steps):
            if chance.random() < 0.6 or not live:
                live.append(real.malloc(chance.choice(SIZES), 7, 1))
            else:
                real.free(live.pop(chance.randrange(len(live))))
        real.end(1)
    marks = []
    for _ in range(4):
        work(30)
        marks.append(real.checkpoint(1))
    for _ in range(3):
        with suppress(ValueError):
            live[:] = real.restore(1, chance.choice(marks))
        work(20)
    return real


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=30, deadline=None)
@given(seed=seeds, expandable=st.booleans())
def test_a_pool_put_back_to_a_checkpoint(engine: str, seed: int, expandable: bool) -> None:
    """Blocks that cudagraph trees put back are followed, and are no decisions to be scored; all others are told."""
    real = _checkpoints(seed, expandable)
    made = real.recording()
    found = replayed(made, told(real), engine)
    assert all_told(found), found.reason
    assert found.addresses.checked <= made.events.action.count(rec.ALLOC)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("told_pools", [True, False])
def test_a_pool_with_an_allocator_of_its_own(engine: str, told_pools: bool) -> None:
    """Under expandable segments such a pool still takes whole segments, and splits them as segments are split."""
    real = Real(4_000 * MIB, expandable=True, told_pools=told_pools, space=ROOMY)
    real.plain = {1}
    program(real, 5, 500, (1,))
    made = real.recording()
    assert {rec.SEGMENT_ALLOC, rec.SEGMENT_MAP} <= set(made.events.action)
    found = replayed(made, told(real), engine)
    assert all_told(found), found.reason


def _deleted_pools(told_pools: bool) -> Real:
    chance = random.Random(1)
    real = Real(4_000 * MIB, told_pools=told_pools)
    live: list[Piece] = []
    for pool in range(1, 6):
        real.begin(pool, 1)
        for _ in range(60):
            if chance.random() < 0.55 or not live:
                live.append(real.malloc(chance.choice(SIZES), 0, chance.choice((0, 1))))
            else:
                real.free(live.pop(chance.randrange(len(live))))
        real.end(pool)
        while live:
            real.free(live.pop())
        real.release(pool)
        real.empty_cache(pool)
    return real


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("told_pools", "exact"), [(True, True), (False, False)])
def test_deleted_pools(engine: str, told_pools: bool, exact: bool) -> None:
    """A deleted MemPool returns its own segments and no others; where no event names pools, that is no longer known,
    and the score says so.
    """
    real = _deleted_pools(told_pools)
    found = replayed(real.recording(), told(real), engine)
    assert all_told(found) is exact
    assert found.usable is exact


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pool_that_lends_when_memory_runs_out(engine: str) -> None:
    """A request that a MemPool with ``use_on_oom`` served has no device call, and is told."""
    real = Real(200 * MIB, told_pools=True)
    real.begin(1, 1)
    lent = real.malloc(60 * MIB, 0, 1)
    real.end(1)
    real.free(lent)
    real.lenders = [1]
    for _ in range(6):  # four from the device, two of what the pool has
        real.malloc(30 * MIB)
    with pytest.raises(MemoryError):
        real.malloc(30 * MIB)
    found = replayed(real.recording(), told(real), engine)
    assert all_told(found), found.reason
    assert [oom.reproduced for oom in found.ooms] == [True]


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=30, deadline=None)
@given(seed=seeds, change=st.sampled_from(["shuffled", "settings", "streams"]))
def test_nonsense_is_never_an_exception(engine: str, seed: int, change: str) -> None:
    """Events in another order, of other settings or on other streams give a poor score or a reason."""
    chance = random.Random(seed)
    real = Real(200 * MIB, expandable=chance.random() < 0.5)
    program(real, seed, 200, (1, 2))
    made, said = real.recording(), told(real)
    spoil: dict[str, Callable[[], object]] = {
        "shuffled": lambda: chance.shuffle(made.events.address), "streams": lambda: chance.shuffle(made.events.stream),
        "settings": lambda: None}
    spoil[change]()
    if change == "settings":
        said = Settings(expandable_segments=not said.expandable_segments, max_split_size=40 * MIB)
    found = replay(made, said, engine)
    assert found.usable is False or found.reason or all_told(found)


def test_unknown_options_do_not_hide_the_known() -> None:
    """Options of PyTorch 2.13 are known, and one that is newer leaves the others of the same line in force."""
    newest = "throw_on_cudamalloc_oom:True,pinned_free_catch_all:True,pinned_use_hip_host_register:True"
    assert parse(newest) == Settings()
    said = {"PYTORCH_CUDA_ALLOC_CONF": "of_tomorrow:1,large_segment_size_mb:40", "expandable_segments": True}
    assert from_snapshot(said) == Settings(large_segment_size=40 * MIB, max_non_split_rounding=40 * MIB,
                                            expandable_segments=True)
