"""Reserved, active and allocated bytes over a history, thinned so that no peak and no valley is lost."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass

from kvobs.allocator.recording import DeviceRecording
from kvobs.allocator.replayed import Replay

POINTS = 2000  # at most, of each line
NAMES = ("reserved", "active", "allocated", "unused")


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity in bytes: its least and its largest value within each interval."""

    low: array[int]
    high: array[int]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Intervals of equally many events (the last one may be shorter).

    Interval ``i`` covers the events ``first[i]`` to ``first[i + 1] - 1`` (``first`` has one entry more). ``time_us``
    is of its last event, UNKNOWN (-1) where the file has no times. ``unused`` is reserved minus active: what no program
    and no stream uses.
    """

    first: array[int]
    time_us: array[int]
    lines: dict[str, Line]


def timeline(device: DeviceRecording, replay: Replay, points: int = POINTS) -> Timeline | None:
    """The history of a device in at most ``points`` values per line; None without a replayed history."""
    events = replay.events
    if not events:
        return None
    intervals = min(max(points // 2, 1), events)  # two values each
    step = -(-events // intervals)
    first = array("q", [*range(0, events, step), events])
    unused = array("q", [reserved - active for reserved, active in zip(replay.reserved, replay.active, strict=True)])
    columns = (replay.reserved, replay.active, replay.allocated, unused)
    times = device.events.time_us
    return Timeline(
        first, array("q", [times[end - 1] for end in first[1:]]),
        {name: interval_line(column, first) for name, column in zip(NAMES, columns, strict=True)})


def interval_line(column: array[int], first: array[int]) -> Line:
    """One column by intervals; ``first`` are their beginnings and the end."""
    parts = [column[start:end] for start, end in itertools.pairwise(first)]
    return Line(array("q", map(min, parts)), array("q", map(max, parts)))
