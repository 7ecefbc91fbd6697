"""Exports of Nsight Systems: against plain sums over what was written into them; hostile files are refused.

No Nsight Systems ran for these tests: the files have the tables of its export schema, their rows are made up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvobs.allocator.calls import summary
from kvobs.allocator.readers import _nsys, _sqlite
from kvobs.allocator.recording import UNKNOWN
from tests.profiles import NSYS_SCHEMA, write_nsys

CALLS = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 30), st.sampled_from(
    ["cudaMalloc_v3020", "cudaFree_v3020", "cuMemMap", "cudaLaunchKernel_v7000", "hipMalloc"]), st.integers(1, 99)),
    max_size=30)
USAGE = st.lists(st.tuples(st.integers(0, 1 << 40), st.sampled_from([11, 12]), st.integers(0, 3),
                           st.integers(0, 1 << 40), st.integers(0, 7), st.integers(0, 1)), max_size=30)
# ENUM_CUDA_MEM_KIND of the export schema.
KINDS = {0: "pageable", 1: "pinned", 2: "device", 3: "array", 4: "managed", 5: "device static", 6: "managed static",
         7: "unknown"}
ON_DEVICE = {2, 3, 5}
EVENT = (5, 11, 0, 1 << 20, 2, 0)


@given(CALLS, USAGE, st.sampled_from([None, 1_790_000_000_000_000_000]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_export_reads_as_it_was_written(tmp_path: Path, calls: list[tuple[int, int, str, int]],
                                           usage: list[tuple[int, int, int, int, int, int]], began: int | None) -> None:
    """Calls come back with their durations, and usage as plain running sums per process, device and kind of memory."""
    path = tmp_path / "e.sqlite"
    path.unlink(missing_ok=True)
    write_nsys(path, [(start, start + took, name, process) for start, took, name, process in calls], usage, began)
    wanted = [(start + (began or 0), took, name.partition("_v")[0]) for start, took, name, _ in calls
              if name != "cudaLaunchKernel_v7000"]
    if not wanted and not usage:
        with pytest.raises(ValueError, match="no calls for device memory and no memory usage"):
            _nsys.parse(str(path), "e.sqlite")
        return
    recording = _nsys.parse(str(path), "e.sqlite")
    found = recording.calls
    assert sorted(zip(found.start_ns, found.duration_ns, found.name, strict=True)) == sorted(wanted)
    assert list(found.start_ns) == sorted(found.start_ns)
    several = len({process for _, process, *_ in usage}) > 1
    assert {entry.device for entry in recording.usage} == {
        f"cuda:{device} of process {process}" if several else f"cuda:{device}" for _, process, device, *_ in usage}
    for entry in recording.usage:
        of = [row for row in usage
              if (f"cuda:{row[2]} of process {row[1]}" if several else f"cuda:{row[2]}") == entry.device]
        last = sum((-1 if row[5] else 1) * row[3] for row in of if row[4] in ON_DEVICE)
        assert entry.reserved[-1] == last
        assert set(entry.allocated) == {UNKNOWN}
        assert list(entry.time_us) == sorted((row[0] + (began or 0)) // 1000 for row in of)
        ends = {kind: column[-1] for kind, column in entry.categories.items()}
        for kind in {row[4] for row in of}:
            total = sum((-1 if row[5] else 1) * row[3] for row in of if row[4] == kind)
            assert ends[KINDS[kind]] == total


def test_usage_runs_over_time(tmp_path: Path) -> None:
    """By hand: 3 MiB, then 1 MiB of pinned memory that is not the device's, then 1 MiB freed leave 3, 3 and 2 MiB."""
    mib = 1 << 20
    path = write_nsys(tmp_path / "e.sqlite", usage=[
        (3_000, 11, 0, mib, 2, 1), (1_000, 11, 0, 3 * mib, 2, 0), (2_000, 11, 0, mib, 1, 0)])
    usage = _nsys.parse(str(path), "e.sqlite").usage[0]
    assert [value // mib for value in usage.reserved] == [3, 3, 2]
    assert [value // mib for value in usage.categories["pinned"]] == [0, 1, 1]
    assert list(usage.time_us) == [1, 2, 3]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    """Without the usage table, the session's start or the end of a call, sentences say so; the rest is read."""
    path = write_nsys(tmp_path / "e.sqlite", [(10, 30, "cudaMalloc_v3020", 1)])
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DROP TABLE CUDA_GPU_MEMORY_USAGE_EVENTS")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT 40, 20, 0, globalTid, 9, nameId, 0, 0 "
                         "FROM CUPTI_ACTIVITY_KIND_RUNTIME")
    recording = _nsys.parse(str(path), "e.sqlite")
    assert summary(recording.calls)[0].total_ns == 20
    for says in ("no memory usage", "does not tell when it began", "1 calls have no end"):
        assert any(says in note for note in recording.notes)


@pytest.mark.parametrize("instead", [
    "", "CREATE VIEW StringIds AS SELECT 1 AS id, 'cudaMalloc' AS value",
    "CREATE VIRTUAL TABLE StringIds USING fts5(id, value)",
    "CREATE TABLE StringIds (id INTEGER, value TEXT AS (printf('%.*c', 900000000, 'x')))"])
def test_computed_tables_are_not_read(tmp_path: Path, instead: str) -> None:
    """Views, virtual tables and generated columns, whose rows SQL of the file would make, count as no tables."""
    path = write_nsys(tmp_path / "e.sqlite", [(10, 30, "cudaMalloc_v3020", 1)], [EVENT])
    with closing(sqlite3.connect(path)) as database, database:
        try:
            database.executescript(f"DROP TABLE StringIds; {instead}")
        except sqlite3.OperationalError as error:
            pytest.skip(f"This SQLite cannot make such a table: {error}.")
    with pytest.raises(ValueError, match="no Nsight Systems export"):
        _nsys.parse(str(path), "e.sqlite")


def test_nothing_but_reading_is_allowed(tmp_path: Path) -> None:
    """On an opened file neither writing, functions, attaching, pragmas nor transactions are possible."""
    path = write_nsys(tmp_path / "e.sqlite", usage=[EVENT])
    before = path.read_bytes()
    with _sqlite.opened(str(path)) as database:
        for statement in ("DELETE FROM StringIds", "SELECT randomblob(10)", "ATTACH ':memory:' AS other",
                          "PRAGMA journal_mode = DELETE", "CREATE TABLE t (a)", "BEGIN", "SELECT load_extension('x')",
                          "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"):
            with pytest.raises(sqlite3.Error):
                database._connection.execute(statement).fetchall()
        assert len(list(database.rows("StringIds", ("id", "value")))) == 1
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["e.sqlite"]


def test_a_trigger_of_the_file_does_nothing(tmp_path: Path) -> None:
    """A file with triggers reads like one without."""
    path = write_nsys(tmp_path / "e.sqlite", [(10, 30, "cudaMalloc_v3020", 1)], [EVENT])
    plain = _nsys.parse(str(path), "e.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TRIGGER t AFTER INSERT ON StringIds BEGIN DELETE FROM StringIds; END")
    assert _nsys.parse(str(path), "e.sqlite") == plain


def test_endless_work_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading stops with a sentence once SQLite has taken more steps than the budget allows."""
    monkeypatch.setattr(_sqlite, "_STEPS", 100)
    monkeypatch.setattr(_sqlite, "_BUDGET", 10)
    path = write_nsys(tmp_path / "e.sqlite", [(index, index + 1, "cudaMalloc_v3020", 1) for index in range(2_000)])
    with pytest.raises(ValueError, match=r"tables cannot be read \(interrupted\)"):
        _nsys.parse(str(path), "e.sqlite")


def test_values_of_other_types_are_left_out(tmp_path: Path) -> None:
    """SQLite puts any type into any column: rows with text, blobs or impossible numbers are counted, not believed."""
    path = write_nsys(tmp_path / "e.sqlite", [(10, 30, "cudaMalloc_v3020", 1)], [EVENT])
    odd: Sequence[tuple[object, ...]] = [
        ("soon", 11, 0, 1, 2, 0), (1, 11, 0, b"\xff", 2, 0), (1, 11, 0, -5, 2, 0), (1, 11, 0, 5, 99, 0),
        (1, 11, 0, 5, 2, 7), ((1 << 63) - 1, 11, 0, 5, 2, 0), (1, 11, -1, 5, 2, 0)]
    with closing(sqlite3.connect(path)) as database, database:
        database.executemany(
            "INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS (start, globalPid, deviceId, contextId, address, pc, bytes, "
            "memKind, memoryOperationType) VALUES (?, ?, ?, 1, 1, 0, ?, ?, ?)", odd)
    recording = _nsys.parse(str(path), "e.sqlite")
    assert list(recording.usage[0].reserved) == [1 << 20]
    assert any(note.startswith(f"{len(odd)} memory usage events") for note in recording.notes)


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    """A truncated file, one of another kind, one with another schema and one with a broken schema are refused."""
    whole = write_nsys(tmp_path / "e.sqlite", [(index, index + 1, "cudaMalloc_v3020", 1) for index in range(3_000)])
    (tmp_path / "cut.sqlite").write_bytes(whole.read_bytes()[:12_288])
    (tmp_path / "text.sqlite").write_text("no database at all, but long enough to be looked at " * 40)
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as database, database:
        database.execute("CREATE TABLE t (a)")
    for name, statement in (("escape", b"CREATE TABLE \x1b[31m\"("), ("latin", b"CREATE TABLE \xe9\xff\x8d(((")):
        data = whole.read_bytes().replace(b"CREATE TABLE StringIds", statement.ljust(22))
        (tmp_path / f"{name}.sqlite").write_bytes(data)
    for name in ("cut", "text", "other", "escape", "latin"):
        with pytest.raises(ValueError, match=r"(Its tables cannot be read|This SQLite file is no) .*\.$") as refused:
            _nsys.parse(str(tmp_path / f"{name}.sqlite"), name)
        assert str(refused.value).isprintable()
    with pytest.raises(ValueError, match="no SQLite file"):
        _nsys.parse(b"", "empty")


def test_bytes_read_like_the_file(tmp_path: Path) -> None:
    """An export that is given as bytes reads like the one that lies at a path."""
    path = write_nsys(tmp_path / "e.sqlite", [(10, 30, "cudaMalloc_v3020", 1)], [EVENT], 10 ** 18)
    assert _nsys.parse(path.read_bytes(), "e.sqlite") == _nsys.parse(str(path), "e.sqlite")


def test_the_schema_of_the_tests_is_the_export_s() -> None:
    """The tests' export declares the tables and columns that the reader asks for, each once."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(NSYS_SCHEMA)
        for table, needed in (
                (_nsys._RUNTIME, {"start", "end", "nameId", "globalTid"}), (_nsys._STRINGS, {"id", "value"}),
                (_nsys._USAGE, {"start", "globalPid", "deviceId", "bytes", "memKind", "memoryOperationType"}),
                (_nsys._SESSION, {"utcEpochNs"})):
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            assert needed <= set(columns)
            assert len(columns) == len(set(columns))
