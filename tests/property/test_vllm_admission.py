"""What the pool of a vLLM engine can hold: the estimate against every step to come, and a scheduler that obeys it."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.sources.vllm._admission import ENOUGH, NEWEST, Footprint, KvAwareAdmission, Lengths, footprint
from kvobs.sources.vllm._layout import Layout
from tests.vllm_world import FullAttentionSpec, Request, Scheduler

SIZES = st.sampled_from([1, 7, 16, 32])
REQUESTS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 120)), min_size=1, max_size=12)


def manager(size: int, kind: str = "FullAttentionSpec", most: int | None = None) -> object:
    """What is read of a group of layers."""
    spec = type(kind, (FullAttentionSpec,), {})()
    return type("Manager", (), {"block_size": size, "kv_cache_spec": spec, "max_admission_blocks_per_request": most})()


@given(REQUESTS, SIZES)
def test_the_peak_bounds_every_step_of_the_future(requests: list[tuple[int, int]], size: int) -> None:
    """Stepped token by token, the blocks of those that have not ended never exceed it, nor by one per request less."""
    foreseen = footprint([manager(size)], 4096).peak(requests)
    held = max(sum(-(-(now + step) // size) for more, now in requests if step <= more)
               for step in range(max(more for more, _ in requests) + 1))
    assert held <= foreseen < held + len(requests) + 1


@given(REQUESTS, SIZES, st.integers(1, 5))
def test_windows_and_states_take_what_they_can_take_at_most(requests: list[tuple[int, int]], size: int,
                                                            most: int) -> None:
    """A group with a window counts its cap for each request, a state one block, and full attention its tokens."""
    full = footprint([manager(size)], 4096)
    mixed = footprint([manager(size), manager(16, "SlidingWindowSpec", most), manager(16, "MambaSpec")], 4096)
    together = Footprint(full.per_token, full.fixed + most + 1).peak(requests)
    assert mixed.peak(requests) == together
    assert mixed.peak(requests) >= full.peak(requests) + most + 1


def scheduled(requests: list[tuple[int, int]], size: int, pool: int, *, lowered: bool) -> Scheduler:
    """The scheduler after it has served these requests (prompt, tokens), with or without KV-aware admission."""
    world = Scheduler(pool + 1, size, slots=len(requests) + 1)
    admission = KvAwareAdmission(lambda: world, Layout(world), "0.99")
    world.add([Request(str(number), prompt, tokens) for number, (prompt, tokens) in enumerate(requests)])
    if lowered:
        assert admission.begin(0).done

    def ended(_: Request) -> None:
        admission.changes += 1

    for _ in range(sum(tokens for _, tokens in requests) + 1):
        admission.adjust()
        assert world.max_num_active_reqs >= 1
        world.step(ended)
    assert admission.end(0).done
    assert world.max_num_active_reqs == len(requests) + 1
    return world


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8), SIZES, st.data())
def test_a_pool_that_holds_the_largest_request_serves_all_without_a_failure(
        requests: list[tuple[int, int]], size: int, data: st.DataObject) -> None:
    """No request ever lacks a block while it runs, all of them end, and the limit is as before."""
    largest = max(-(-(prompt + tokens - 1) // size) for prompt, tokens in requests)
    world = scheduled(requests, size, data.draw(st.integers(largest, largest * len(requests))), lowered=True)
    assert (world.failures, world.requests) == (0, {})


def test_without_it_the_same_scheduler_fails() -> None:
    """Eight requests of the reference run in 23 blocks lack blocks many times; with it three to four run at once."""
    plain = scheduled([(71, 100)] * 8, 32, 23, lowered=False)
    assert plain.failures > 0
    assert plain.most > 4
    lowered = scheduled([(71, 100)] * 8, 32, 23, lowered=True)
    assert (lowered.failures, lowered.most) == (0, 4)


@given(st.lists(st.integers(1, 500), max_size=2 * NEWEST))
def test_expected_lengths_are_the_nearest_rank_of_the_newest(lengths: list[int]) -> None:
    """Of the newest 256 answers at least 95 % were no longer, and fewer were shorter; too few answers tell nothing."""
    seen = Lengths()
    for length in lengths:
        seen.add(length)
    newest, expected = lengths[-NEWEST:], seen.expected()
    if len(newest) < ENOUGH:
        assert expected is None
        return
    assert expected is not None
    needed = math.ceil(Fraction(95, 100) * len(newest))
    assert sum(length <= expected for length in newest) >= needed > sum(length < expected for length in newest)
