"""Series for views: the thinned ones against the plain reader, over several processes and stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvobs.catalog import BY_NAME
from kvobs.store import StoreReader, StoreWriter, latest_attention, series, session_facts, spans
from tests.events import attention, step, turn

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


def test_spans_are_those_of_the_points(tmp_path: Path) -> None:
    """The first and the last instant of each process over all its files; who wrote no point has none."""
    empty = StoreWriter(tmp_path, 64 * 1024**2, "c")
    empty.write([turn()])
    empty.close()
    assert spans(StoreReader(tmp_path)) == {}
    write(tmp_path, "a", 3)
    write(tmp_path, "a", 4, start=20)
    write(tmp_path, "b", 5, start=10)
    assert spans(StoreReader(tmp_path)) == {
        "a": (WALL, WALL + 23 * SECOND), "b": (WALL + 10 * SECOND, WALL + 14 * SECOND)}
    assert set(spans(StoreReader(tmp_path, ["b", "nobody"]))) == {"b"}


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


def test_attention_is_that_of_the_cache_sampled_last(tmp_path: Path) -> None:
    """Its seconds alone, oldest first over both kinds of layers, each beside what the cache held then, if known."""
    for process, cache, start in (("a", 1, 0), ("a", 2, 10), ("b", 1, 5)):
        wall = WALL + start * SECOND
        writer = StoreWriter(tmp_path, 64 * 1024**2, process, clock=lambda: 0, wall=lambda wall=wall: wall)
        for second in range(3):
            writer.write([attention(t_ns=second * SECOND, cache_id=cache, tokens=second, layers=layers)
                          for layers in ("sliding", "full")])
            if second:
                writer.write([step(t_ns=second * SECOND, cache_id=cache, kv_bytes=100 * start + second)])
        writer.close()
    found = latest_attention(StoreReader(tmp_path))
    assert [(row.process, row.record.cache_id, row.record.layers, row.record.tokens, held) for row, held in found] == [
        ("a", 2, layers, second, 1_000 + second if second else None)
        for second in range(3) for layers in ("full", "sliding")]
    assert {row.process for row, _ in latest_attention(StoreReader(tmp_path, ["b"]))} == {"b"}
    assert latest_attention(StoreReader(tmp_path, ["nobody"])) == []


def test_what_is_remembered_of_finished_stores_follows_their_files(tmp_path: Path) -> None:
    """A store that was read before is named as damaged once its file changes, and is gone once it is deleted."""
    write(tmp_path, "a", 3)
    write(tmp_path, "b", 3)
    reader = StoreReader(tmp_path)
    assert [found.process for found in reader.processes()] == ["a", "b"]
    (path,) = tmp_path.glob("kvobs-b-*.sqlite")
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert [found.process for found in reader.processes()] == ["a"]
    assert [path.name in str(problem) for problem in reader.problems] == [True]
    assert StoreReader(tmp_path, ["b"]).processes() == []
    path.unlink()
    assert [found.process for found in reader.processes()] == ["a"]
    assert reader.problems == []


def test_a_running_process_is_read_anew(tmp_path: Path) -> None:
    """Of a store that is being written nothing is remembered: its heartbeat and its span move on."""
    now = [0]
    writer = StoreWriter(tmp_path, 64 * 1024**2, "a", clock=lambda: now[0], wall=lambda: WALL + now[0])
    ends = []
    try:
        for second in range(3):
            now[0] = second * SECOND
            writer.write_points([(USAGE, {("m", "cpu", "x", "held"): 1.0})])
            writer.commit()
            ends.append((spans(StoreReader(tmp_path))["a"][1], StoreReader(tmp_path).processes()[0].heartbeat_wall_ns))
    finally:
        writer.close()
    assert [(end, beat) for end, beat in ends] == sorted(set(ends))
    assert len({beat for _, beat in ends}) == 3
