"""Reading stores: merging, selecting, and what is refused, each in one sentence."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from kvobs import catalog, model
from kvobs.store import StoreError, StoreReader, StoreWriter, _reader
from kvobs.store._schema import SCHEMA_VERSION
from tests.events import step, turn

SECOND = 10**9
WRITTEN = catalog.BY_NAME["kvobs.kv.written"]


def write(directory: Path, process: str, events: list[model.Event], wall: int = 10**18) -> Path:
    before = set(directory.glob("*.sqlite"))
    writer = StoreWriter(directory, 64 * 1024**2, process, "http://127.0.0.1:1", clock=lambda: 0, wall=lambda: wall)
    writer.write(events)
    writer.close()
    assert writer.take_dropped() == 0
    (path,) = set(directory.glob("*.sqlite")) - before
    return path


def foreign(path: Path) -> None:
    path.write_bytes(b"")
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE turns (wall_ns)")
    connection.close()


def newer(path: Path) -> None:
    write(path.parent, "new", []).rename(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()


def damaged(path: Path) -> None:
    write(path.parent, "damaged", []).rename(path)
    path.write_bytes(path.read_bytes()[:100] + b"\xff" * (path.stat().st_size - 100))


@pytest.mark.parametrize(("make", "says"), [
    (lambda path: None, "There is no store at {}; name a kvobs store or a directory of stores."),
    (lambda path: path.mkdir(), "There is no kvobs store in {}; name a store or a directory of stores."),
    (lambda path: path.write_text("no database " * 1000),
     "{} cannot be read as a kvobs store: file is not a database."),
    (lambda path: path.write_bytes(b""), "{} is an SQLite file but not a kvobs store; name a store or a directory of "
                                         "stores."),
    (foreign, "{} is an SQLite file but not a kvobs store; name a store or a directory of stores."),
    (newer, f"{{}} was written by a newer kvobs (schema version {SCHEMA_VERSION + 1}); this one reads versions up to "
            f"{SCHEMA_VERSION}."),
    (damaged, "{} cannot be read as a kvobs store: database disk image is malformed."),
], ids=["missing", "empty directory", "text", "empty file", "foreign", "newer", "damaged"])
def test_what_is_no_store_is_refused_in_one_sentence(tmp_path: Path, make: object, says: str) -> None:
    """The sentence says which path, what is wrong, and (where something is) what is allowed."""
    path = tmp_path / "it"
    make(path)  # type: ignore[operator]
    with pytest.raises(StoreError, match="^" + re.escape(says.format(path)) + "$"):
        StoreReader(path)


def test_an_unreadable_file_hides_no_readable_one_of_its_directory(tmp_path: Path) -> None:
    """In a directory the good stores are read, and the bad one is named."""
    write(tmp_path, "good", [turn(turn=1)])
    newer(tmp_path / "kvobs-other-000001.sqlite")
    reader = StoreReader(tmp_path)
    assert [stored.record.turn for stored in reader.turns()] == [1]
    assert [str(problem).split(" was ")[0] for problem in reader.problems] == [
        str(tmp_path / "kvobs-other-000001.sqlite")]


def test_processes_are_merged_by_unix_time(tmp_path: Path) -> None:
    """Records of several processes come in one order, by each process's own anchor, across pages."""
    expected = []
    for index, (process, wall) in enumerate((("a", 10**18), ("b", 10**18 + 7), ("c", 10**18 - 5))):
        write(tmp_path, process, [turn(turn=i, t_ns=10 * i + index, session=process) for i in range(500)], wall)
        expected += [(wall + 10 * i + index, process, i) for i in range(500)]
    found = StoreReader(tmp_path).turns()
    assert [(stored.wall_ns, stored.process, stored.record.turn) for stored in found] == sorted(expected)
    assert {stored.record.session for stored in StoreReader(tmp_path).turns("b")} == {"b"}
    assert [process.process for process in StoreReader(tmp_path).processes()] == ["c", "a", "b"]


def test_pages_lose_and_repeat_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that share their time, more than fit on a page, come once each."""
    monkeypatch.setattr(_reader, "_PAGE_ROWS", 200)
    write(tmp_path, "p", [turn(turn=i, t_ns=i // 450) for i in range(1_500)])
    write(tmp_path, "q", [step(cache_id=i, t_ns=1) for i in range(1_001)])
    reader = StoreReader(tmp_path)
    assert [row[1] for row in reader.rows("turns", ["turn"])] == list(range(1_500))
    assert [row[1:] for row in reader.rows("steps", ["cache_id", "steps"])] == [(i, 1) for i in range(1_001)]


def test_a_single_file_is_read_by_its_path(tmp_path: Path) -> None:
    """A store that was copied elsewhere and renamed still knows its process."""
    path = write(tmp_path, "p", [turn(turn=5)]).rename(tmp_path / "copy of #1?.db")
    reader = StoreReader(path)
    assert [(stored.process, stored.record.turn) for stored in reader.turns()] == [("p", 5)]
    (process,) = reader.processes()
    assert (process.process, process.endpoint, process.alive) == ("p", "http://127.0.0.1:1", False)


def test_unknown_tables_and_columns_are_refused(tmp_path: Path) -> None:
    """The sentence names what there is instead."""
    write(tmp_path, "p", [])
    reader = StoreReader(tmp_path)
    with pytest.raises(StoreError, match="no table 'turn'; it has process, turns"):
        reader.rows("turn")
    with pytest.raises(StoreError, match="no column 'prompt'; it has wall_ns"):
        reader.rows("turns", ["prompt"])
    with pytest.raises(StoreError, match="'steps' cannot be selected by session"):
        reader.rows("steps", session="s")


def test_points_are_thinned_to_the_last_of_each_interval(tmp_path: Path) -> None:
    """With every_ns, each series keeps its last sample per interval, as it was."""
    now = [0]
    writer = StoreWriter(tmp_path, 64 * 1024**2, "p", clock=lambda: now[0], wall=lambda: 10**18)
    for second in range(25):
        now[0] = second * SECOND
        writer.write_points([(WRITTEN, {("m", "cpu", "x"): second, ("m", "cuda:0", "x"): -second})])
    writer.close()
    reader = StoreReader(tmp_path)
    assert len(reader.points("kvobs.kv.written")) == 50
    assert reader.points("kvobs.kv.copied") == []
    thin = reader.points("kvobs.kv.written", since_wall_ns=10**18 + 5 * SECOND, every_ns=10 * SECOND)
    assert [(point.wall_ns - 10**18, point.value) for point in thin if point.attributes["device"] == "cpu"] == [
        (9 * SECOND, 9.0), (19 * SECOND, 19.0), (24 * SECOND, 24.0)]
    assert [point.value for point in thin if point.attributes["device"] == "cuda:0"] == [-9.0, -19.0, -24.0]


def test_the_latest_fact_of_a_subject_is_known_with_its_beginning(tmp_path: Path) -> None:
    """Availability holds the newest fact per subject and since when it holds, however often it is repeated."""
    now = [0]
    writer = StoreWriter(tmp_path, 64 * 1024**2, "p", clock=lambda: now[0], wall=lambda: 10**18)
    facts = [(0, False), (1, False), (2, True), (3, True)]
    for second, there in facts:
        now[0] = second * SECOND
        writer.write([model.Availability("cuda", there, "" if there else "There is none.")])
        writer.commit()
    writer.close()
    assert [(stored.record, stored.wall_ns) for stored in StoreReader(tmp_path).availability()] == [
        (model.Availability("cuda", True, ""), 10**18 + 2 * SECOND)]


def test_allocators_are_summed_per_second(tmp_path: Path) -> None:
    """Requests of a second are counted and summed with the longest one; the state is the last one seen."""
    write(tmp_path, "p", [
        model.Allocation(1, "cuda:0", 100, 7), model.AllocatorState(2, "cuda:0", 50, 40, None),
        model.Allocation(3, "cuda:0", 200, 3), model.AllocatorState(4, "cuda:0", 60, 45, 9),
        model.Allocation(SECOND, "cuda:0", 1, 1), model.AllocatorState(5, "cpu", 6, 5, None)])
    columns = ["device", "allocations", "requested_bytes", "latency_ns", "latency_max_ns", "reserved_bytes",
               "allocated_bytes", "largest_free_bytes"]
    assert sorted(row[1:] for row in StoreReader(tmp_path).rows("allocators", columns)) == sorted([
        ("cuda:0", 2, 300, 10, 7, 60, 45, 9), ("cuda:0", 1, 1, 1, 1, None, None, None),
        ("cpu", 0, 0, 0, 0, 6, 5, None)], key=str)
