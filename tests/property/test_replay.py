"""Replaying histories: what a file does not tell must be found again, and everything it tells must come out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.allocator import settings as allocator_settings
from kvobs.allocator.recording import OOM, DeviceRecording
from kvobs.allocator.replay import replay
from kvobs.allocator.replayed import Score
from kvobs.allocator.state import INACTIVE, State
from tests.allocator_history import MIB, history
from tests.support import ROOT

FOLDER = ROOT.parent / "shared" / "data" / "snapshots"
CONFS = ("", "expandable_segments:True", "max_split_size_mb:25", "roundup_power2_divisions:4",
         "max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:30,roundup_power2_divisions:8")
# Whether the program emptied the cache, or a request that would not take a block above the limit: with these two
# together a history without stacks does not tell, and a free page may serve either way.
AMBIGUOUS = "max_split_size_mb:64,expandable_segments:True"
# Recorded facts of the public files: allocations placed, device allocations.
RECORDED = {"decomfl": (7946, 61), "wedsonlin_medium_512_inference": (1666, 0),
            "wedsonlin_medium_128_training": (6526, 0),
            "bcrafton": (2162, 0), "silmont_bf16": (937, 0), "silmont_mem": (36, 9)}
ENGINES = ("Python", "C++")


def told(state: State) -> list[tuple[object, ...]]:
    """A state's segments and what lives in them, without stacks and without block sizes.

    The size of a block that was allocated before the history and freed in it is recorded nowhere.
    """
    return [(one.address, one.size, one.stream, one.small, one.expandable,
             [(block.address, block.requested, block.state) for block in one.blocks if block.state != INACTIVE])
            for one in state]


def available(engine: str) -> str:
    if engine == "C++":
        from kvobs.allocator import core
        if reason := core.why_not():
            pytest.skip(f"The C++ core cannot be had: {reason}")
    return engine


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), conf=st.sampled_from(CONFS), capacity=st.sampled_from([None, 100, 300, 900]),
       operations=st.sampled_from([30, 250, 700]), kept=st.sampled_from([None, 20, 150]),
       streams=st.sampled_from([(0,), (0, 7), (0, 5, 6, 9)]))
def test_a_history_is_reproduced_whatever_part_was_kept(engine: str, seed: int, conf: str, capacity: int | None,
                                                        operations: int, kept: int | None,
                                                        streams: tuple[int, ...]) -> None:
    """Undoing gives the true state where the kept part began, and every address, device call and OOM comes out."""
    parsed = allocator_settings.parse(conf)
    made = history(seed, parsed, None if capacity is None else capacity * MIB, operations, kept, streams=streams)
    found = replay(made.device, parsed, available(engine))
    if not len(made.device.events):
        return
    assert told(found.initial) == told(made.begin)
    if conf == AMBIGUOUS:
        scores = found.addresses, found.device_allocs, found.device_frees
        assert sum(score.checked - score.matched for score in scores) <= 2 * (1 + made.emptied)
    else:
        assert found.reason == "" or "no allocation" in found.reason, found.reason
    assert len(found.ooms) == made.ooms
    assert all(oom.reproduced for oom in found.ooms)
    if found.usable:
        assert found.reserved[-1] == sum(segment.size for segment in made.device.state)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", RECORDED)
def test_public_snapshots_are_reproduced(engine: str, name: str) -> None:
    """Every recorded address and device allocation of the real files comes out of either core."""
    from kvobs.allocator.readers import read

    recording = read(_file(name))
    device, = recording.devices
    assert recording.settings is not None
    found = replay(device, recording.settings, available(engine))
    addresses, device_allocs = RECORDED[name]
    assert found.engine == engine
    assert (found.addresses, found.device_allocs) == (Score(addresses, addresses), Score(device_allocs, device_allocs))
    assert found.usable
    assert found.reason == ""
    _ends_as_recorded(device, found.reserved[-1], found.allocated[-1], found.active[-1])
    assert OOM not in device.events.action


def _ends_as_recorded(device: DeviceRecording, reserved: int, allocated: int, active: int) -> None:
    blocks = [block for segment in device.state for block in segment.blocks]
    assert reserved == sum(segment.size for segment in device.state)
    assert allocated == sum(block.size for block in blocks if block.state == 2)
    assert active == sum(block.size for block in blocks if block.state >= 1)


def _file(name: str) -> Path:
    path = FOLDER / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"The public snapshots are not at {FOLDER.relative_to(ROOT.parent)} beside the project.")
    return path
