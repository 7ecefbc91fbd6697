"""Retention: whole stores and old rows, on an injected clock, in bites, never those of a process that runs."""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path

import pytest

from kvobs import catalog
from kvobs.config import Config
from kvobs.runtime import Runtime
from kvobs.store import StoreReader, StoreWriter, _file, _retention, _space
from tests.events import EXAMPLES, step, turn

DAY, HOUR = 86_400 * 10**9, 3_600 * 10**9
BEGAN = 1_000 * DAY  # Unix nanoseconds
MIB = 1024**2
POINTS = catalog.BY_NAME["kvobs.kv.written"]


class Process:
    """A writer on a clock of its own hands; ``now`` is Unix nanoseconds."""

    def __init__(self, directory: Path, name: str, now: int, keep_days: float = 0, max_bytes: int = 64 * MIB) -> None:
        self.directory, self.name, self.now = directory, name, now
        self.writer = StoreWriter(directory, max_bytes, name, retention_s=round(keep_days * 86_400),
                                  clock=lambda: self.now, wall=lambda: self.now)

    def write(self, now: int, *turns: int) -> None:
        """Commit turns with these numbers at a time."""
        self.now = now
        self.writer.write([turn(t_ns=now, turn=number) for number in turns])
        self.writer.commit()

    def passes(self, number: int) -> None:
        """Commit every minute."""
        for _ in range(number):
            self.now += 60 * 10**9
            self.writer.commit()

    def end(self) -> None:
        """End; its files were last written now, on its own clock."""
        self.writer.close()
        date(self.directory, self.name, self.now)


def date(directory: Path, name: str, wall_ns: int) -> None:
    for path in directory.glob(f"kvobs-{name}-*"):
        os.utime(path, ns=(wall_ns, wall_ns))


def processes(directory: Path) -> set[str]:
    return {store.process for store in _space.survey(directory)}


def turns(directory: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for stored in StoreReader(directory).turns():
        found.setdefault(stored.process, []).append(stored.record.turn)
    return found


def test_whole_stores_go_when_their_last_write_is_too_old(tmp_path: Path) -> None:
    """Of ended processes those older than the retention go, to the nanosecond; the others and the own one stay."""
    for name, age in (("old", 4 * DAY), ("edge", 3 * DAY), ("young", 3 * DAY - 1), ("new", 0)):
        one = Process(tmp_path, name, BEGAN - age)
        one.write(BEGAN - age, 1)
        one.end()
    sizes = sum(path.stat().st_size for name in ("old", "edge") for path in tmp_path.glob(f"kvobs-{name}-*"))
    own = Process(tmp_path, "own", BEGAN, keep_days=3)
    own.write(BEGAN, 7)
    assert processes(tmp_path) == {"young", "new", "own"}
    assert not list(tmp_path.glob("kvobs-old-*")) + list(tmp_path.glob("kvobs-edge-*"))
    assert own.writer._retention.pruned.stores == 2
    assert own.writer._retention.pruned.bytes == sizes
    assert own.writer.take_pruned() == (("stores", 2),)
    assert own.writer.take_pruned() == ()
    own.end()


def test_without_a_retention_nothing_goes(tmp_path: Path) -> None:
    """0 keeps everything, whatever its age."""
    one = Process(tmp_path, "old", BEGAN - 10_000 * HOUR)
    one.write(one.now, 1)
    one.end()
    own = Process(tmp_path, "own", BEGAN)
    own.write(BEGAN, 2)
    own.write(BEGAN + 9_000 * DAY, 3)
    own.passes(3)
    assert turns(tmp_path) == {"old": [1], "own": [2, 3]}
    own.end()


def test_what_a_running_process_writes_is_not_touched(tmp_path: Path) -> None:
    """Neither its store nor its rows go, though its files and rows are older than the retention."""
    running = Process(tmp_path, "running", BEGAN - 50 * DAY)
    running.write(running.now, 1, 2, 3)
    date(tmp_path, "running", BEGAN - 50 * DAY)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("kvobs-running-*")}
    own = Process(tmp_path, "own", BEGAN, keep_days=3)
    own.passes(5)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("kvobs-running-*")} == before
    assert turns(tmp_path) == {"running": [1, 2, 3]}
    assert own.writer.take_pruned() == ()
    running.end()
    date(tmp_path, "running", BEGAN - 50 * DAY)
    own.passes(1)
    assert processes(tmp_path) == {"own"}
    own.end()


def test_the_own_old_rows_go_and_the_others_stay(tmp_path: Path) -> None:
    """Rows up to the retention's beginning are deleted from every table that is read by time."""
    own = Process(tmp_path, "own", BEGAN, keep_days=14)
    for day in range(40):
        own.now = BEGAN + day * DAY
        own.writer.write([turn(t_ns=own.now, turn=day), step(t_ns=own.now, cache_id=day)])
        own.writer.write_points([(POINTS, {(f"m{day}", "cpu", "x"): day})])
        own.writer.commit()
        own.writer.commit()
    assert turns(tmp_path) == {"own": list(range(26, 40))}
    path = next(tmp_path.glob("*.sqlite"))
    own.end()
    connection = sqlite3.connect(path)
    for table in ("turns", "steps", "points"):
        times = [row[0] for row in connection.execute(f"SELECT wall_ns FROM {table} ORDER BY wall_ns")]
        assert times == [BEGAN + day * DAY for day in range(26, 40)], table
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    assert dict(own.writer.take_pruned()) == {"rows": 3 * 26}


def test_old_rows_of_an_ended_process_go_before_its_store(tmp_path: Path) -> None:
    """A process that ran for long leaves old rows in a young store: they go at their time, and the store at its own."""
    ended = Process(tmp_path, "ended", BEGAN)
    for day in range(10):
        ended.write(BEGAN + day * DAY, day)
    ended.end()
    own = Process(tmp_path, "own", BEGAN + 9 * DAY + 2 * HOUR, keep_days=3)
    for day in range(9, 14):
        own.now = BEGAN + day * DAY + 2 * HOUR
        own.passes(3)
        left = [number for number in range(10) if number > day - 3]
        assert turns(tmp_path) == ({"ended": left} if left else {}), day
        assert ("ended" in processes(tmp_path)) is bool(left)
    own.end()


def test_a_crashed_process_is_treated_like_one_that_ended(tmp_path: Path) -> None:
    """Its log is taken in, and its last write stays its last write."""
    crashed = Process(tmp_path, "crashed", BEGAN)
    for day in range(5):
        crashed.write(BEGAN + day * DAY, day)
    path = next(tmp_path.glob("kvobs-crashed-*.sqlite"))
    kept = {one: one.read_bytes() for one in (path, path.with_name(path.name + "-wal"))}
    crashed.end()
    for one, content in kept.items():
        one.write_bytes(content)
    date(tmp_path, "crashed", BEGAN + 4 * DAY)
    os.utime(path, ns=(BEGAN, BEGAN))  # only the log was written since
    own = Process(tmp_path, "own", BEGAN + 4 * DAY + HOUR, keep_days=2)
    own.passes(3)
    assert turns(tmp_path) == {"crashed": [3, 4]}
    own.now = BEGAN + 6 * DAY
    own.passes(2)
    assert processes(tmp_path) == {"own"}
    own.end()


@pytest.mark.parametrize("mine", [True, False])
def test_one_pass_deletes_a_bite_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: bool) -> None:
    """However much is old, a pass deletes at most so many rows of a table; the next commits do the rest."""
    monkeypatch.setattr(_retention, "ROWS", 10)
    first = Process(tmp_path, "first", BEGAN, keep_days=30 if mine else 0)
    for number in range(45):
        first.now = BEGAN + number
        first.writer.write([turn(t_ns=first.now, turn=number)])
    first.writer.commit()
    if not mine:
        first.now = BEGAN + 29 * DAY
        first.write(first.now, 99)
        first.end()
    own = first if mine else Process(tmp_path, "own", BEGAN + 31 * DAY, keep_days=30)
    own.now = BEGAN + 31 * DAY
    seen = []
    for _ in range(7):
        own.now += 10**9  # far less than a minute: what is left is not waited for
        own.writer.commit()
        seen.append(len(next(iter(turns(tmp_path).values()), ())))
    assert seen == ([35, 25, 15, 5, 0, 0, 0] if mine else [36, 26, 16, 6, 1, 1, 1])
    own.end()


def test_a_pass_is_due_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is left to do, commits within the next minute do not look again."""
    looked = []
    finished = _retention.Keeper.finished
    monkeypatch.setattr(_retention.Keeper, "finished",
                        lambda self: looked.append(own.now) or finished(self))  # type: ignore[func-returns-value]
    own = Process(tmp_path, "own", BEGAN, keep_days=1)
    for second in range(0, 181, 10):
        own.write(BEGAN + second * 10**9, second)
    assert sorted(set(looked)) == [BEGAN, BEGAN + 60 * 10**9, BEGAN + 120 * 10**9, BEGAN + 180 * 10**9]
    own.end()


def test_freed_pages_are_given_back(tmp_path: Path) -> None:
    """The files shrink with what was deleted, the own one and those of ended processes."""
    ended = Process(tmp_path, "ended", BEGAN)
    own = Process(tmp_path, "own", BEGAN, keep_days=1)
    for one in (ended, own):
        for second in range(40):
            one.write(BEGAN + second * 10**9, *range(100))
    ended.write(BEGAN + DAY // 2, 1)
    ended.end()
    before = {name: sum(path.stat().st_size for path in tmp_path.glob(f"kvobs-{name}-*")) for name in ("ended", "own")}
    own.now = BEGAN + DAY + HOUR
    for _ in range(40):
        own.passes(1)
    own.end()
    after = {name: sum(path.stat().st_size for path in tmp_path.glob(f"kvobs-{name}-*")) for name in ("ended", "own")}
    assert turns(tmp_path) == {"ended": [1]}
    for name in ("ended", "own"):
        assert after[name] < before[name] / 3
        connection = sqlite3.connect(next(tmp_path.glob(f"kvobs-{name}-*.sqlite")))
        assert connection.execute("PRAGMA freelist_count").fetchone()[0] <= 8
        connection.close()


def test_what_is_damaged_or_newer_is_left_until_its_time(tmp_path: Path) -> None:
    """A store that cannot be opened costs no other its pruning, and goes whole by the time of its last write."""
    for name in ("damaged", "newer", "fine"):
        one = Process(tmp_path, name, BEGAN)
        one.write(BEGAN, 1)
        one.write(BEGAN + 2 * DAY, 2)
        one.end()
    next(tmp_path.glob("kvobs-damaged-*.sqlite")).write_bytes(b"no database" * 1_000)
    path = next(tmp_path.glob("kvobs-newer-*.sqlite"))
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    for name in ("damaged", "newer"):
        date(tmp_path, name, BEGAN + 2 * DAY)
    content = path.read_bytes()
    own = Process(tmp_path, "own", BEGAN + 2 * DAY + HOUR, keep_days=1)
    own.passes(6)
    assert processes(tmp_path) == {"damaged", "newer", "fine", "own"}
    assert path.read_bytes() == content
    connection = sqlite3.connect(next(tmp_path.glob("kvobs-fine-*.sqlite")))
    assert connection.execute("SELECT turn FROM turns").fetchall() == [(2,)]
    connection.close()
    own.now = BEGAN + 3 * DAY
    own.passes(1)
    assert processes(tmp_path) == {"own"}
    own.end()


@pytest.mark.parametrize("turns_per_hour", [60, 250])
def test_the_bound_on_the_size_holds_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               turns_per_hour: int) -> None:
    """With a small bound, at every commit and at every moment within a pass, and no record is dropped."""
    sizes: list[int] = []

    def measured(name: str) -> None:
        call = getattr(_file.StoreFile, name)

        def then_measure(self: _file.StoreFile, *arguments: object) -> object:
            found = call(self, *arguments)
            sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
            return found
        monkeypatch.setattr(_file.StoreFile, name, then_measure)

    for name in ("write", "expire", "vacuum", "delete"):
        measured(name)
    own = Process(tmp_path, "own", BEGAN, keep_days=1, max_bytes=2 * MIB)
    dropped = 0
    for hour in range(120):
        own.write(BEGAN + hour * HOUR, *range(turns_per_hour))
        own.passes(2)
        if hour % 20 == 10:
            dropped += own.writer.take_dropped()
            own.end()
            own = Process(tmp_path, f"own{hour}", own.now, keep_days=1, max_bytes=2 * MIB)
    assert max(sizes) <= 2 * MIB
    assert dropped + own.writer.take_dropped() == 0
    own.end()


def test_near_the_bound_a_finished_store_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting rows needs room for a log; where there is none, the whole store soon goes anyway. The room told is
    never more than the bound less what lies in the directory.
    """
    ended = Process(tmp_path, "ended", BEGAN)
    ended.write(BEGAN, 1)
    ended.write(BEGAN + 2 * DAY, 2)
    ended.end()
    own = Process(tmp_path, "own", BEGAN + 2 * DAY, keep_days=1)
    own.now = BEGAN + 2 * DAY + HOUR
    with monkeypatch.context() as full:
        full.setattr(_retention.Keeper, "spare_bytes", lambda _: 0)
        own.passes(3)
        assert turns(tmp_path) == {"ended": [1, 2]}
    own.passes(3)
    assert turns(tmp_path) == {"ended": [2]}
    spare = own.writer._keeper.spare_bytes()
    there = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 64 * MIB - there - 2 * MIB <= spare <= 64 * MIB - there
    own.end()


def test_it_says_how_much(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line of the log per pass that deleted something, and a counter."""
    old = Process(tmp_path, "old", BEGAN)
    old.write(BEGAN, 1)
    old.end()
    caplog.set_level(logging.INFO, "kvobs")
    runtime = Runtime(Config(store=tmp_path, prometheus=None, otlp="off", retention=3 * 86_400), sources=[])
    runtime.start()
    runtime.flush()
    runtime.stop()
    counted = {row.name: points for row, points in runtime.metrics.collect()}
    assert counted["kvobs.self.store.pruned"] == {("stores",): 1}
    assert sum("1 stores (" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("name", sorted({type(example).__name__ for example in EXAMPLES}))
def test_every_kind_of_record_expires(name: str, tmp_path: Path) -> None:
    """Nothing that is read by time stays beyond the retention, whatever it is."""
    own = Process(tmp_path, "own", BEGAN, keep_days=1)
    own.writer.write([example for example in EXAMPLES if type(example).__name__ == name])
    own.writer.commit()
    own.now = BEGAN + 40 * DAY
    own.passes(2)
    path = next(tmp_path.glob("*.sqlite"))
    own.end()
    connection = sqlite3.connect(path)
    for table in _retention.TIMED:
        left = connection.execute(f"SELECT count(*) FROM {table.name} WHERE wall_ns <= ?",
                                  (BEGAN + 39 * DAY,)).fetchone()
        assert left == (0,), table.name
    connection.close()
