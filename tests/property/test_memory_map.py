"""Memory maps in bytes: what is unpacked is what was packed, and holders are found by address."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.allocator.memory_map import (
    MOST_BLOCKS,
    MOST_SEGMENTS,
    NOBODY,
    SEVERAL,
    Held,
    pack,
    sums,
    unpack,
    with_holders,
)
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, Block, Segment, State

sizes = st.integers(1, 1 << 40)
parts = st.tuples(st.integers(0, 3), sizes, sizes, st.sampled_from([INACTIVE, PENDING, ALLOCATED]),
                  st.integers(-1, 300))
segments = st.tuples(st.integers(0, 1 << 50), st.integers(0, (1 << 62) - 1), st.integers(0, 100), st.booleans(),
                     st.booleans(), st.lists(parts, max_size=8))


def made(rows: list[tuple[int, int, int, bool, bool, list[tuple[int, int, int, int, int]]]]) -> State:
    """Segments one after the other; between blocks there may be bytes that belong to none."""
    found, at = [], 1 << 41
    for skip, stream, pool, small, expandable, inside in rows:
        start = at = at + skip
        blocks = []
        for gap, size, requested, kind, holder in inside:
            at += gap
            blocks.append(Block(at, size, requested, kind, holder))
            at += size
        found.append(Segment(start, at - start, stream, pool, small, expandable, tuple(blocks)))
    return tuple(found)


states = st.lists(segments, max_size=5).map(made)


@given(states)
def test_a_state_comes_back_as_it_was(state: State) -> None:
    """Packing and unpacking changes no number of any segment or block."""
    assert unpack(pack(state)) == state


@given(states, st.data())
def test_damaged_bytes_are_a_state_or_a_value_error(state: State, data: st.DataObject) -> None:
    """Whatever is done to the bytes, nothing but a state within the bounds or a ValueError comes of it."""
    whole = bytearray(pack(state))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    cut = bytes(whole[:data.draw(st.integers(0, len(whole)))])
    try:
        found = unpack(cut)
    except ValueError:
        return
    assert len(found) <= MOST_SEGMENTS
    assert sum(len(segment.blocks) for segment in found) <= MOST_BLOCKS


def test_bytes_that_would_grow_without_bound_are_refused() -> None:
    """A few kilobytes that unpack to many times what a map may hold are refused, and not held in memory first."""
    import zlib

    with pytest.raises(ValueError, match="memory map"):
        unpack(zlib.compress(b"kvm1" + bytes(1 << 24)))


@given(states, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3), st.booleans()), max_size=30))
def test_holders_are_found_by_address(state: State, told: list[tuple[int, int, bool]]) -> None:
    """Each allocated block has the one holder with a storage in it, SEVERAL where there are more, else none."""
    blocks = [block for segment in state for block in segment.blocks]
    held = [Held(blocks[at % len(blocks)].address + (blocks[at % len(blocks)].size - 1 if last else 0), "cuda:0",
                 ("kv", f"s{who}", who)) for at, who, last in told if blocks]
    elsewhere = [one._replace(device="cuda:1", holder=("weights", "m", None)) for one in held]
    named, holders = with_holders(state, [*elsewhere, *held], "cuda:0")
    for block in (block for segment in named for block in segment.blocks):
        inside = {one.holder for one in held if block.address <= one.address < block.address + block.size}
        if block.state != ALLOCATED:
            continue
        if not inside:
            assert block.stack == NOBODY
        else:
            assert holders[block.stack] == (next(iter(inside)) if len(inside) == 1 else SEVERAL)
    assert len(set(holders)) == len(holders)


@given(states)
def test_sums_conserve_every_byte(state: State) -> None:
    """Allocated, pending, free and what is in no block add up to reserved; the largest free block is one of them."""
    found = sums(state)
    nowhere = sum(segment.size - sum(block.size for block in segment.blocks) for segment in state)
    assert found.active == found.allocated + found.pending
    assert found.reserved == found.allocated + found.pending + found.free + nowhere
    free = [block.size for segment in state for block in segment.blocks if block.state == INACTIVE]
    assert (found.free, found.largest_free) == (sum(free), max(free, default=0))
    assert found.blocks == sum(len(segment.blocks) for segment in state)
