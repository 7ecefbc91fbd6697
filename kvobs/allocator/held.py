"""Who held memory over a history: growth, the peak, and what each trip to the device was for.

Over time only requested bytes are known (events carry no block sizes), so everything here counts requested bytes.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass

from kvobs.allocator.holders import Attribution, Holdings, Place, holdings
from kvobs.allocator.kinds import Frame
from kvobs.allocator.recording import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    DeviceRecording,
    Recording,
)
from kvobs.allocator.replayed import Replay
from kvobs.allocator.state import ALLOCATED

POINTS = 400
LINES = 12
FORCED = 50


@dataclass(frozen=True, slots=True)
class Line:
    """One holder over time: the bytes it held after each interval. ``grew``: its least value per interval never fell
    over the second half of the history, and it ended with more than that half's first. So looks a leak, and so does a
    cache that fills.
    """

    place: Place
    last: array[int]
    grew: bool


@dataclass(frozen=True, slots=True)
class Held:
    """The history of who held what. ``first`` are the events that begin the intervals, and the end (one entry more).
    ``lines`` are the holders that held most at any time, then those that grew most. ``peak`` is what was held when
    most was allocated, after event ``peak_event``.
    """

    first: array[int]
    lines: tuple[Line, ...]
    peak_event: int
    peak: Holdings


@dataclass(frozen=True, slots=True)
class Forced:
    """An allocation for which the allocator had to go to the device. ``device_bytes`` is what it took from there
    as recorded, None where the history does not tell.
    """

    event: int
    requested_bytes: int
    device_bytes: int | None
    kind: str
    frame: Frame | None


def held(recording: Recording, device: DeviceRecording, replay: Replay, points: int = POINTS,
         lines: int = LINES) -> Held | None:
    """Follow every block of a replayed history; None without one. About 1 us per event."""
    if not replay.events:
        return None
    found = Attribution(recording.stacks)
    step = -(-replay.events // points)
    first = array("q", [*range(0, replay.events, step), replay.events])
    peak_event = replay.allocated.index(max(replay.allocated))
    pass_ = _Pass(found, device, replay)
    peak: list[tuple[int, int, int, int]] = []
    for interval in range(len(first) - 1):
        start, stop = first[interval], first[interval + 1]
        if start <= peak_event < stop:
            pass_.run(start, peak_event + 1)
            peak = [(group, size, size, blocks) for group, (size, blocks)
                    in enumerate(zip(pass_.total, pass_.blocks, strict=True))]
            start = peak_event + 1
        pass_.run(start, stop)
        pass_.close(interval)
    intervals = len(first) - 1
    most = sorted(range(len(found.groups)), key=lambda group: (-pass_.most[group], group))
    grown = {group: rise for group in most if (rise := pass_.rise(group, intervals)) is not None}
    growing = sorted(grown, key=lambda group: (grown[group][0] - grown[group][1], group))
    made = [Line(found.groups[group], pass_.lasts(group, intervals), group in grown)
            for group in dict.fromkeys([*most[:lines], *growing[:lines]])]
    return Held(first, tuple(made), peak_event, holdings(found, peak))


class _Pass:
    """What each group holds while events go by."""

    def __init__(self, found: Attribution, device: DeviceRecording, replay: Replay) -> None:
        self._found, self._events = found, device.events
        self._live: dict[int, tuple[int, int]] = {}  # address → (group, requested bytes)
        self.total: list[int] = []
        self.blocks: list[int] = []
        self.most: list[int] = []
        self._low: list[int] = []
        self._touched: set[int] = set()
        self._points: list[list[tuple[int, int, int]]] = []  # per group: (interval, least, last), where it changed
        for segment in replay.initial:
            for block in segment.blocks:
                if block.state == ALLOCATED:
                    self._add(block.address, block.requested, block.stack)
        self._low = list(self.total)
        self._points = [[(-1, value, value)] for value in self.total]

    def run(self, start: int, stop: int) -> None:
        """Follow the events from ``start`` to before ``stop``."""
        events, live, total, blocks, low = self._events, self._live, self.total, self.blocks, self._low
        most, touch, group_of = self.most, self._touched.add, self._found.group
        columns = (events.action, events.address, events.size, events.stack)
        for action, address, size, stack in zip(*(column[start:stop] for column in columns), strict=True):
            # An alloc where something lives: its free was not recorded (skip_actions, a gap).
            if address in live and action in (ALLOC, FREE_REQUESTED, FREE_COMPLETED):
                group, before = live.pop(address)
                blocks[group] -= 1
                total[group] = held = total[group] - before
                if held < low[group]:
                    low[group] = held
                touch(group)
            if action == ALLOC:
                group = group_of(stack, size)
                if group >= len(total):
                    self._make_room(group)
                live[address] = group, size
                blocks[group] += 1
                total[group] = held = total[group] + size
                if held > most[group]:
                    most[group] = held
                touch(group)

    def _add(self, address: int, size: int, stack: int) -> None:
        group = self._found.group(stack, size)
        self._make_room(group)
        self._live[address] = group, size
        self.total[group] += size
        self.blocks[group] += 1
        self.most[group] = max(self.most[group], self.total[group])
        self._touched.add(group)

    def _make_room(self, group: int) -> None:
        while group >= len(self.total):
            for column in (self.total, self.blocks, self.most, self._low):
                column.append(0)
            self._points.append([])

    def close(self, interval: int) -> None:
        """End an interval."""
        for group in self._touched:
            self._points[group].append((interval, self._low[group], self.total[group]))
            self._low[group] = self.total[group]
        self._touched.clear()

    def lasts(self, group: int, intervals: int) -> array[int]:
        """The value at the end of each interval."""
        return self._column(group, intervals, 2)

    def rise(self, group: int, intervals: int) -> tuple[int, int] | None:
        """From where to where it grew over the second half; None if it fell there, or stayed."""
        half = intervals // 2
        if half < 2:
            return None
        low = self._column(group, intervals, 1)[half:]
        fell = any(later < earlier for earlier, later in itertools.pairwise(low))
        return None if fell or self.total[group] <= low[0] else (low[0], self.total[group])

    def _column(self, group: int, intervals: int, which: int) -> array[int]:
        found, value = array("q"), 0
        for point in [*self._points[group], (intervals, 0, 0)]:
            found.extend([value] * (max(point[0], 0) - len(found)))
            if 0 <= point[0] < intervals:
                found.append(point[which])
            value = point[2]
        return found


def forced(recording: Recording, device: DeviceRecording, replay: Replay, limit: int = FORCED) -> list[Forced]:
    """The allocations that went to the device, those that took most from it first, then in order of time."""
    attribution, events = Attribution(recording.stacks), device.events
    found: list[Forced] = []
    for event in replay.forced:
        size = events.size[event]
        place = attribution.groups[attribution.group(events.stack[event], size)]
        found.append(Forced(event, size, _taken(device, event), place.kind, place.frame))
    return sorted(found, key=lambda one: (-(one.device_bytes or 0), one.event))[:limit]


def _taken(device: DeviceRecording, event: int) -> int | None:
    """The bytes taken from the device by the calls recorded directly before an allocation."""
    actions, sizes = device.events.action, device.events.size
    taken: list[int] = []
    at = event - 1
    while at >= 0 and SEGMENT_ALLOC <= actions[at] <= SEGMENT_UNMAP:
        if actions[at] in (SEGMENT_ALLOC, SEGMENT_MAP):
            taken.append(sizes[at])
        at -= 1
    return sum(taken) if taken else None
