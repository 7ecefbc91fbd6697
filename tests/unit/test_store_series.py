"""Series for views: the thinned ones against the plain reader, over several processes and stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvobs.catalog import BY_NAME
from kvobs.store import StoreReader, StoreWriter, series, session_facts, span
from tests.events import turn

SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND
USAGE, REALLOCATIONS = BY_NAME["kvobs.kv.usage"], BY_NAME["kvobs.kv.reallocations"]


def write(directory: Path, process: str, seconds: int, start: int = 0) -> None:
    now = [start * SECOND]
    writer = StoreWriter(directory, 64 * 1024**2, process, clock=lambda: now[0], wall=lambda: WALL + start * SECOND)
    for second in range(seconds):
        now[0] = (start + second) * SECOND
        points = {("m", "cpu", "x", "held"): float(second), ("m", "cpu", "x", "slack"): float(-second)}
        writer.write_points([(USAGE, points if second % 10 else {}),  # every tenth second nothing is alive
                             (REALLOCATIONS, {("m", "cpu", "x", "decode"): float(2 * second)})])
        writer.commit()
    writer.close()


@pytest.mark.parametrize("most", [1, 7, 50, 400])
def test_thinned_series_are_the_last_points_of_their_intervals(tmp_path: Path, most: int) -> None:
    """Each series has, per interval, the point of that interval's last instant, as a loop over all points finds it."""
    write(tmp_path, "a", 123)
    write(tmp_path, "b", 40, start=30)
    reader = StoreReader(tmp_path)
    since, until = WALL + 5 * SECOND, WALL + 100 * SECOND
    found = series(reader, [USAGE.name, REALLOCATIONS.name], since, until, most=most)
    width = -(-(until - since) // most)
    expected: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    every = {name: reader.points(name, since, until) for name in (USAGE.name, REALLOCATIONS.name)}
    for process in ("a", "b"):
        instants: dict[int, int] = {}
        for points in every.values():
            for point in points:
                if point.process == process:
                    bucket = (point.wall_ns - since) // width
                    instants[bucket] = max(instants.get(bucket, 0), point.wall_ns)
        for name, points in every.items():
            for point in points:
                if point.process == process and point.wall_ns in instants.values():
                    key = (process, name, str(sorted(point.attributes.items())))
                    expected.setdefault(key, []).append((point.wall_ns, point.value))
    mine = {(one.process, one.metric, str(sorted(one.attributes.items()))):
            list(zip(one.wall_ns, one.values, strict=True)) for one in found}
    assert mine == expected
    assert all(len(one.wall_ns) <= most for one in found)


def test_processes_are_chosen(tmp_path: Path) -> None:
    """With a choice of processes the others are not read."""
    write(tmp_path, "a", 3)
    write(tmp_path, "b", 3)
    found = series(StoreReader(tmp_path), [USAGE.name], WALL, WALL + 9 * SECOND, processes=["b"])
    assert {one.process for one in found} == {"b"}


def test_the_span_is_that_of_all_stores(tmp_path: Path) -> None:
    """The first and the last instant over all files; nothing written is no span."""
    StoreWriter(tmp_path, 64 * 1024**2, "c").commit()
    empty = StoreWriter(tmp_path, 64 * 1024**2, "c")
    empty.write([turn()])
    empty.close()
    assert span(StoreReader(tmp_path)) is None
    write(tmp_path, "a", 3)
    write(tmp_path, "b", 5, start=10)
    assert span(StoreReader(tmp_path)) == (WALL, WALL + 14 * SECOND)


def test_sessions_are_told_newest_first(tmp_path: Path) -> None:
    """Every session of every process with its number of turns; equal names of two processes stay apart."""
    for process, sessions in (("a", ["anna", "ben", "anna"]), ("b", ["anna"])):
        writer = StoreWriter(tmp_path, 64 * 1024**2, process, clock=lambda: 0,
                             wall=lambda process=process: WALL + 100 * SECOND * (process == "b"))
        writer.write([turn(session=name, t_ns=index * SECOND) for index, name in enumerate(sessions)])
        writer.close()
    assert [(fact.process, fact.session, fact.turns, (fact.last_wall_ns - WALL) // SECOND)
            for fact in session_facts(StoreReader(tmp_path))] == [
        ("b", "anna", 1, 100), ("a", "anna", 2, 2), ("a", "ben", 1, 1)]
