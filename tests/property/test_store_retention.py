"""Retention against its definition, for whatever processes wrote and ended when."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.store import StoreReader, StoreWriter, _retention, _space
from tests.events import turn

HOUR = 3_600 * 10**9
BEGAN = 10**6 * HOUR
# Of each process: the hours at which it wrote, and whether it ended.
HISTORIES = st.lists(st.tuples(st.lists(st.integers(0, 60), min_size=1, max_size=5, unique=True).map(sorted),
                               st.booleans()), max_size=3)


def write(writer: StoreWriter, clock: list[int], hours: list[int]) -> None:
    for hour in hours:
        clock[0] = BEGAN + hour * HOUR
        writer.write([turn(t_ns=clock[0], turn=hour)])
        writer.commit()


@settings(max_examples=40)
@given(HISTORIES, st.lists(st.integers(0, 60), max_size=4, unique=True).map(sorted), st.integers(1, 50),
       st.lists(st.integers(61, 140), min_size=1, max_size=3, unique=True).map(sorted), st.integers(1, 3))
def test_what_is_left_is_what_the_retention_says(histories: list[tuple[list[int], bool]], own_hours: list[int],
                                                 keep: int, looks: list[int], bite: int) -> None:
    """At every look: of ended processes and of the own one, exactly the rows younger than the retention; of ended ones
    with a last write beyond it, no file; of running ones everything. Each is counted once.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory, writers = Path(folder), []
        bites, _retention.ROWS = _retention.ROWS, bite
        try:
            for number, (hours, ended) in enumerate(histories):
                clock = [BEGAN]
                writer = StoreWriter(directory, 64 << 20, f"p{number}", clock=lambda c=clock: c[0],  # type: ignore[misc]
                                     wall=lambda c=clock: c[0])  # type: ignore[misc]
                writers.append(writer)
                write(writer, clock, hours)
                if ended:
                    writer.close()
                for path in directory.glob(f"kvobs-p{number}-*"):
                    os.utime(path, ns=(clock[0], clock[0]))
            own_clock = [BEGAN]
            own = StoreWriter(directory, 64 << 20, "own", retention_s=keep * 3_600, clock=lambda: own_clock[0],
                              wall=lambda: own_clock[0])
            writers.append(own)
            write(own, own_clock, own_hours)
            for look in looks:
                own_clock[0] = BEGAN + look * HOUR
                for _ in range(25):
                    own.commit()
                    own_clock[0] += 10**9
                expected = {f"p{number}": [hour for hour in hours if not ended or hour > look - keep]
                            for number, (hours, ended) in enumerate(histories)}
                expected["own"] = [hour for hour in own_hours if hour > look - keep]
                left: dict[str, list[int]] = {name: [] for name in expected}
                for stored in StoreReader(directory).turns():
                    left[stored.process].append(stored.record.turn)
                assert left == expected
                assert {store.process for store in _space.survey(directory)} == {
                    name for name, turns in expected.items() if turns} | {"own"}
            told = dict(own.take_pruned())
            gone = sum(ended and hours[-1] <= looks[-1] - keep for hours, ended in histories)
            assert told.get("stores", 0) == gone
            assert own.take_dropped() == 0
        finally:
            _retention.ROWS = bites
            for writer in writers:
                writer.close()
