"""Verdicts of states written down by hand: the worked examples of the allocator's rules."""

from __future__ import annotations

import pytest

from kvobs.allocator.definitions import definitions
from kvobs.allocator.forecast import Demand
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, State
from kvobs.allocator.twin import Allocator
from kvobs.allocator.verdict import ASSUMING, Request, Verdict, for_demands, judge
from kvobs.allocator.waste import Group
from tests.states import KIB, segment

EXPANDABLE = Settings(expandable_segments=True)
# One 2 MiB block in the first of two 20 MiB pages.
SMALL_IN_LARGE: State = (segment(0, (10 * MIB, 0, INACTIVE), (2 * MIB, 2 * MIB, ALLOCATED), (28 * MIB, 0, INACTIVE),
                                 expandable=True),)


def verdict(state: State, size: int, device_free: int | None = 0, config: Settings | None = None, stream: int = 0,
            pool: int = 0) -> Verdict:
    """The verdict alone."""
    return judge(state, config or Settings(), Request(size, stream, pool), device_free).verdict


def test_growing_blocks_need_new_segments_and_shrinking_ones_do_not() -> None:
    """8 x 16 MiB and then 4 x 32 MiB reserve 256 MiB, in the other order 128 MiB; the verdicts say so beforehand."""
    def reserved(first: tuple[int, int], then: tuple[int, int], expected: Verdict) -> int:
        twin = Allocator()
        for address in [twin.alloc(first[1] * MIB) for _ in range(first[0])]:
            twin.free(address)
        sizes = (then[1] * MIB,) * then[0]
        state = twin.snapshot()
        assert verdict(state, sizes[0], 256 * MIB) is expected
        assert for_demands(state, Settings(), [Demand("cuda:0", 0, 0, sizes)], 256 * MIB)[1].verdict is expected
        for size in sizes:
            twin.alloc(size)
        return twin.stats().reserved

    assert reserved((8, 16), (4, 32), Verdict.GROW) == 256 * MIB
    assert reserved((4, 32), (8, 16), Verdict.SERVED) == 128 * MIB


def test_free_segments_are_reclaimed_when_the_device_has_nothing() -> None:
    """Two wholly free 16 MiB segments make a 32 MiB one possible, after they went back to the device."""
    state = (segment(0, (16 * MIB, 0, INACTIVE)), segment(32 * MIB, (16 * MIB, 0, INACTIVE)))
    found = judge(state, Settings(), Request(32 * MIB), 0)
    assert found.verdict is Verdict.RECLAIM
    assert (found.evidence.releasable_bytes, found.evidence.segment_bytes) == (32 * MIB, 32 * MIB)


def test_an_expandable_segment_asks_only_for_the_missing_pages() -> None:
    """With 28 MiB free at its end, 45 MiB need one more 20 MiB page, not a segment of 46 MiB."""
    found = judge(SMALL_IN_LARGE, EXPANDABLE, Request(45 * MIB), 20 * MIB)
    assert (found.verdict, found.evidence.segment_bytes) == (Verdict.GROW, 20 * MIB)
    assert verdict(SMALL_IN_LARGE, 45 * MIB, 20 * MIB - 1, EXPANDABLE) is not Verdict.GROW


def test_a_small_block_in_a_large_expandable_segment_fragments_it() -> None:
    """38 MiB are free, yet 30 MiB find no place: only one page can be returned, and the small block pins the rest."""
    found = judge(SMALL_IN_LARGE, EXPANDABLE, Request(30 * MIB), 0)
    assert found.verdict is Verdict.FRAGMENTED
    assert (found.evidence.sum_bytes, found.evidence.releasable_bytes) == (38 * MIB, 20 * MIB)
    assert [(pin.block.address, pin.held_back_bytes) for pin in found.evidence.pins] == [(10 * MIB, 18 * MIB)]
    assert verdict(SMALL_IN_LARGE, 39 * MIB, 0, EXPANDABLE) is Verdict.CAPACITY


def test_a_block_of_another_stream_is_in_the_wrong_pool() -> None:
    """36 MiB free on stream 7 do not serve stream 0; on stream 7 they do."""
    state = (segment(0, (4 * MIB, 4 * MIB, ALLOCATED), (36 * MIB, 0, INACTIVE), stream=7),)
    found = judge(state, Settings(), Request(30 * MIB), 0)
    assert (found.verdict, found.evidence.elsewhere) == (Verdict.WRONG_POOL, Group(7, 0, False))
    assert "stream 7" in found.sentence
    assert verdict(state, 30 * MIB, stream=7) is Verdict.SERVED


def test_a_pending_block_that_fits_is_worth_waiting_for() -> None:
    """12 MiB pending beside 8 MiB in use: waiting would do, and once it is free the request is served."""
    state = (segment(0, (12 * MIB, 12 * MIB, PENDING), (8 * MIB, 8 * MIB, ALLOCATED)),)
    found = judge(state, Settings(), Request(12 * MIB), 0)
    assert found.verdict is Verdict.WAIT
    assert (found.evidence.largest_free_bytes, found.evidence.largest_after_wait_bytes) == (0, 12 * MIB)
    free = (state[0]._replace(blocks=(state[0].blocks[0]._replace(state=INACTIVE), state[0].blocks[1])),)
    assert verdict(free, 12 * MIB) is Verdict.SERVED


def test_pending_blocks_merge_with_what_is_free_beside_them() -> None:
    """6 MiB pending between 5 and 4 MiB free become 15 MiB."""
    state = (segment(0, (5 * MIB, 0, INACTIVE), (6 * MIB, 6 * MIB, PENDING), (4 * MIB, 0, INACTIVE),
                     (5 * MIB, 5 * MIB, ALLOCATED)),)
    found = judge(state, Settings(), Request(15 * MIB), 0)
    assert (found.verdict, found.evidence.largest_after_wait_bytes) == (Verdict.WAIT, 15 * MIB)
    assert verdict(state, 16 * MIB) is Verdict.CAPACITY


def test_a_wholly_pending_segment_is_reclaimed_after_the_allocators_own_wait() -> None:
    """The release before the last attempt waits first, so a segment that is all pending goes back to the device."""
    assert verdict((segment(0, (20 * MIB, 20 * MIB, PENDING)),), 12 * MIB) is Verdict.RECLAIM


def test_a_private_pool_neither_lends_nor_triggers_a_release() -> None:
    """Free blocks of a private pool are elsewhere; a request into one cannot make the allocator release its cache."""
    private = (segment(0, (40 * MIB, 0, INACTIVE), pool=1),)
    assert verdict(private, 30 * MIB) is Verdict.WRONG_POOL
    assert verdict(private, 30 * MIB, pool=1) is Verdict.SERVED
    assert judge(private, Settings(), Request(30 * MIB), 0, freeable=frozenset({1})).verdict is Verdict.RECLAIM
    assert verdict((segment(0, (40 * MIB, 0, INACTIVE)),), 44 * MIB, 4 * MIB) is Verdict.RECLAIM
    assert verdict((segment(0, (40 * MIB, 0, INACTIVE)),), 44 * MIB, 4 * MIB, pool=1) is Verdict.FRAGMENTED


def test_max_split_size_keeps_large_blocks_for_large_requests() -> None:
    """A block of 64 MiB serves neither 20 MiB (below the limit of 32) nor 40 MiB (24 too much), but 48 MiB."""
    state, config = (segment(0, (64 * MIB, 0, INACTIVE)),), Settings(max_split_size=32 * MIB)
    assert verdict(state, 20 * MIB) is Verdict.SERVED
    assert verdict(state, 20 * MIB, config=config) is Verdict.RECLAIM
    assert verdict(state, 40 * MIB, config=config) is Verdict.RECLAIM
    assert verdict(state, 48 * MIB, config=config) is Verdict.SERVED


def test_expandable_blocks_are_skipped_once_the_setting_is_off() -> None:
    """A free expandable block serves nobody after expandable_segments was turned off; its whole pages go back."""
    assert verdict(SMALL_IN_LARGE, 20 * MIB, config=EXPANDABLE) is Verdict.SERVED
    assert verdict(SMALL_IN_LARGE, 20 * MIB) is Verdict.RECLAIM
    assert verdict(SMALL_IN_LARGE, 24 * MIB) is Verdict.FRAGMENTED


def test_a_block_that_can_grow_is_left_for_later() -> None:
    """Of 20 MiB at a segment's end and 24 MiB inside it, 18 MiB take the 24, so 21 MiB need a page: as in the twin."""
    twin = Allocator(EXPANDABLE)
    inside, _, at_the_end = (twin.alloc(size * MIB) for size in (24, 16, 20))
    twin.free(inside)
    twin.free(at_the_end)
    demand = Demand("cuda:0", 0, 0, (18 * MIB, 21 * MIB))
    index, found = for_demands(twin.snapshot(), EXPANDABLE, [demand], 20 * MIB)
    assert (index, found.verdict, found.evidence.segment_bytes) == (1, Verdict.GROW, 20 * MIB)
    assert twin.alloc(18 * MIB) == inside
    assert twin.alloc(21 * MIB) == at_the_end
    assert twin.stats().reserved == 80 * MIB


def test_a_memory_fraction_refuses_what_the_device_would_give() -> None:
    """With 10 MiB left of what is allowed, a segment of 32 MiB is refused although the device has room."""
    state = (segment(0, (2 * MIB, 2 * MIB, ALLOCATED), (18 * MIB, 0, INACTIVE)),)
    assert judge(state, Settings(), Request(32 * MIB), 99 * MIB).verdict is Verdict.GROW
    found = judge(state, Settings(), Request(32 * MIB), 99 * MIB, allowed_left=10 * MIB)
    assert (found.verdict, found.evidence.shortfall_bytes) == (Verdict.CAPACITY, 4 * MIB)
    assert found.sentence.endswith("the device has 99.00 MiB, of which the process may reserve 10.00 MiB.")


def test_an_unknown_device_is_said_and_never_grows() -> None:
    """Without the device's free bytes GROW cannot be told: the rest is decided, and labelled."""
    state = (segment(0, (16 * MIB, 0, INACTIVE)),)
    served, reclaimed, short = (judge(state, Settings(), Request(size * MIB), None) for size in (16, 12, 17))
    assert served.verdict is reclaimed.verdict is Verdict.SERVED
    assert (short.verdict, short.evidence.device_free_bytes, short.evidence.assuming) == (
        Verdict.CAPACITY, None, ASSUMING)
    assert "assumed" in short.sentence


def test_ratios_cry_fragmentation_where_the_memory_is_used_up() -> None:
    """0.17 % unused in small pieces: 1 - largest/free is 0.876 and the article's rate 0.9998, but it is CAPACITY."""
    largest, rest = 4318 * KIB, 30498 * KIB  # of 20,000 MiB in 1,000 segments, 34 MiB are free
    pieces = [largest, *[rest // 999] * 998]
    pieces.append(34 * MIB - sum(pieces))
    state = tuple(segment(at * 32 * MIB, (20 * MIB - piece, 20 * MIB - piece, ALLOCATED), (piece, 0, INACTIVE))
                  for at, piece in enumerate(pieces))
    ratios = {one.name: one.value for one in definitions(state, Settings())}
    assert ratios["largest_free"] == pytest.approx(0.876, abs=5e-4)
    assert ratios["article"] == pytest.approx(0.9998, abs=5e-5)
    assert ratios["pytorch_29554"] == pytest.approx(0.9983, abs=5e-5)
    found = judge(state, Settings(), Request(64 * MIB), 10 * MIB)
    assert (found.verdict, found.evidence.shortfall_bytes) == (Verdict.CAPACITY, 20 * MIB)
    assert judge(state, Settings(), Request(64 * MIB), 30 * MIB).verdict is Verdict.FRAGMENTED


def test_a_step_fails_at_the_request_that_fails() -> None:
    """Of three requests the first is served, the second takes the device's last segment, and the third decides."""
    state = (segment(0, (16 * MIB, 0, INACTIVE)),)
    demand = Demand("cuda:0", 0, 0, (16 * MIB, 20 * MIB, 24 * MIB))
    index, found = for_demands(state, Settings(), [demand], 30 * MIB)
    assert (index, found.verdict, found.evidence.device_free_bytes) == (2, Verdict.CAPACITY, 10 * MIB)
    index, found = for_demands(state, Settings(), [demand._replace(sizes=demand.sizes[:2])], 30 * MIB)
    assert (index, found.verdict) == (1, Verdict.GROW)


def test_requests_for_nothing_are_refused() -> None:
    """A request of 0 bytes reaches no allocator, and a demand without requests has no verdict."""
    with pytest.raises(ValueError, match="at least one byte"):
        judge((), Settings(), Request(0), 0)
    with pytest.raises(ValueError, match="at least one size"):
        for_demands((), Settings(), [Demand("cuda:0", 0, 0, ())], 0)


def test_verdicts_are_told_in_whole_sentences() -> None:
    """Every verdict's sentence ends as one and names the size that was asked for."""
    states: dict[Verdict, tuple[State, int, int]] = {
        Verdict.SERVED: ((segment(0, (16 * MIB, 0, INACTIVE)),), 16 * MIB, 0),
        Verdict.GROW: ((), 16 * MIB, 16 * MIB),
        Verdict.RECLAIM: ((segment(0, (16 * MIB, 0, INACTIVE)),), 12 * MIB + 6 * MIB, 2 * MIB),
        Verdict.WAIT: ((segment(0, (12 * MIB, 9, PENDING), (8 * MIB, 9, ALLOCATED)),), 12 * MIB, 0),
        Verdict.WRONG_POOL: ((segment(0, (40 * MIB, 0, INACTIVE), pool=1),), 30 * MIB, 0),
        Verdict.FRAGMENTED: ((segment(0, (4 * MIB, 9, ALLOCATED), (16 * MIB, 0, INACTIVE)),), 18 * MIB, 4 * MIB),
        Verdict.CAPACITY: ((), 512, 0)}
    for expected, (state, size, device_free) in states.items():
        found = judge(state, Settings(), Request(size), device_free)
        assert found.verdict is expected
        assert found.sentence.endswith(".")
        assert found.evidence.requested_bytes == size
        assert f"{size / MIB:,.2f} MiB" in found.sentence or f"{size} B" in found.sentence
