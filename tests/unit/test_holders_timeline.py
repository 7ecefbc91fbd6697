"""The history as lines."""

from __future__ import annotations

import itertools
from array import array

import hypothesis
import hypothesis.strategies as st

from kvobs.allocator import recording as rec
from kvobs.allocator.recording import DeviceRecording, Events
from kvobs.allocator.replayed import Replay, Score
from kvobs.allocator.timeline import timeline

COLUMN = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 40)), min_size=1,
                  max_size=300)


def made(rows: list[tuple[int, int, int]]) -> tuple[DeviceRecording, Replay]:
    events = Events()
    for index in range(len(rows)):
        for column, value in zip((events.action, events.address, events.size, events.stream, events.time_us,
                                  events.stack, events.pool),
                                 (rec.OTHER, 0, index, 0, 5 * index, -1, -1),
                                 strict=True):
            column.append(value)
    reserved, active, allocated = (array("q", [row[at] for row in rows]) for at in range(3))
    nothing = Score()
    return DeviceRecording(0, (), events), Replay(nothing, nothing, nothing, True, "", (), reserved, allocated, active,
                                                  array("q"), (), "none")


@hypothesis.given(COLUMN, st.integers(2, 80))
def test_no_peak_and_no_valley_is_lost(rows: list[tuple[int, int, int]], points: int) -> None:
    """Intervals cover every event once, there are at most as many values as asked for, and each interval's least
    and most are those of its events.
    """
    found = timeline(*made(rows), points=points)
    assert found is not None
    assert found.first[0] == 0
    assert found.first[-1] == len(rows)
    for name, column in (("reserved", [row[0] for row in rows]), ("active", [row[1] for row in rows]),
                         ("allocated", [row[2] for row in rows]), ("unused", [row[0] - row[1] for row in rows])):
        line = found.lines[name]
        assert len(line.low) + len(line.high) <= points
        for index, (start, end) in enumerate(itertools.pairwise(found.first)):
            assert (line.low[index], line.high[index]) == (min(column[start:end]), max(column[start:end]))
    assert list(found.time_us) == [5 * (end - 1) for end in found.first[1:]]


def test_without_history_there_is_none() -> None:
    """A file without events has no timeline."""
    assert timeline(*made([])) is None
