"""Replaying on the C++ core gives what replaying on the twin gives, whether the history agrees with them or not."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.allocator import core
from kvobs.allocator._core_replay import CoreReplayer, ForcedCore
from kvobs.allocator._recorded import PythonReplayer, RecordedDevice
from kvobs.allocator.device import SimulatedDevice
from kvobs.allocator.recording import SEGMENT_MAP, DeviceRecording
from kvobs.allocator.reservations import Pages
from kvobs.allocator.script import script_of
from kvobs.allocator.seeding import seed as undo
from kvobs.allocator.settings import MIB, SMALL_SEGMENT, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, Block, Segment
from kvobs.allocator.twin import Allocator
from tests.allocator_history import history
from tests.programs import random_settings

REASON = core.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
seeds = st.integers(0, 2**32 - 1)


def same(device: DeviceRecording, told: Settings) -> int:
    """Replay on both, step by step; equal tallies and states as long as the history leaves no two blocks at one place.
    Returns the number of steps compared.
    """
    undone = undo(device, told)
    script = script_of(device.events, undone.pools)
    pages = [Pages(script.call_address[at], script.call_stream[at], script.call_size[at] == SMALL_SEGMENT)
             for at, kind in enumerate(script.call) if kind == SEGMENT_MAP]
    wanted = PythonReplayer(told, undone.state, pages)
    if overlaps(wanted._allocator):
        return 0
    found = CoreReplayer(told, undone.state, pages)
    for at in range(len(script)):
        wanted.run(script, at, at + 1)
        if overlaps(wanted._allocator):
            return at
        found.run(script, at, at + 1)
        assert found.tally == wanted.tally
        assert found.snapshot() == wanted.snapshot()
        assert found._core.stats() == wanted._allocator.stats()
    whole = CoreReplayer(told, undone.state, pages)
    whole.run(script, 0, len(script))
    assert (whole.tally, whole.snapshot()) == (found.tally, found.snapshot())
    return len(script)


def agreeing(seed: int) -> int:
    """Compare on a random history and the settings it was made with; returns the number of steps compared."""
    draw = random.Random(seed)
    told = Settings(expandable_segments=draw.random() < 0.5, max_split_size=draw.choice((None, 30 * MIB)))
    return same(history(seed, told, draw.choice((None, 200 * MIB, 400 * MIB)), 300, draw.choice((None, 100))).device,
                told)


def overlaps(allocator: Allocator) -> bool:
    """Whether a history that contradicts itself has put two blocks at one place."""
    mapped = sorted(allocator._all(), key=lambda block: block.address)
    if any(one.address + one.size > two.address for one, two in pairwise(mapped)):
        return True
    unmapped = [block for pair in allocator._pools.values() for pool in pair for _, _, block in pool.unmapped]
    return any(one.address < two.address + two.size and two.address < one.address + one.size
               for one in mapped if one.range is not None for two in unmapped)


@settings(max_examples=80)
@given(seed=seeds)
def test_equal_where_the_history_agrees(seed: int) -> None:
    """On histories of the allocator itself both score the same and are in the same state after every step."""
    agreeing(seed)


@settings(max_examples=80)
@given(seed=seeds)
def test_equal_where_the_history_differs(seed: int) -> None:
    """With settings that were not in force, and with events lost, both follow the recording in the same way."""
    differing(seed)


def differing(seed: int) -> int:
    """Compare on a random history with settings that it was not made with, and events lost; returns the number of steps
    compared.
    """
    draw = random.Random(seed)
    made = history(seed, Settings(expandable_segments=draw.random() < 0.5), draw.choice((None, 300 * MIB)), 250,
                   draw.choice((None, 100)), draw.choice(((0,), (0, 1))))
    events, lost = made.device.events, draw.choice((0, 0, 1, 5))
    for _ in range(min(lost, len(events))):
        place = draw.randrange(len(events))
        for name in ("action", "address", "size", "stream", "time_us", "stack", "pool"):
            getattr(events, name).pop(place)
    return same(made.device, replace(random_settings(draw), large_segment_size=20 * MIB))


def test_comparisons_go_far() -> None:
    """Histories are compared to their ends, some 200 steps away, but for the rare one with two blocks at one place."""
    assert sum(agreeing(seed) for seed in range(30)) > 6000
    assert sum(differing(seed) for seed in range(30)) > 4000


def test_most_steps_need_no_policy() -> None:
    """A history that agrees is replayed in one call but for the steps at which the device was asked."""
    told = Settings()
    made = history(5, told, None, 3000)
    undone = undo(made.device, told)
    script = script_of(made.device.events, undone.pools)
    one_by_one: list[int] = []

    class Watched(CoreReplayer):
        def _alloc(self, script: object, index: int) -> None:
            one_by_one.append(index)
            super()._alloc(script, index)  # type: ignore[arg-type]

    replayer = Watched(told, undone.state)
    replayer.run(script, 0, len(script))
    assert replayer.tally.addresses[0] == replayer.tally.addresses[1] > 1000
    assert one_by_one == list(replayer.tally.forced)
    assert len(one_by_one) < replayer.tally.addresses[0] / 4


def test_loaded_states_are_told_back() -> None:
    """A loaded state is the snapshot of what was loaded; one whose blocks leave a hole is refused."""
    whole = (Segment(4 * MIB, 2 * MIB, 7, 0, True, False, (
        Block(4 * MIB, 512, 100, ALLOCATED), Block(4 * MIB + 512, 2 * MIB - 512, 0, INACTIVE))),)
    for made in (ForcedCore(Settings(), RecordedDevice()), Allocator(Settings(), RecordedDevice())):
        made.load(whole)
        assert made.snapshot() == whole
        assert (made.reserved, made.allocated, made.pending) == (2 * MIB, 512, 0)
    hole = (whole[0]._replace(size=3 * MIB),)
    with pytest.raises(ValueError, match="do not fill their segment"):
        ForcedCore(Settings(), RecordedDevice()).load(hole)


def test_a_device_in_python() -> None:
    """The core takes its memory from a device in Python as the twin does."""
    pair = [SimulatedDevice(64 * MIB), SimulatedDevice(64 * MIB)]
    forced, twin = ForcedCore(Settings(), pair[0]), Allocator(Settings(), pair[1])
    addresses = array("Q", [forced.alloc(16 * MIB), twin.alloc(16 * MIB), forced.alloc(1), twin.alloc(1)])
    assert addresses[0::2] == addresses[1::2]
    assert pair[0].used == pair[1].used == 18 * MIB
