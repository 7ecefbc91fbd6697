"""Replaying a recorded history, and scoring the replay against it."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Protocol

from kvobs.allocator import core
from kvobs.allocator import script as steps
from kvobs.allocator._core_replay import CoreReplayer
from kvobs.allocator._recorded import PythonReplayer, Tally
from kvobs.allocator.recording import OOM, SEGMENT_MAP, DeviceRecording
from kvobs.allocator.replayed import RecordedOom, Replay, Score
from kvobs.allocator.reservations import Pages
from kvobs.allocator.script import Script, script_of
from kvobs.allocator.seeding import seed
from kvobs.allocator.settings import SMALL_SEGMENT, Settings
from kvobs.allocator.skipped import completed
from kvobs.allocator.state import INACTIVE, State

OOM_STATES = 64
SLICE = 20_000  # steps between two looks at the score
HOPELESS_SHARE, LEAST_MISSES = 0.06, 5_000
USABLE_SHARE = 0.95  # of all recorded facts: below it, conclusions from the replay are withheld


class Replayer(Protocol):
    """One engine."""

    engine: str
    tally: Tally

    def run(self, script: Script, start: int, stop: int) -> None:
        """Replay some steps."""

    def snapshot(self) -> State:
        """The state now."""


def replay(device: DeviceRecording, settings: Settings, engine: str = "auto") -> Replay:
    """Replay one device's history from the state that undoing it gives.

    ``engine`` is "auto" (the C++ core where it can be had), "C++" or "Python".

    Raises:
        ValueError: the engine that was asked for cannot be had.
    """
    device = completed(device)
    events = device.events
    if not len(events) or all(action > OOM for action in events.action):
        return _unusable(device, device.state, "the file has no history of events")
    if any(sum(block.size for block in segment.blocks) != segment.size for segment in device.state):
        return _unusable(device, device.state, "the last state contradicts itself: blocks do not fill their segments")
    undone = seed(device, settings)
    script = script_of(events, undone.pools)
    if not len(script):
        return _unusable(device, undone.state, "the history has no allocation, free or device call")
    try:
        replayer = _replayer(settings, undone.state, _pages(script), engine)
    except _Contradiction as error:
        return _unusable(device, undone.state, f"the state before the history contradicts itself: {error}")
    try:
        ooms = _run(replayer, script, device, undone.pools)
    except _Hopeless:
        tally = replayer.tally
        return replace(_unusable(device, undone.state, f"{_misses(tally):,} of the first {tally.addresses[0]:,} "
                                 "allocations' facts differ, and the rest was not replayed"),
                       addresses=Score(*tally.addresses), device_allocs=Score(*tally.device_allocs),
                       device_frees=Score(*tally.device_frees), engine=replayer.engine)
    except (AssertionError, IndexError, KeyError, ValueError):  # only where the twin was led into nonsense
        return _unusable(device, undone.state, "the history contradicts itself: it leads to a state that cannot be")
    tally = replayer.tally
    scores = [Score(*tally.addresses), Score(*tally.device_allocs), Score(*tally.device_frees)]
    usable, reason = _judge(scores, tally, undone.contradictions, len(events))
    ended = _ended(script, len(events))
    columns = [_per_event(column, ended, first) for column, first in (
        (tally.reserved, sum(segment.size for segment in undone.state)),
        (tally.allocated, _sum(undone.state, 2)), (tally.active, _sum(undone.state, 1)))]
    return Replay(scores[0], scores[1], scores[2], usable, reason, undone.state, columns[0], columns[1], columns[2],
                  array("q", [script.event[step] for step in tally.forced]), tuple(ooms), replayer.engine)


class _Contradiction(ValueError):
    pass


class _Hopeless(Exception):
    """So many facts differ that no conclusion can rest on the replay, whatever follows."""


def _advance(replayer: Replayer, script: Script, start: int, stop: int, most_misses: float) -> None:
    """Replay some steps, as long as it can become usable: following a foreign history is slow."""
    for at in range(start, stop, SLICE):
        replayer.run(script, at, min(at + SLICE, stop))
        if _misses(replayer.tally) > most_misses:
            raise _Hopeless


def _misses(tally: Tally) -> int:
    return sum(score[0] - score[1] for score in (tally.addresses, tally.device_allocs, tally.device_frees))


def _pages(script: Script) -> list[Pages]:
    """Where the history maps pages."""
    return [Pages(script.call_address[at], script.call_stream[at], script.call_size[at] == SMALL_SEGMENT)
            for at, kind in enumerate(script.call) if kind == SEGMENT_MAP]


def _replayer(settings: Settings, state: State, pages: list[Pages], engine: str) -> Replayer:
    made = PythonReplayer if core.engine(engine) == "Python" else CoreReplayer
    try:
        return made(settings, state, pages)
    except ValueError as error:
        raise _Contradiction(str(error)) from None


def _run(replayer: Replayer, script: Script, device: DeviceRecording, pools: array[int]) -> list[RecordedOom]:
    """Replay everything, with a stop at each OOM to look at the state."""
    found: list[RecordedOom] = []
    events, at, seen, done = device.events, 0, 0, 0
    stacks = {block.address: block.stack for segment in device.state for block in segment.blocks}
    facts = script.step.tobytes().count(steps.ALLOC) + len(script.call)
    most_misses = max(HOPELESS_SHARE * facts, LEAST_MISSES)
    while True:
        try:
            stop = script.step.index(steps.OOM, at) + 1
        except ValueError:
            _advance(replayer, script, max(at, done), len(script), most_misses)
            return found
        state = None
        if len(found) < OOM_STATES:
            _advance(replayer, script, at, stop, most_misses)
            seen = _remember(stacks, script, events.stack, seen, stop)
            state = _with_stacks(replayer.snapshot(), stacks)
        elif done < stop:  # nothing more to stop for
            _advance(replayer, script, at, len(script), most_misses)
            done = len(script)
        step = stop - 1
        event = script.event[step]
        found.append(RecordedOom(event, events.size[event], events.stream[event], pools[event],
                                 events.address[event], events.time_us[event], state,
                                 step not in replayer.tally.unexpected))
        at = stop


def _remember(stacks: dict[int, int], script: Script, column: array[int], start: int, stop: int) -> int:
    for step in range(start, stop):
        if script.step[step] == steps.ALLOC:
            stacks[script.address[step]] = column[script.event[step]]
    return stop


def _with_stacks(state: State, stacks: dict[int, int]) -> State:
    return tuple(segment._replace(blocks=tuple(
        block if block.state == INACTIVE else block._replace(stack=stacks.get(block.address, -1))
        for block in segment.blocks)) for segment in state)


def _judge(scores: list[Score], tally: Tally, contradictions: int, events: int) -> tuple[bool, str]:
    checked, matched = sum(score.checked for score in scores), sum(score.matched for score in scores)
    if checked == 0:
        return False, "the history has no allocation that the replay could be checked against"
    doubts = []
    if matched < checked:
        doubts.append(f"{checked - matched} of {checked} recorded facts differ")
    if contradictions:
        doubts.append(f"{contradictions} of {events} events do not fit what came after them")
    if tally.lost or tally.strays:
        doubts.append(f"{tally.lost} allocations and {tally.strays} frees had no place")
    if tally.switches:
        doubts.append(f"expandable_segments seems to have been changed {tally.switches} times")
    usable = matched >= USABLE_SHARE * checked and contradictions + tally.lost + tally.strays <= 0.01 * events
    return usable, "; ".join(doubts)


def _ended(script: Script, events: int) -> array[int]:
    """For every event, how many steps have ended with it."""
    made, expected = array("q"), 0
    for step, event in enumerate(script.event):
        if event > expected:
            made.append(step)  # most often a free_requested, whose step ends with the next event
            for _ in range(event - expected - 1):
                made.append(step)
        if event >= expected:
            made.append(step + 1)
        else:
            made[-1] = step + 1
        expected = event + 1
    made.extend([len(script)] * (events - expected))
    return made


def _per_event(column: array[int], ended: array[int], first: int) -> array[int]:
    """One value per event: that after the last step that has ended."""
    values = array("q", (first,)) + column
    return array("q", [values[count] for count in ended])


def _sum(state: State, least: int) -> int:
    return sum(block.size for segment in state for block in segment.blocks if block.state >= least)


def _unusable(device: DeviceRecording, state: State, reason: str) -> Replay:
    nothing, events = Score(), device.events
    ooms = tuple(RecordedOom(event, events.size[event], events.stream[event], max(events.pool[event], 0),
                             events.address[event], events.time_us[event], None, None)
                 for event, action in enumerate(events.action) if action == OOM)
    return Replay(nothing, nothing, nothing, False, reason, state, array("q"), array("q"), array("q"), array("q"), ooms,
                  "none")
