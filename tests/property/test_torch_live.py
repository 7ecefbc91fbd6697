"""The bounds that stand for a verdict, against the exact verdict of the allocator's twin in the same state."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.allocator.arena import Arena
from kvobs.allocator.forecast import Demand
from kvobs.allocator.settings import MIB, known
from kvobs.allocator.state import ALLOCATED
from kvobs.allocator.verdict import Group, Request, Verdict, for_demands, judge
from kvobs.sources._torch_live import bound, headroom

CONFS = ("", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4",
         "garbage_collection_threshold:0.6")
SIZES = st.one_of(st.integers(1, MIB), st.integers(MIB, 12 * MIB), st.integers(12 * MIB, 90 * MIB))
OPERATIONS = st.lists(st.tuples(SIZES, st.integers(0, 30)), max_size=25)


def lived(conf: str, device: int, operations: list[tuple[int, int]]) -> Arena:
    """An allocator that has served these requests, each followed by giving back one that is still held (or none)."""
    arena, held = Arena((), known(conf), device), list[int]()
    for size, victim in operations:
        before = {block.address for segment in arena.state() for block in segment.blocks if block.state == ALLOCATED}
        if judge(arena.state(), arena.settings, Request(size), arena.device_free).verdict in ("SERVED", "GROW"):
            rounded = arena.settings.round_size(size)
            group = Group(0, 0, rounded <= MIB)
            spot = arena.find(group, rounded) or arena.take(group, rounded)
            assert spot is not None
            arena.hand_out(spot, rounded)
            held += {block.address for segment in arena.state() for block in segment.blocks
                     if block.state == ALLOCATED} - before
        if victim < len(held):
            arena.free(held.pop(victim))
    return arena


@settings(max_examples=300, deadline=None)
@given(conf=st.sampled_from(CONFS), device=st.integers(8, 200), operations=OPERATIONS,
       sizes=st.lists(SIZES, max_size=6))
def test_a_bound_never_contradicts_the_verdict(conf: str, device: int, operations: list[tuple[int, int]],
                                               sizes: list[int]) -> None:
    """What is certain by counters is what the twin says of the very state: it fits, or there is not enough of it."""
    arena = lived(conf, device * MIB, operations)
    state = arena.state()
    reserved = sum(segment.size for segment in state)
    allocated = sum(block.size for segment in state for block in segment.blocks if block.state == ALLOCATED)
    certain = bound(sizes, conf, reserved - allocated, arena.device_free)
    if not sizes:
        assert certain == "SERVED"
        return
    index, found = for_demands(state, arena.settings, [Demand("cuda:0", 0, 0, tuple(sizes))], arena.device_free)
    if certain == "GROW":
        assert found.verdict in (Verdict.SERVED, Verdict.GROW)
    elif certain is not None:
        assert (certain, index) == (found.verdict, 0)


def test_both_bounds_are_told() -> None:
    """With nothing reserved, 30 MiB fit into 40 MiB of the device and not into 20; two of them only the twin tells."""
    assert bound([30 * MIB], "", 0, 40 * MIB) == "GROW"
    assert bound([30 * MIB], "", 0, 20 * MIB) == "CAPACITY"
    assert bound([30 * MIB, 30 * MIB], "", 0, 40 * MIB) is None
    assert bound([MIB // 2], "expandable_segments:True", 0, 2 * MIB) == "GROW"
    assert bound([2 * MIB], "", 0, 10 * MIB) is None  # its segment would be of 20 MiB


@given(allocated=st.integers(0, 1000), unallocated=st.integers(0, 1000), free=st.integers(0, 1000))
def test_headroom_is_what_is_not_allocated(allocated: int, unallocated: int, free: int) -> None:
    """Of all bytes that the process may have, those that are not allocated: (unallocated + free) / all."""
    whole = allocated + unallocated + free
    share = headroom(allocated, allocated + unallocated, free)
    assert share is None if not whole else abs((share or 0.0) - (unallocated + free) / whole) < 1e-12
