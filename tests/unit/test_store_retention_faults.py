"""Retention where something is wrong: links, remains, clocks that are set, errors that pass, locks of others."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from kvobs.store import StoreReader, StoreWriter, _retention, _space
from tests.events import turn

MINUTE, HOUR, DAY, YEAR = 60 * 10**9, 3_600 * 10**9, 86_400 * 10**9, 365 * 86_400 * 10**9
BEGAN = 1_000 * DAY  # Unix nanoseconds
MIB = 1024**2


class Host:
    """A wall clock and a monotonic one, both in nanoseconds."""

    def __init__(self, wall: int) -> None:
        self.wall, self.monotonic = wall, 5 * HOUR

    def on(self, ns: int) -> None:
        """Time passes."""
        self.wall += ns
        self.monotonic += ns

    def writer(self, directory: Path, name: str, keep_days: int = 0) -> StoreWriter:
        return StoreWriter(directory, 64 * MIB, name, retention_s=keep_days * 86_400, clock=lambda: self.monotonic,
                           wall=lambda: self.wall)

    def write(self, writer: StoreWriter, number: int) -> None:
        writer.write([turn(t_ns=self.monotonic, turn=number)])
        writer.commit()

    def passes(self, writer: StoreWriter, number: int) -> None:
        for _ in range(number):
            self.on(MINUTE)
            writer.commit()


def date(directory: Path, name: str, wall_ns: int) -> None:
    for path in directory.glob(f"kvobs-{name}-*"):
        os.utime(path, ns=(wall_ns, wall_ns), follow_symlinks=False)


def ended(directory: Path, name: str, *walls: int) -> Path:
    """The store of an ended process that wrote a turn at each of these times."""
    host = Host(walls[0])
    writer = host.writer(directory, name)
    for number, wall in enumerate(walls):
        host.on(wall - host.wall)
        host.write(writer, number)
    writer.close()
    date(directory, name, walls[-1])
    return _space.store_path(directory, name, 1)


def turns(directory: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for stored in StoreReader(directory).turns():
        found.setdefault(stored.process, []).append(stored.record.turn)
    return found


def test_a_link_to_another_directorys_store_is_not_followed(tmp_path: Path) -> None:
    """The running process behind it keeps its rows and its files' times; when the link is old, only the link goes."""
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    other = Host(BEGAN)
    running = other.writer(there, "running")
    for _ in range(3):
        other.write(running, 1)
        other.on(4 * DAY)
    target, link = _space.store_path(there, "running", 1), _space.store_path(here, "running", 1)
    link.symlink_to(target)
    date(here, "running", BEGAN + 10 * DAY)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(there.iterdir())}
    host = Host(BEGAN + 10 * DAY + HOUR)
    own = host.writer(here, "own", keep_days=3)
    host.passes(own, 4)
    assert link.is_symlink()
    host.on(3 * DAY)
    host.passes(own, 1)
    assert not link.is_symlink()
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(there.iterdir())} == before
    own.close()
    running.close()


def test_a_log_without_its_database_makes_none(tmp_path: Path) -> None:
    """What somebody left behind is no store; it goes when it is old."""
    log = tmp_path / "kvobs-gone-000001.sqlite-wal"
    log.write_bytes(b"x" * 5_000)
    date(tmp_path, "gone", BEGAN)
    host = Host(BEGAN + HOUR)
    own = host.writer(tmp_path, "own", keep_days=1)
    host.passes(own, 3)
    assert [path.name for path in tmp_path.glob("kvobs-gone-*")] == [log.name]
    host.on(DAY)
    host.passes(own, 1)
    assert not list(tmp_path.glob("kvobs-gone-*"))
    own.close()


def test_a_clock_that_was_ahead_at_the_start_and_is_set_right_deletes_nothing_young(tmp_path: Path) -> None:
    """From then on it is what the clock says now that counts, and passes go on by it."""
    host = Host(BEGAN + YEAR)
    own = host.writer(tmp_path, "own", keep_days=3)
    host.write(own, 0)
    host.wall = BEGAN
    host.on(20 * 10**9)
    ended(tmp_path, "young", BEGAN - 4 * DAY, BEGAN - DAY)
    ended(tmp_path, "old", BEGAN - 5 * DAY, BEGAN - 4 * DAY)
    host.write(own, 1)
    host.passes(own, 3)
    assert turns(tmp_path) == {"young": [1], "own": [0, 1]}
    host.on(2 * DAY)
    host.passes(own, 1)
    assert turns(tmp_path) == {"own": [0, 1]}
    own.close()


def test_a_clock_that_was_behind_at_the_start_deletes_nothing_young(tmp_path: Path) -> None:
    """Neither before it is set right nor after."""
    host = Host(DAY)
    own = host.writer(tmp_path, "own", keep_days=3)
    host.write(own, 0)
    ended(tmp_path, "young", BEGAN)
    host.wall = BEGAN + HOUR
    host.passes(own, 3)
    assert turns(tmp_path) == {"young": [0], "own": [0]}
    own.close()


@pytest.mark.parametrize("error", [sqlite3.OperationalError("database is locked"), OSError("no such luck")])
def test_an_error_that_passes_is_tried_again_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           error: Exception) -> None:
    """Once the store can be used its old rows go, long before the whole of it would."""
    ended(tmp_path, "busy", BEGAN, BEGAN + 2 * DAY)
    host = Host(BEGAN + 2 * DAY + HOUR)
    own = host.writer(tmp_path, "own", keep_days=1)
    with monkeypatch.context() as busy:
        def refuse(*_: object) -> None:
            raise error
        busy.setattr(_retention, "expire_finished", refuse)
        host.passes(own, 3)
    assert turns(tmp_path) == {"busy": [0, 1]}
    host.passes(own, 2)
    assert turns(tmp_path) == {"busy": [1]}
    own.close()


def test_a_store_that_cannot_be_deleted_starves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However old it is: a pass stays a matter of once a minute, and the others' old rows go."""
    stuck = ended(tmp_path, "astuck", BEGAN)
    stuck.write_bytes(b"no database" * 1_000)
    date(tmp_path, "astuck", BEGAN)
    ended(tmp_path, "fine", BEGAN, BEGAN + 9 * DAY)
    delete, opened = _space.delete, []

    def refuse(store: Path) -> None:
        if store == stuck:
            raise PermissionError
        delete(store)
    expire = _retention.expire_finished

    def count(path: Path, cut: int, modified_ns: int) -> tuple[int, int | None]:
        opened.append(path.name)
        return expire(path, cut, modified_ns)
    monkeypatch.setattr(_space, "delete", refuse)
    monkeypatch.setattr(_retention, "expire_finished", count)
    host = Host(BEGAN + 9 * DAY + HOUR)
    own = host.writer(tmp_path, "own", keep_days=1)
    for _ in range(30):
        host.on(10**9)
        host.write(own, 7)
    assert sorted(opened) == ["kvobs-astuck-000001.sqlite", "kvobs-fine-000001.sqlite"]
    assert stuck.exists()
    connection = sqlite3.connect(_space.store_path(tmp_path, "fine", 1))
    assert connection.execute("SELECT turn FROM turns").fetchall() == [(1,)]
    connection.close()
    own.close()


def test_a_store_whose_lock_cannot_be_asked_counts_as_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another user's and may be in use; one without a lock has ended."""
    store = ended(tmp_path, "theirs", BEGAN)
    assert not _space.is_alive(store)
    _space.lock_path(store).touch()
    assert not _space.is_alive(store)
    opening = os.open

    def refuse(path: str | Path, *arguments: int) -> int:
        if Path(path) == _space.lock_path(store):
            raise PermissionError(13, "Permission denied", str(path))
        return opening(path, *arguments)
    monkeypatch.setattr(os, "open", refuse)
    assert _space.is_alive(store)
    host = Host(BEGAN + 9 * DAY)
    own = host.writer(tmp_path, "own", keep_days=1)
    host.write(own, 1)
    host.passes(own, 2)
    assert store.exists()
    own.close()
