"""Waste and pins of states written down by hand, and of real snapshots."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from kvobs.allocator.pinning import Pin, pins
from kvobs.allocator.readers import read
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, State
from kvobs.allocator.waste import Group, Parts, waste
from tests.states import KIB, segment
from tests.support import ROOT

SNAPSHOTS = ROOT.parent / "shared" / "data" / "snapshots"


def test_every_class_by_hand() -> None:
    """Bytes of a state with one example of each class are where the table of the module says."""
    state: State = (
        segment(0, (4 * KIB, 4000, ALLOCATED), (8 * KIB, 0, INACTIVE), (2036 * KIB, 0, INACTIVE), small=True),
        segment(16 * MIB, (12 * MIB, 11 * MIB, PENDING), (8 * MIB, 0, INACTIVE)),
        segment(64 * MIB, (20 * MIB, 0, INACTIVE)),
        segment(128 * MIB, (20 * MIB, 0, INACTIVE), pool=3),
        segment(256 * MIB, (2 * MIB, 2 * MIB, ALLOCATED), (18 * MIB, 0, INACTIVE), stream=7, size=21 * MIB))
    found = waste(state, Settings())
    assert found.total == Parts(
        reserved_bytes=83 * MIB, allocated_bytes=4000 + 2 * MIB, rounding_bytes=96 + MIB,
        gaps_bytes=2044 * KIB + 8 * MIB + 18 * MIB, cached_bytes=20 * MIB, other_pools_bytes=20 * MIB,
        pending_bytes=11 * MIB, unexplained_bytes=MIB)
    assert list(found.groups) == [Group(0, 0, False), Group(7, 0, False), Group(0, 3, False), Group(0, 0, True)]
    assert found.groups[Group(7, 0, False)].unexplained_bytes == MIB


def test_only_whole_pages_of_an_expandable_segment_are_cached() -> None:
    """A 2 MiB block in the first of two 20 MiB pages leaves the second one to be returned, and 18 MiB as a gap."""
    state = (segment(0, (10 * MIB, 0, INACTIVE), (2 * MIB, 2 * MIB, ALLOCATED), (28 * MIB, 0, INACTIVE),
                     expandable=True),)
    found = waste(state, Settings(expandable_segments=True)).total
    assert (found.gaps_bytes, found.cached_bytes) == (18 * MIB, 20 * MIB)
    assert pins(state, Settings(expandable_segments=True)) == [
        Pin(0, 40 * MIB, 0, 0, 18 * MIB, 1, state[0].blocks[1])]


def test_blocks_that_claim_more_than_their_segment_are_shown_as_negative() -> None:
    """A contradiction of a file is a number of its own, and the sum still is what the segment says."""
    state = (segment(0, (20 * MIB, 20 * MIB, ALLOCATED), (4 * MIB, 0, INACTIVE), size=20 * MIB),)
    found = waste(state, Settings()).total
    assert found.unexplained_bytes == -4 * MIB
    assert sum(astuple(found)[1:]) == found.reserved_bytes == 20 * MIB


def test_nothing_reserved_is_nothing_wasted() -> None:
    """An empty state has an empty total and no groups."""
    assert waste((), Settings()).total == Parts()
    assert waste((), Settings()).groups == {}


def test_pins_by_hand() -> None:
    """One block alone is named; of several the smallest; wholly free and wholly used segments pin nothing."""
    alone = segment(0, (6 * MIB, 0, INACTIVE), (2 * MIB, 2 * MIB, ALLOCATED), (12 * MIB, 0, INACTIVE))
    several = segment(32 * MIB, (4 * MIB, 4 * MIB, ALLOCATED), (13 * MIB, 0, INACTIVE), (3 * MIB, 3 * MIB, PENDING))
    state = (alone, several, segment(64 * MIB, (20 * MIB, 0, INACTIVE)),
             segment(96 * MIB, (20 * MIB, 20 * MIB, ALLOCATED)))
    assert pins(state, Settings()) == [Pin(0, 20 * MIB, 0, 0, 18 * MIB, 1, alone.blocks[1]),
                                       Pin(32 * MIB, 20 * MIB, 0, 0, 13 * MIB, 2, several.blocks[2])]


def test_a_block_that_fills_its_pages_pins_nothing() -> None:
    """In an expandable segment only blocks that share a page with free bytes hold something back."""
    state = (segment(0, (20 * MIB, 20 * MIB, ALLOCATED), (1 * MIB, 1 * MIB, ALLOCATED), (19 * MIB, 0, INACTIVE),
                     expandable=True),)
    assert pins(state, Settings()) == [Pin(0, 40 * MIB, 0, 0, 19 * MIB, 1, state[0].blocks[1])]


def _snapshots() -> list[Path]:
    return sorted(SNAPSHOTS.glob("*.pickle"))


@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason="the public snapshots are not beside this checkout")
@pytest.mark.parametrize("path", _snapshots(), ids=lambda path: path.stem)
def test_the_bytes_of_real_snapshots_are_all_classed(path: Path) -> None:
    """On every public snapshot the classes sum to the reserved bytes, and allocated and pending to the blocks' own."""
    recording = read(path)
    assert recording.devices
    for device in recording.devices:
        found = waste(device.state, recording.settings or Settings())
        assert found.total.reserved_bytes == sum(one.size for one in device.state)
        for parts in [found.total, *found.groups.values()]:
            assert sum(astuple(parts)[1:]) == parts.reserved_bytes
        busy = sum(block.size for one in device.state for block in one.blocks if block.state != INACTIVE)
        assert found.total.allocated_bytes + found.total.pending_bytes + found.total.rounding_bytes == busy


@pytest.mark.skipif(not (SNAPSHOTS / "verl_mem.pickle").is_file(),
                    reason="the public snapshots are not beside this checkout")
def test_pending_blocks_of_a_real_snapshot_are_pending() -> None:
    """The nine blocks that verl_mem lists as freed and still in use are pending, not free."""
    recording = read(SNAPSHOTS / "verl_mem.pickle")
    blocks = [block for device in recording.devices for one in device.state for block in one.blocks
              if block.state == PENDING]
    parts = [waste(device.state, recording.settings or Settings()).total for device in recording.devices]
    assert len(blocks) == 9
    assert sum(part.pending_bytes for part in parts) == sum(block.requested for block in blocks) > 0
