"""Who holds memory, now and over a history; by brute force, by hand, and by conservation."""

from __future__ import annotations

import itertools
import random
from array import array
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from kvobs.allocator import recording as rec
from kvobs.allocator.held import Held, forced, held
from kvobs.allocator.holders import frame_text, holders, users
from kvobs.allocator.recording import DeviceRecording, Events, Recording, Stacks
from kvobs.allocator.replay import replay
from kvobs.allocator.replayed import Replay, Score
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, Block, Segment
from tests.recordings import recorded

FRAMES = tuple((f"app/part{index}.py", index + 1, "work") for index in range(5))
STACKS = Stacks(FRAMES, tuple((index,) for index in range(5)))
Steps = list[tuple[int, int, int, int]]  # action, address, size, stack


def made(steps: Steps) -> tuple[Recording, DeviceRecording, Replay]:
    """A history, with a replay whose columns are the plain sums."""
    events, live = Events(), {}
    allocated = array("q")
    for action, address, size, stack in steps:
        for column, value in zip((events.action, events.address, events.size, events.stream, events.time_us,
                                  events.stack, events.pool), (action, address, size, 0, -1, stack, -1), strict=True):
            column.append(value)
        if action == rec.ALLOC:
            live[address] = size
        else:
            live.pop(address, None)
        allocated.append(sum(live.values()))
    device = DeviceRecording(0, (), events)
    nothing = Score()
    return (Recording("made", "made", devices=(device,), stacks=STACKS), device, Replay(
        nothing, nothing, nothing, True, "", (), allocated, allocated, allocated, array("q"), (), "none"))


def told(steps: Steps, points: int = 400, lines: int = 12) -> Held:
    found = held(*made(steps), points=points, lines=lines)
    assert found is not None
    return found


@st.composite
def programs(draw: st.DrawFn) -> Steps:
    chance = draw(st.randoms(use_true_random=False))
    steps: Steps = []
    live: list[int] = []
    for number in range(draw(st.integers(1, 60))):
        if live and chance.random() < 0.45:
            address = live.pop(chance.randrange(len(live)))
            steps.append((rec.FREE_REQUESTED, address, 0, -1))
            steps.append((rec.FREE_COMPLETED, address, 0, -1))
        else:
            steps.append((rec.ALLOC, 512 * (number + 1), chance.randrange(1, 9), chance.randrange(5)))
            live.append(512 * (number + 1))
    return steps


@hypothesis.given(programs(), st.integers(1, 12))
def test_lines_are_what_was_live(steps: Steps, points: int) -> None:
    """At the end of each interval a holder's line is the sum of what its stack had live, and the peak's holders sum
    to the most that was ever allocated.
    """
    found = told(steps, points)
    assert len(found.first) - 1 <= points
    for interval, (_, end) in enumerate(itertools.pairwise(found.first)):
        live: dict[int, tuple[int, int]] = {}
        for action, address, size, stack in steps[:end]:
            if action == rec.ALLOC:
                live[address] = size, stack
            else:
                live.pop(address, None)
        for line in found.lines:
            stack = FRAMES.index(line.place.frame)  # type: ignore[arg-type]
            assert line.last[interval] == sum(size for size, of in live.values() if of == stack)
    _, _, replayed = made(steps)
    assert found.peak.allocated_bytes == max(replayed.allocated) == replayed.allocated[found.peak_event]
    assert sum(one.size_bytes for one in found.peak.top) + found.peak.rest_bytes == found.peak.allocated_bytes


def grew(sizes: list[list[int]]) -> bool:
    """Whether a holder grew that allocates (positive) and frees (by its earlier size, negative), one interval each."""
    steps: Steps = []
    free: dict[int, list[int]] = {}
    for number, group in enumerate(sizes):
        for size in group:
            address = 512 * (len(steps) + 1)
            if size > 0:
                steps.append((rec.ALLOC, address, size, 0))
                free.setdefault(size, []).append(address)
            else:
                steps.append((rec.FREE_REQUESTED, free[-size].pop(), -size, -1))
        steps += [(rec.OTHER, 0, 0, -1)] * (4 * (number + 1) - len(steps))
    (line,) = told(steps, points=len(sizes)).lines
    return line.grew


@pytest.mark.parametrize(("sizes", "expected"), [
    ([[1]] * 10, True),  # a leak
    ([[5]] + [[]] * 9, False),  # held, not grown
    ([[3], [-3]] * 5, False),  # comes and goes
    ([[100], [1], *([number, 1 - number] for number in range(2, 10))], True),  # grows by copying
    ([[1]] * 9 + [[-1, -1, -1]], False),  # fell at last
    ([[9], [-9], *[[1]] * 8], True),  # fell in the first half only
])
def test_grew_means_that_the_floor_never_fell(sizes: list[list[int]], expected: bool) -> None:
    """Growth is judged by the least value of each interval over the second half, so copying is growth, sawtooth not."""
    assert grew(sizes) is expected


def test_a_free_that_was_not_recorded_leaves_nothing_behind() -> None:
    """Where something is allocated in a place that was never freed, what had been there is gone: a holder's line is
    what its blocks can be at most.
    """
    found = told([(rec.ALLOC, 512, 5, 0), (rec.ALLOC, 1024, 1, 0), (rec.ALLOC, 512, 7, 1), (rec.ALLOC, 512, 2, 0)])
    assert {line.place.label: list(line.last) for line in found.lines} == {
        "part0.py:1 work": [5, 6, 1, 3], "part1.py:2 work": [0, 0, 7, 0]}


def state(blocks: list[tuple[int, int, int, int]]) -> tuple[Segment, ...]:
    """One segment of blocks (size, requested, state, stack)."""
    at, found = 0, []
    for size, requested, kind, stack in blocks:
        found.append(Block(at, size, requested, kind, stack))
        at += size
    return (Segment(0, at, 0, 0, False, False, tuple(found)),)


def test_holders_by_hand() -> None:
    """Only allocated blocks count; bytes are of blocks, shares of all of them; equal ones are in order of name."""
    found = holders(state([(1024, 1000, ALLOCATED, 1), (512, 512, ALLOCATED, 0), (512, 300, ALLOCATED, 2),
                           (4096, 4096, PENDING, 3), (4096, 0, INACTIVE, -1), (1024, 600, ALLOCATED, 1),
                           (512, 512, ALLOCATED, -1)]), STACKS, limit=3)
    assert found.allocated_bytes == 3584
    assert [(one.place.label, one.size_bytes, one.requested_bytes, one.blocks) for one in found.top] == [
        ("part1.py:2 work", 2048, 1600, 2), ("no stack was recorded", 512, 512, 1), ("part0.py:1 work", 512, 512, 1)]
    assert found.top[0].share == 2048 / 3584
    assert (found.rest, found.rest_bytes) == (1, 512)
    assert found.kinds == {"unknown": 3584}


def test_the_order_of_segments_does_not_matter() -> None:
    """Holders are the same in whatever order the state lists segments."""
    chance = random.Random(3)
    segments = [
        state([(512 * (1 + index % 3), 1, ALLOCATED, index % 5)])[0] for index in range(20)]
    expected = [(one.place, one.size_bytes, one.blocks) for one in holders(tuple(segments), STACKS).top]
    for _ in range(5):
        chance.shuffle(segments)
        assert [(one.place, one.size_bytes, one.blocks)
                for one in holders(tuple(segments), STACKS).top] == expected


@pytest.mark.parametrize(("file", "own"), [
    ("app/serve.py", True), ("/home/me/lib/serve.py", True), ("serve.py", True), ("<stdin>", False),
    ("/usr/lib/python3.11/copy.py", False), ("x/site-packages/torch/nn/functional.py", False),
    ("torch/optim/adam.py", False), ("<frozen importlib._bootstrap>", False), ("Blas.cpp", False), ("??", False),
    ("/tmp/torchinductor_me/ab/cab.py", False), ("app/coc6o35wl7af7azzl5r7jqcstkjjafz22meeuznlu5miirctei66.py", False)])
def test_whose_frame_it_is(file: str, own: bool) -> None:
    """Installed packages, the standard library, C++ and generated code are not the user's; the rest is."""
    assert users((file, 1, "f")) is own


def test_frames_read_well() -> None:
    """Files lose their folders, C++ functions their arguments and templates."""
    assert frame_text(("/a/b/serve.py", 3, "main")) == "serve.py:3 main"
    template = "void torch::autograd::AccumulateGrad::go<std::function<void (int)> >(at::Tensor const&)"
    assert frame_text(("??", 0, template)) == "torch::autograd::AccumulateGrad::go"
    assert frame_text(("x.cpp", 9, "at::(anonymous namespace)::f(int)")) == "x.cpp:9 at::anonymous::f"


def test_a_server_that_runs_out(tmp_path: Path) -> None:
    """A made file's holders are what its program held: 10 MiB of weights and the last KV tensor; at the peak the last
    two of them at once; each trip to the device took what its segment has.
    """
    recording = recorded(tmp_path / "made.pickle")
    device = recording.devices[0]
    replayed = replay(device, recording.settings or Settings())
    now = holders(device.state, recording.stacks)
    assert now.kinds == {"weights": 10 * MIB, "kv": 6 * MIB}
    assert [one.place.user_frame for one in now.top] == [("app/serve.py", 10, "load"), ("app/serve.py", 20, "answer")]
    past = held(recording, device, replayed)
    assert past is not None
    assert past.peak.kinds == {"weights": 10 * MIB, "kv": 11 * MIB}
    assert {line.place.kind: line.grew for line in past.lines} == {"weights": False, "kv": True, "activation": False}
    trips = forced(recording, device, replayed)
    assert [(one.kind, one.requested_bytes, one.device_bytes) for one in trips] == [
        ("kv", 2 * MIB, 20 * MIB), ("weights", 10 * MIB, 10 * MIB), ("kv", MIB, 2 * MIB)]
