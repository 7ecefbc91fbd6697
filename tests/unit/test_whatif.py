"""What-if on histories that the twin records, against figures computed by hand; on the real files where they are."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from kvobs.allocator import program as ops
from kvobs.allocator import recording as rec
from kvobs.allocator.core import run
from kvobs.allocator.demand import RecordedDemand, demand_of
from kvobs.allocator.growth import Growth
from kvobs.allocator.recording import Calls, DeviceRecording, Recording, Stacks
from kvobs.allocator.replay import replay
from kvobs.allocator.settings import Settings, parse
from kvobs.allocator.state import ALLOCATED, INACTIVE, Block, Segment
from kvobs.allocator.whatif import SUCCEEDS, Comparison, case_of, figures, what_if
from tests.allocator_history import MIB
from tests.whatif_recorder import STACKS, Recorder

SNAPSHOTS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "snapshots"
EXPANDABLE = {"expandable_segments": "true"}


def compared(recording: Recording, changes: dict[str, str], capacity: int | None = None,
             growth: Growth | None = None) -> Comparison:
    return what_if(recording, recording.devices[0], changes, capacity, growth, engine="Python",
                   is_kv=lambda frames: frames[0][0] == "cache.py")


def bursts(first: tuple[int, int], second: tuple[int, int], settings: Settings | None = None) -> Recording:
    """``first`` (count, MiB) requests, all freed, then ``second``."""
    allocator = Recorder(settings or Settings(), None)
    addresses = [allocator.ask(first[1] * MIB) for _ in range(first[0])]
    for address in addresses:
        allocator.free(address)
    for _ in range(second[0]):
        allocator.ask(second[1] * MIB)
    return allocator.recording()


def test_the_worked_example_of_segments_that_do_not_merge() -> None:
    """8 x 16 MiB freed, then 4 x 32 MiB: 256 MiB in segments, in reverse order 128. Expandable segments need the seven
    pages of 20 MiB that 128 MiB take, 140 MiB.
    """
    found = compared(bursts((8, 16), (4, 32)), EXPANDABLE)
    assert (found.before.peak_reserved_bytes, found.after.peak_reserved_bytes) == (256 * MIB, 140 * MIB)
    assert found.before.peak_allocated_bytes == found.after.peak_allocated_bytes == 128 * MIB
    assert (found.before.utilisation_at_peaks, found.after.utilisation_at_peaks) == (0.5, 128 / 140)
    assert (found.before.device_allocs, found.before.mapped_bytes) == (12, 0)
    assert found.after.mapped_bytes == 140 * MIB
    assert compared(bursts((4, 32), (8, 16)), {}).before.peak_reserved_bytes == 128 * MIB


def test_without_a_change_both_runs_and_the_recording_agree() -> None:
    """Nothing changed: after is before, the recorded peak is met, and no request ends otherwise."""
    found = compared(bursts((8, 16), (4, 32)), {})
    assert found.after == found.before
    assert (found.recorded.difference_bytes, found.recorded.device_allocs, found.verdicts_changed) == (0, 12, ())


@pytest.mark.parametrize(("option", "value", "peak"), [
    # 1,200 KiB: with 4 divisions 1,280 KiB; 16 of them fill a segment of 20 MiB where 17 of the others would.
    ("roundup_power2_divisions", "4", 40), ("roundup_power2_divisions", "1", 20)])
def test_divisions_round_requests_up(option: str, value: str, peak: int) -> None:
    """17 requests of 1,200 KiB take one segment of 20 MiB, with 4 divisions two."""
    allocator = Recorder(Settings(), None)
    for _ in range(17):
        allocator.ask(1_200 << 10)
    assert compared(allocator.recording(), {option: value}).after.peak_reserved_bytes == peak * MIB


def test_a_split_limit_keeps_large_blocks_whole() -> None:
    """A freed block of 64 MiB serves 4 MiB and then 56 MiB; with max_split_size_mb:32 the small request may not touch
    it and gets a segment of 20 MiB, the large one then has the block to itself.
    """
    allocator = Recorder(Settings(), None)
    allocator.free(allocator.ask(64 * MIB))
    allocator.ask(4 * MIB)
    allocator.ask(56 * MIB)
    found = compared(allocator.recording(), {"max_split_size_mb": "32"})
    assert (found.before.peak_reserved_bytes, found.after.peak_reserved_bytes) == (64 * MIB, 84 * MIB)


def test_another_capacity_turns_a_request_into_a_verdict() -> None:
    """4 x 16 MiB of which the first and third are freed, then 32 MiB: with 80 MiB the device has 16 left, the free
    segments go back, and it succeeds; with 64 MiB it does too; with 63 MiB the fourth has no room already.
    """
    allocator = Recorder(Settings(), None)
    addresses = [allocator.ask(16 * MIB) for _ in range(4)]
    for index in (0, 2):
        allocator.free(addresses[index])
    allocator.ask(32 * MIB)
    recording = allocator.recording()
    assert compared(recording, {}, 64 * MIB).after.ooms == 0
    assert compared(recording, {}, 64 * MIB).after.retries == 1
    found = compared(recording, {}, 63 * MIB)
    assert [(change.requested_bytes, change.before, change.after) for change in found.verdicts_changed] == [
        (16 * MIB, SUCCEEDS, "CAPACITY")]
    assert (found.before.capacity_bytes, found.after.capacity_bytes) == (None, 63 * MIB)


def test_a_recorded_oom_tells_the_capacity_and_is_met_again() -> None:
    """What was reserved plus what was left is the capacity; under the recorded settings the model fails where the
    program did, and with expandable segments too: of their pages one alone is wholly free.
    """
    allocator = Recorder(Settings(), 130 * MIB)
    addresses = [allocator.ask(30 * MIB) for _ in range(4)]  # four segments; 10 MiB are left
    for index in (0, 2):
        allocator.free(addresses[index])
    kept = allocator.ask(4 * MIB)  # splits one of the freed, which now cannot go back
    assert kept
    assert allocator.ask(60 * MIB) == 0
    recording = allocator.recording()
    found = compared(recording, EXPANDABLE)
    assert case_of(recording, recording.devices[0]).capacity.bytes == 130 * MIB
    assert (found.recorded.ooms, found.before.ooms, found.recorded.difference_bytes) == (1, 1, 0)
    # Free: 26 MiB beside the kept block and 40 on the device, 66 in all for 60.
    assert [failure.verdict for failure in found.before.failures] == ["FRAGMENTED"]
    assert [failure.verdict for failure in found.after.failures] == ["FRAGMENTED"]
    assert found.verdicts_changed == ()


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.9, 1.0])
def test_a_recorded_memory_fraction_is_a_part_of_the_capacity(fraction: float) -> None:
    """Where a fraction was the limit, the model fails where the program did and not before; the capacity is estimated.
    A request that is served after a release (40 MiB freed, then 60) does not fail either.
    """
    allocator = Recorder(Settings(memory_fraction=fraction), 200 * MIB)
    while allocator.ask(20 * MIB):
        pass
    found = compared(allocator.recording(), {})
    assert (found.recorded.ooms, found.before.ooms, found.recorded.difference_bytes) == (1, 1, 0)
    assert "estimated" in found.capacity_reason
    released = Recorder(Settings(memory_fraction=fraction), int(90 * MIB / fraction))
    released.free(released.ask(40 * MIB, 1))
    released.ask(60 * MIB, 1)
    found = compared(released.recording(STACKS), {})
    assert (found.before.ooms, found.before.retries, found.recorded.difference_bytes) == (0, 1, 0)


def test_a_device_that_refuses_what_it_has_left_gives_an_estimate() -> None:
    """An OOM with 64 MiB left at a request for 16 tells only that less than those could be had, and says so."""
    allocator = Recorder(Settings(), 32 * MIB)
    allocator.ask(32 * MIB)
    allocator.ask(16 * MIB)
    recording = allocator.recording()
    assert "estimated" not in case_of(recording, recording.devices[0]).capacity.reason
    recording.devices[0].events.address[-1] = 64 * MIB
    capacity = case_of(recording, recording.devices[0]).capacity
    assert capacity.bytes == 48 * MIB - 1
    assert "estimated" in capacity.reason


def test_expandable_segments_serve_what_holes_cannot() -> None:
    """Four of ten segments of 30 MiB have 18 in use and are pinned: 48 MiB free there and 20 on the device are no room
    for 55. With expandable segments two pages of the hole move behind the last block, after one retry.
    """
    allocator = Recorder(Settings(), 320 * MIB)
    segments = [allocator.ask(30 * MIB) for _ in range(10)]
    for address in segments[:4]:
        allocator.free(address)
        allocator.ask(18 * MIB)
    assert allocator.ask(55 * MIB) == 0
    found = compared(allocator.recording(), EXPANDABLE)
    assert [(change.before, change.after) for change in found.verdicts_changed] == [("FRAGMENTED", SUCCEEDS)]
    assert (found.after.peak_reserved_bytes, found.after.retries) == (320 * MIB, 1)


def test_memory_given_back_by_need_is_told_from_a_call_to_empty_the_cache() -> None:
    """A release with the frames of empty_cache, or with another stack than the request behind it, is EMPTY_CACHE; one
    with the request's own stack is left to the model, and bounds the capacity.
    """
    stacks = STACKS
    asked = Recorder(Settings(), None)
    asked.free(asked.ask(40 * MIB, 1))
    asked.empty(0)
    asked.ask(60 * MIB, 1)
    demand = demand_of(asked.recording().devices[0], Settings(), stacks)
    assert list(demand.program.op) == [ops.ALLOC, ops.FREE, ops.EMPTY_CACHE, ops.ALLOC]
    assert demand.refused == []
    pressed = Recorder(Settings(), 90 * MIB)
    pressed.free(pressed.ask(40 * MIB, 1))
    pressed.ask(60 * MIB, 1)
    recording = pressed.recording(stacks)
    assert list(demand_of(recording.devices[0], Settings(), stacks).program.op) == [ops.ALLOC, ops.FREE, ops.ALLOC]
    capacity = case_of(recording, recording.devices[0]).capacity
    assert capacity.bytes == 100 * MIB - 1  # 40 reserved and 60 more were too much
    assert "estimated" in capacity.reason
    found = compared(recording, {})
    assert (found.before.retries, found.recorded.difference_bytes) == (1, 0)


def test_pending_frees_keep_their_delay() -> None:
    """A block that another stream used is not free before the recording says so: the next request needs new memory,
    the one after the completion does not.
    """
    allocator = Recorder(Settings(), None)
    address = allocator.ask(16 * MIB)
    allocator.record_stream(address, 7)
    allocator.free(address)
    allocator.ask(16 * MIB)
    allocator.advance(7)
    allocator.ask(16 * MIB)
    recording = allocator.recording()
    program = demand_of(recording.devices[0], Settings()).program
    reserved = run(program, Settings(), None, "Python").reserved
    assert [reserved[at] for at, op in enumerate(program.op) if op == ops.ALLOC] == [16 * MIB, 32 * MIB, 32 * MIB]
    assert compared(recording, {}).recorded.difference_bytes == 0


def test_utilisation_over_time_weighs_by_how_long_states_lasted() -> None:
    """16 of 16 MiB for 3 us, then nothing of 16 for 1 us: 75 %."""
    events = rec.Events()
    for action, time in ((rec.SEGMENT_ALLOC, 10), (rec.ALLOC, 10), (rec.FREE_REQUESTED, 13), (rec.FREE_COMPLETED, 13),
                         (rec.ALLOC, 14)):
        for column, value in zip((events.action, events.address, events.size, events.stream, events.time_us,
                                  events.stack, events.pool), (action, 4096, 16 * MIB, 0, time, -1, 0), strict=True):
            column.append(value)
    block = Block(4096, 16 * MIB, 16 * MIB, ALLOCATED)
    device = DeviceRecording(0, (Segment(4096, 16 * MIB, 0, 0, False, False, (block,)),), events)
    recording = Recording("made", "made", Settings(), (device,))
    assert compared(recording, {}).before.utilisation_over_time == 0.75


def test_a_cache_that_copies_fails_where_blocks_do_not() -> None:
    """On a device for 15 tokens of 20 MiB, cat cannot grow from 7 to 8 tokens since both do not fit at once; blocks of
    one token reach 8 without copying.
    """
    stacks = Stacks((("cache.py", 1, "update"),), ((0,),))
    allocator = Recorder(Settings(), 14 * 20 * MIB)
    old = allocator.ask(20 * MIB, 0)
    for tokens in range(2, 9):
        new = allocator.ask(tokens * 20 * MIB, 0)
        if not new:
            break
        allocator.free(old)
        old = new
    recording = allocator.recording(stacks)
    found = compared(recording, {}, growth=Growth("paged", 1))
    assert found.before.ooms == found.recorded.ooms == 1
    assert found.after.ooms == 0
    assert found.verdicts_changed[-1].after == SUCCEEDS
    assert found.kv is not None
    assert (found.kv.copied_bytes_before, found.kv.copied_bytes_after) == (sum(range(1, 7)) * 20 * MIB, 0)


def test_files_without_history_are_asked_by_their_last_state_and_say_so() -> None:
    """The last state's blocks are one sequence of requests; no use over time is told, and a sentence says so."""
    segment = Segment(4096, 20 * MIB, 0, 0, False, False, (
        Block(4096, 8 * MIB, 8 * MIB, ALLOCATED), Block(4096 + 8 * MIB, 12 * MIB, 0, INACTIVE)))
    recording = Recording("made", "made", None, (DeviceRecording(0, (segment,), rec.Events()),))
    found = compared(recording, {})
    assert found.before.peak_reserved_bytes == 20 * MIB
    assert found.before.utilisation_over_time is None
    assert "no history" in " ".join(found.notes)
    assert "settings" in " ".join(found.notes)


def test_what_was_there_at_the_start_fails_as_one_and_says_so() -> None:
    """Of three blocks of 20 MiB two fail on 20 MiB: two OOMs without a history, one of them listed, as a note says."""
    state = tuple(Segment(at * 32 * MIB, 20 * MIB, 0, 0, False, False, (
        Block(at * 32 * MIB, 20 * MIB, 20 * MIB, ALLOCATED),)) for at in (1, 2, 3))
    recording = Recording("made", "made", Settings(), (DeviceRecording(0, state, rec.Events()),))
    found = compared(recording, {}, 20 * MIB)
    assert (found.before.ooms, found.after.ooms) == (0, 2)
    assert [(change.event, change.before, change.after) for change in found.verdicts_changed] == [
        (rec.UNKNOWN, SUCCEEDS, "CAPACITY")]
    assert any(note.startswith("2 requests") for note in found.notes)
    assert not any("fail;" in note for note in compared(recording, {}, 40 * MIB).notes)


def test_a_released_pool_that_is_used_again_is_not_the_allocators_to_give() -> None:
    """A graph's 20 MiB are wholly free and its pool was released: 30 MiB on a device of 30 get them. After another
    capture into the pool they do not, and it is told why: 20 free there and 10 on the device are enough in sum only.
    """
    def demand(again: bool) -> RecordedDemand:
        made = RecordedDemand()
        made.add(rec.UNKNOWN, ops.FREE, made.allocate(rec.UNKNOWN, 20 * MIB, 0, 1, -1))
        made.add(rec.UNKNOWN, ops.RELEASE_POOL, pool=1)
        if again:
            made.add(rec.UNKNOWN, ops.FREE, made.allocate(rec.UNKNOWN, 20 * MIB, 0, 1, -1))
        made.allocate(rec.UNKNOWN, 30 * MIB, 0, 0, -1)
        return made

    recording = Recording("made", "made", Settings(), (DeviceRecording(0, (), rec.Events()),))
    case = case_of(recording, recording.devices[0])
    kept, given = (figures(case, demand(again), Settings(), 30 * MIB, "", "Python").failures for again in (True, False))
    assert [failure.verdict for failure in kept] == ["FRAGMENTED"]
    assert given == ()


def test_measured_calls_give_the_time() -> None:
    """Where the recording has its own calls, their median counts: 12 allocations at 2 ms each."""
    calls = Calls(("cudaMalloc",) * 3, array("q", (0, 10, 20)), array("q", (9_000_000, 2_000_000, 2_000_000)))
    history = bursts((8, 16), (4, 32))
    recording = Recording("made", "made", Settings(), history.devices, calls=calls)
    (estimate,) = compared(recording, {}).before.call_time
    assert estimate.ns == 12 * 2_000_000


@pytest.mark.parametrize(("changes", "said"), [
    ({"garbage_collection_threshold": "0.8"}, "acts only where per_process_memory_fraction"),
    ({"per_process_memory_fraction": "0.5"}, "without --capacity"),
    ({"expandable_segments": "false"}, "changes nothing"),
    ({"pinned_use_background_threads": "True"}, "changes nothing")])
def test_changes_without_effect_say_so(changes: dict[str, str], said: str) -> None:
    """An option that cannot act on this recording is named in a sentence, and both runs agree."""
    found = compared(bursts((2, 16), (1, 32)), changes)
    assert any(said in note for note in found.notes)
    assert found.before.peak_reserved_bytes == found.after.peak_reserved_bytes


@pytest.mark.parametrize("changes", [{"backend": "cudaMallocAsync"}, {"no_such": "1"}, {"max_split_size_mb": "2"}])
def test_what_cannot_be_modelled_is_refused(changes: dict[str, str]) -> None:
    """Another allocator, an unknown option and a value that PyTorch refuses are refused here too."""
    with pytest.raises(ValueError, match=r"not modelled|no option|not allowed"):
        compared(bursts((1, 16), (1, 16)), changes)


def test_garbage_is_collected_only_below_a_fraction() -> None:
    """With 200 MiB, half allowed and a threshold of 0.5, a request beyond 50 MiB first gives back the 40 MiB that lie
    idle; without the threshold both stay reserved.
    """
    allocator = Recorder(Settings(), None)
    allocator.free(allocator.ask(40 * MIB))
    allocator.ask(20 * MIB, stream=3)
    allocator.ask(30 * MIB, stream=3)
    base = {"per_process_memory_fraction": "0.5"}
    recording = allocator.recording()
    without = compared(recording, base, 200 * MIB).after
    collected = compared(recording, base | {"garbage_collection_threshold": "0.5"}, 200 * MIB).after
    assert (without.peak_reserved_bytes, without.device_frees) == (90 * MIB, 0)
    assert (collected.peak_reserved_bytes, collected.device_frees) == (60 * MIB, 1)


def test_a_complete_real_history_is_reproduced() -> None:
    """decomfl (complete, 7,946 requests): the model under the recorded settings reserves exactly what was recorded, in
    61 segments, and its allocated peak is the replay's.
    """
    path = SNAPSHOTS / "decomfl.pickle"
    if not path.is_file():
        pytest.skip(f"{path} is not here: the public snapshots are not part of the project.")
    from kvobs.allocator.readers import read

    recording = read(path)
    device = recording.devices[0]
    followed = replay(device, recording.settings or Settings())
    found = what_if(recording, device, EXPANDABLE, replay=followed)
    assert (found.before.device_allocs, found.recorded.device_allocs) == (61, 61)
    assert (found.recorded.difference_bytes, found.before.ooms) == (0, 0)
    assert found.before.peak_allocated_bytes == found.recorded.peak_allocated_bytes
    assert found.after.peak_reserved_bytes < found.before.peak_reserved_bytes


def test_the_settings_line_gives_the_settings_back() -> None:
    """The line of the changed run is one that PyTorch reads to the same settings."""
    found = compared(bursts((1, 16), (1, 16)), {"expandable_segments": "True", "roundup_power2_divisions": "8"})
    assert parse(found.after.settings) == Settings(expandable_segments=True, roundup_power2_divisions=(8,) * 16)
