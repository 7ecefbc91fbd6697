"""Demands and what-if on recordings of random programs."""

from __future__ import annotations

from array import array

from hypothesis import assume, given
from hypothesis import strategies as st

from kvobs.allocator import program as ops
from kvobs.allocator import recording as rec
from kvobs.allocator.capacity import reserved_before, reserved_bytes
from kvobs.allocator.chains import regrow
from kvobs.allocator.demand import RecordedDemand, demand_of
from kvobs.allocator.growth import PAGED, Growth, copied_bytes, kv_program, plan, tail_bytes
from kvobs.allocator.recording import DeviceRecording, Stacks
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import ALLOCATED
from kvobs.allocator.whatif import what_if
from tests.allocator_history import MIB, history
from tests.whatif_recorder import random_recording

SETTINGS = st.sampled_from([Settings(), Settings(expandable_segments=True), Settings(max_split_size=32 * MIB)])
GROWTHS = st.one_of(st.sampled_from([Growth("cat"), Growth("static")]),
                    st.builds(Growth, st.sampled_from(["chunked", "paged"]), st.integers(1, 20)))
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12).map(
    lambda steps: [sum(steps[:index + 1]) for index in range(len(steps))])


def live_after(device: DeviceRecording, begin: int) -> dict[int, int]:
    """Requested bytes alive after each event, counted from the events alone."""
    found = {}
    for event, action in enumerate(device.events.action):
        begin += device.events.size[event] * ((action == rec.ALLOC) - (action == rec.FREE_REQUESTED))
        found[event] = begin
    return found


def demanded_after(demand: RecordedDemand) -> dict[int, int]:
    """Requested bytes alive in the demand after each event that it has operations for; ``-1``: before the first."""
    sizes: dict[int, int] = {}
    live, found = 0, {rec.UNKNOWN: 0}
    program = demand.program
    for event, op, handle, size in zip(demand.event, program.op, program.handle, program.size, strict=True):
        if op == ops.ALLOC:
            assert handle not in sizes
            sizes[handle] = size
            live += size
        elif op == ops.FREE:
            live -= sizes[handle]
            sizes[handle] = 0
        found[event] = live
    return found


@given(st.integers(0, 10_000), SETTINGS, st.sampled_from([None, 150 * MIB, 400 * MIB]),
       st.sampled_from([None, 5, 60]))
def test_a_demand_holds_what_the_recording_holds(seed: int, settings: Settings, capacity: int | None,
                                                 kept: int | None) -> None:
    """After every event of a history, whole or cut off, the demand's live bytes are the recording's."""
    made = history(seed, settings, capacity, 120, kept)
    demand = demand_of(made.device, settings)
    begin = sum(block.requested for segment in made.begin for block in segment.blocks if block.state == ALLOCATED)
    truth = live_after(made.device, begin)
    told = demanded_after(demand)
    assert told.pop(rec.UNKNOWN) == begin
    assert told == {event: truth[event] for event in told}
    actions = made.device.events.action
    assert {event for event, action in enumerate(actions) if action in {rec.ALLOC, rec.OOM}} <= told.keys()
    for event, action in enumerate(actions):  # a free that completes at once stands at its completion
        assert action != rec.FREE_REQUESTED or event in told or event + 1 in told


@given(st.integers(0, 10_000), SETTINGS, st.sampled_from([None, 150 * MIB, 400 * MIB]), st.booleans())
def test_a_complete_history_under_its_own_settings_is_reproduced(seed: int, settings: Settings, capacity: int | None,
                                                                 stacks: bool) -> None:
    """Nothing changed: the model's peak, device calls and OOMs are those recorded, whatever failed and was released.
    Plain segments tell by themselves why they went back, others by their stacks. How many addresses expandable
    segments have depends on the capacity, which only an OOM tells exactly.
    """
    recording = random_recording(seed, settings, capacity, 150)
    if not stacks and settings == Settings():
        stack = recording.devices[0].events.stack
        stack[:] = array("i", [rec.UNKNOWN]) * len(stack)
    assume(not settings.expandable_segments or capacity is None or rec.OOM in recording.devices[0].events.action)
    found = what_if(recording, recording.devices[0], {}, engine="Python")
    assert found.recorded.difference_bytes == 0
    assert (found.before.device_allocs, found.before.device_frees, found.before.ooms) == (
        found.recorded.device_allocs, found.recorded.device_frees, found.recorded.ooms)


@given(st.integers(0, 10_000), st.sampled_from([None, 150 * MIB]))
def test_reserved_bytes_are_those_of_segments_taken_and_given_back(seed: int, capacity: int | None) -> None:
    """Undoing device calls from the last state leaves nothing before a complete history, and never less."""
    device = history(seed, Settings(), capacity, 100).device
    reserved = reserved_before(device.events, reserved_bytes(device))
    assert reserved[0] == 0
    assert min(reserved) >= 0
    if capacity is not None:
        assert max(reserved) <= capacity


@given(GROWTHS, LENGTHS, st.integers(1, 1000))
def test_a_plan_holds_every_token_at_every_step(way: Growth, lengths: list[int], token: int) -> None:
    """What is allocated covers the tokens after each step, copies never exceed what is held, tails what a step is."""
    held = 0
    for length, step in zip(lengths, plan(way, lengths, token), strict=True):
        if step:
            held = sum(step) + (0 if way.copies else held)
        assert held >= length * token
    assert tail_bytes(way, lengths, token) == held - lengths[-1] * token
    assert tail_bytes(way, lengths, token) <= max(way.tokens - 1, 0) * token
    copied = copied_bytes(way, lengths, token)
    assert copied == (0 if not way.copies else sum(
        before * token for before, step in zip(lengths, plan(way, lengths, token)[1:], strict=False) if step))


@given(GROWTHS, st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=3),
       st.integers(1, 3), st.integers(1, 3))
def test_regrown_caches_are_those_that_would_have_been(way: Growth, turns: list[tuple[int, int]], layers: int,
                                                       sessions: int) -> None:
    """From the sizes of a recorded cat alone comes the program that the other way makes of the true lengths."""
    program = kv_program(layers, 256, turns, Growth("cat"), sessions)
    demand = RecordedDemand(program, array("q", range(len(program))), history=True)
    demand.stack.extend(handle % 2 for handle in range(program.op.count(ops.ALLOC)))
    stacks = Stacks((("cache.py", 1, "update"), ("cache.py", 2, "update")), ((0,), (1,)))
    made, regrown = regrow(demand, way, stacks, lambda frames: True)
    truth = kv_program(layers, 256, turns, way, sessions)
    assert (made.program.op, made.program.handle, made.program.size) == (truth.op, truth.handle, truth.size)
    assert regrown.chains == 2 * layers * sessions
    if way.kind == PAGED:
        assert regrown.tail_bytes <= regrown.chains * (way.tokens - 1) * 128
