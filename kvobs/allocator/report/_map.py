"""The memory map over time as columns: which block and which segment was where, at a bounded number of moments.

Blocks of past moments are placed by their recorded addresses; their sizes are the requested ones rounded as the
allocator rounds, since events carry no block sizes. The last moment is the file's own state, exact.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

from kvobs.allocator import recording as rec
from kvobs.allocator.holders import Attribution
from kvobs.allocator.recording import DeviceRecording
from kvobs.allocator.replayed import Replay
from kvobs.allocator.settings import MIN_BLOCK, Settings
from kvobs.allocator.skipped import completed
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING

MOMENTS = 600
BLOCKS = 150_000  # drawn over all moments; with more, there are fewer moments
GROUPS = 4_095  # places that are told apart; what is of others has this number
UNIT = MIN_BLOCK


@dataclass(slots=True)
class Spans:
    """Things with an address, a size, a first moment and an end (the moment from which they are gone)."""

    address: array[int] = field(default_factory=lambda: array("Q"))
    size: array[int] = field(default_factory=lambda: array("Q"))
    first: array[int] = field(default_factory=lambda: array("H"))
    end: array[int] = field(default_factory=lambda: array("H"))
    group: array[int] = field(default_factory=lambda: array("H"))
    state: array[int] = field(default_factory=lambda: array("B"))

    def add(self, address: int, size: int, first: int, end: int, group: int = 0, state: int = ALLOCATED) -> None:
        """Add one, if it is there at any moment."""
        if end > first and size > 0:
            self.address.append(address)
            self.size.append(size)
            self.first.append(first)
            self.end.append(end)
            self.group.append(min(group, GROUPS))
            self.state.append(state)

    def __len__(self) -> int:
        return len(self.address)


@dataclass(slots=True)
class Map:
    """``moments`` are events after which the map is told; -1 is before the first. The last is the file's state."""

    moments: list[int]
    blocks: Spans
    segments: Spans


def memory_map(device: DeviceRecording, replay: Replay, settings: Settings, found: Attribution,
               special: set[int], most_blocks: int = BLOCKS) -> Map:
    """The map of one device. ``special`` events are moments whatever the number of others."""
    moments = _moments(replay.events, special)
    made = _Pass(device, replay, settings, found, moments).result()
    step = 1
    while len(made.blocks) > most_blocks and step < MOMENTS:
        step *= 2
        last = len(made.moments) - 1
        made = _thinned(made, [at for at, event in enumerate(made.moments)
                               if at % 2 == 0 or at == last or event in special])
    return made


def _moments(events: int, special: set[int]) -> list[int]:
    if not events:
        return [-1]
    even = {events * step // MOMENTS - 1 for step in range(MOMENTS + 1)}
    return sorted({-1, events - 1} | even | {event for event in special if event < events})


def _thinned(made: Map, kept: list[int]) -> Map:
    """The same with some moments only (their places, in order), and without what is at none of them."""
    ranks = [bisect_left(kept, at) for at in range(len(made.moments) + 1)]
    thinner = Map([made.moments[at] for at in kept], Spans(), Spans())
    for spans, fewer in ((made.blocks, thinner.blocks), (made.segments, thinner.segments)):
        for address, size, first, end, group, state in zip(
                spans.address, spans.size, spans.first, spans.end, spans.group, spans.state, strict=True):
            fewer.add(address, size, ranks[first], ranks[end], group, state)
    return thinner


class _Pass:
    """Follows segments and blocks through a history."""

    def __init__(self, device: DeviceRecording, replay: Replay, settings: Settings, found: Attribution,
                 moments: list[int]) -> None:
        self._device, self._replay, self._settings, self._group = completed(device), replay, settings, found.group
        self._moments = moments
        self._blocks, self._segments = Spans(), Spans()
        self._live: dict[int, tuple[int, int, int, int]] = {}  # address → size, first moment, group, state
        self._ranges: dict[int, tuple[int, int, int]] = {}  # address → size, first moment, expandable
        self._starts: list[int] = []  # the addresses of the ranges, in order

    def result(self) -> Map:
        last = len(self._moments) - 1
        if last > 0:
            self._history(last)
        for segment in self._device.state:
            self._segments.add(segment.address, segment.size, last, last + 1, 0, int(segment.expandable))
            for block in segment.blocks:
                if block.state != INACTIVE:
                    self._blocks.add(block.address, block.size, last, last + 1,
                                     self._group(block.stack, block.requested), block.state)
        return Map(self._moments, self._blocks, self._segments)

    def _history(self, last: int) -> None:
        for segment in self._replay.initial:
            self._reserve(segment.address, segment.size, 0, int(segment.expandable))
            for block in segment.blocks:
                if block.state != INACTIVE:
                    self._live[block.address] = (block.size, 0, self._group(block.stack, block.requested), block.state)
        self._follow()
        exact = {block.address: block.size for segment in self._device.state for block in segment.blocks
                 if block.state != INACTIVE}
        for address, (size, first, group, state) in self._live.items():
            self._blocks.add(address, exact.get(address, size), first, last, group, state)
        for address, (size, first, expandable) in self._ranges.items():
            self._segments.add(address, size, first, last, 0, expandable)

    def _follow(self) -> None:
        events, live, moments = self._device.events, self._live, self._moments
        rounded = self._settings.round_size
        now, upcoming = 0, moments[0]
        for index, action in enumerate(events.action):
            while index > upcoming:  # a moment before this event
                now += 1
                upcoming = moments[now]
            address = events.address[index]
            if action == rec.ALLOC:
                if address in live:
                    self._end(address, now)
                size = events.size[index]
                live[address] = rounded(size), now, self._group(events.stack[index], size), ALLOCATED
            elif action == rec.FREE_REQUESTED:
                if address in live:
                    size, _, group, _ = live[address]
                    self._end(address, now)
                    live[address] = size, now, group, PENDING
            elif action == rec.FREE_COMPLETED:
                if address in live:
                    self._end(address, now)
            elif rec.SEGMENT_ALLOC <= action <= rec.SEGMENT_UNMAP:
                self._device_call(action, address, events.size[index], now)

    def _end(self, address: int, now: int) -> None:
        size, first, group, state = self._live.pop(address)
        self._blocks.add(address, size, first, now, group, state)

    def _device_call(self, action: int, address: int, size: int, now: int) -> None:
        if action in (rec.SEGMENT_ALLOC, rec.SEGMENT_MAP):
            self._reserve(address, size, now, int(action == rec.SEGMENT_MAP))
            return
        at = max(bisect_right(self._starts, address) - 1, 0)
        while at < len(self._starts) and self._starts[at] < address + size:
            start = self._starts[at]
            length, first, expandable = self._ranges[start]
            if start + length <= address:
                at += 1
                continue
            del self._ranges[self._starts.pop(at)]
            self._segments.add(start, length, first, now, 0, expandable)
            if start < address:
                self._reserve(start, address - start, now, expandable)
                at += 1
            if start + length > address + size:
                self._reserve(address + size, start + length - address - size, now, expandable)

    def _reserve(self, address: int, size: int, now: int, expandable: int) -> None:
        if address not in self._ranges:
            insort(self._starts, address)
        self._ranges[address] = size, now, expandable


def packed(segments: Spans) -> list[tuple[int, int, int]]:
    """The addresses that were ever reserved, without the gaps between them: (address, bytes, packed position)."""
    found: list[tuple[int, int, int]] = []
    position = 0
    for address, size in sorted(set(zip(segments.address, segments.size, strict=True))):
        end = address + size
        if found and address <= found[-1][0] + found[-1][1]:
            start, length, at = found[-1]
            grown = max(start + length, end) - start
            found[-1] = start, grown, at
            position = at + grown
        else:
            found.append((address, size, position))
            position += size
    return found


def place(ranges: list[tuple[int, int, int]], starts: list[int], address: int) -> int | None:
    """The packed position of an address; None where nothing was ever reserved."""
    index = bisect_right(starts, address) - 1
    if index < 0 or address >= ranges[index][0] + ranges[index][1]:
        return None
    return ranges[index][2] + address - ranges[index][0]
