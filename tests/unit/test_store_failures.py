"""A disk that refuses: the host goes on, what is lost is counted, and the writer recovers when the disk does."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvobs import model
from kvobs.store import StoreReader, StoreWriter, _space, _writer
from tests.events import ORIGIN, turn
from tests.support import run_python

BOUND = 512 * 1024**2


class Clock:
    """Nanoseconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def second(self) -> None:
        self.now += 1_000_000_001


@pytest.fixture
def clock() -> Clock:
    return Clock()


def writer_in(directory: Path, clock: Clock, process: str = "p") -> StoreWriter:
    return StoreWriter(directory, BOUND, process, clock=clock, wall=lambda: 10**18)


def kept(directory: Path) -> list[int]:
    return [stored.record.turn for stored in StoreReader(directory).turns()]


def test_a_directory_that_cannot_be_costs_only_counted_records(tmp_path: Path, clock: Clock,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    """Below a regular file nothing can be stored: it is said once, all is counted, and it works once it can."""
    directory = tmp_path / "file" / "store"
    directory.parent.write_text("not a directory")
    writer = writer_in(directory, clock)
    with caplog.at_level(logging.WARNING, "kvobs"):
        for number in range(5):
            writer.write([turn(turn=number), turn(turn=number)])
            writer.commit()
            clock.second()
    assert writer.take_dropped() == 10
    assert writer.take_dropped() == 0
    assert writer.size_bytes() == 0
    assert len(caplog.records) == 1
    directory.parent.unlink()
    writer.write([turn(turn=7)])
    writer.commit()
    writer.close()
    assert kept(directory) == [7]
    assert writer.take_dropped() == 0


def test_a_directory_that_vanishes_is_made_again(tmp_path: Path, clock: Clock) -> None:
    """What is written after the directory was removed is in a new store; nothing goes silently into a deleted file."""
    directory = tmp_path / "store"
    writer = writer_in(directory, clock)
    writer.write([turn(turn=1), model.Availability("cuda", False, "No device.")])
    writer.commit()
    shutil.rmtree(directory)
    writer.write([turn(turn=2)])
    writer.commit()
    assert kept(directory) == [2]
    assert [stored.record.subject for stored in StoreReader(directory).availability()] == ["cuda"]
    assert [process.process for process in StoreReader(directory).processes()] == ["p"]
    writer.close()
    assert writer.take_dropped() == 0


def test_a_locked_database_makes_records_wait_and_only_then_drop(tmp_path: Path, clock: Clock,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """While a tool holds the database, records wait up to the limit and the rest is counted; then the waiting come."""
    monkeypatch.setattr(_writer, "WAITING_RECORDS", 10)
    writer = writer_in(tmp_path, clock)
    writer.write([turn(turn=0)])
    writer.commit()
    tool = sqlite3.connect(next(tmp_path.glob("*.sqlite")), isolation_level=None)
    tool.execute("BEGIN IMMEDIATE")
    for number in range(1, 16):
        writer.write([turn(turn=number, t_ns=number)])
        writer.commit()
    tool.execute("ROLLBACK")
    tool.close()
    assert writer.take_dropped() == 5
    writer.commit()
    writer.write([turn(turn=99, t_ns=99)])
    writer.commit()
    assert sorted(kept(tmp_path)) == [*range(11), 99]
    writer.close()
    assert writer.take_dropped() == 0


def test_a_busy_directory_makes_a_commit_wait(tmp_path: Path, clock: Clock) -> None:
    """While another process commits, a commit returns and its records come with a later one."""
    writer = writer_in(tmp_path, clock)
    with _space.DirectoryLock(tmp_path).held(0):
        writer.write([turn(turn=3)])
        writer.commit()
        assert list(tmp_path.glob("*.sqlite")) == []
    writer.commit()
    assert kept(tmp_path) == [3]
    writer.close()
    assert writer.take_dropped() == 0


def test_a_record_that_cannot_be_stored_does_not_cost_the_others(tmp_path: Path, clock: Clock) -> None:
    """An integer beyond 64 bits is dropped and counted, text that is no Unicode is kept escaped, the rest as it is."""
    writer = writer_in(tmp_path, clock)
    writer.write([turn(turn=1), turn(turn=2, kv_bytes=2**70), turn(turn=3, session="a\ud800b"), turn(turn=4)])
    writer.write([object()])  # type: ignore[list-item]
    writer.commit()
    stored = StoreReader(tmp_path).turns()
    assert [found.record.turn for found in stored] == [1, 3, 4]
    assert stored[1].record.session == "a\\ud800b"
    assert writer.take_dropped() == 2
    writer.close()


def test_a_damaged_store_is_left_and_a_new_one_begun(tmp_path: Path, clock: Clock) -> None:
    """When SQLite cannot use the own store any more, the writer counts the loss and goes on in a new file."""
    writer = writer_in(tmp_path, clock)
    writer.write([turn(turn=1)])
    writer.commit()
    first = next(tmp_path.glob("*.sqlite"))
    tool = sqlite3.connect(first)
    tool.execute("DROP TABLE turns")
    tool.close()
    writer.write([turn(turn=2)])
    writer.commit()
    lost = writer.take_dropped()
    clock.second()
    writer.write([turn(turn=3)])
    writer.commit()
    writer.close()
    assert lost == 1
    assert sorted(path.name for path in tmp_path.glob("*.sqlite")) == [first.name, "kvobs-p-000002.sqlite"]
    assert kept(tmp_path / "kvobs-p-000002.sqlite") == [3]


def test_after_the_end_records_are_dropped_and_counted(tmp_path: Path, clock: Clock) -> None:
    """A closed writer stays closed, whatever is still handed to it; closing twice is harmless."""
    writer = writer_in(tmp_path, clock)
    writer.close()
    writer.write([turn()])
    writer.commit()
    writer.close()
    assert writer.take_dropped() == 1
    (process,) = StoreReader(tmp_path).processes()
    assert process.ended_wall_ns is not None
    assert not process.alive


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[None]:
    """A real file system of a given size at ``directory``."""
    directory.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)],
                          capture_output=True, text=True, check=False) if shutil.which("mount") else None
    if made is None or made.returncode:
        pytest.skip("A small file system cannot be mounted here: " + (made.stderr.strip() if made else "no mount."))
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_costs_counted_records_and_heals(tmp_path: Path, clock: Clock) -> None:
    """On a file system that is full nothing raises and losses are counted; with room again everything is stored."""
    disk = tmp_path / "disk"
    with small_disk(disk, "600k"):
        writer = writer_in(disk, clock)
        number = lost = 0
        while not lost and number < 100_000:
            writer.write([turn(turn=number + i, t_ns=number + i) for i in range(100)])
            number += 100
            writer.commit()
            lost = writer.take_dropped()
            clock.second()
        assert lost > 0
        assert kept(disk) == list(range(number - lost))
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        clock.second()
        writer.write([turn(turn=number, t_ns=number)])
        writer.commit()
        assert kept(disk) == [*range(number - lost), number]
        writer.close()
        assert writer.take_dropped() == 0


def test_a_disk_that_turns_read_only_costs_counted_records_and_heals(tmp_path: Path, clock: Clock) -> None:
    """A file system that becomes read-only under the writer is survived, and used again when it is writable."""
    disk = tmp_path / "disk"
    with small_disk(disk, "8m"):
        writer = writer_in(disk, clock)
        writer.write([turn(turn=1)])
        writer.commit()
        writer.close()
        writer = writer_in(disk, clock, "q")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        writer.write([turn(turn=2)])
        writer.commit()
        assert writer.take_dropped() == 1
        assert kept(disk) == [1]
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        clock.second()
        writer.write([turn(turn=3)])
        writer.commit()
        writer.close()
        assert kept(disk) == [1, 3]
        assert writer.take_dropped() == 0


def test_the_bound_is_kept_at_every_instant_as_the_kernel_sees_it(tmp_path: Path, clock: Clock,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    """On a file system as big as the bound, no write of two sharing writers ever meets a full disk."""
    disk = tmp_path / "disk"
    with small_disk(disk, f"{3 * 1024 + 64}k"), caplog.at_level(logging.WARNING, "kvobs"):
        writers = [StoreWriter(disk, 3 * 1024**2, name, clock=clock, wall=lambda: 10**18) for name in "ab"]
        for number in range(150):
            clock.second()
            for writer in writers[:1 if number < 50 else 2]:
                writer.write([turn(turn=number, t_ns=clock.now + i, session=f"{i}") for i in range(150)])
                writer.write([model.Migration(clock.now, ORIGIN, 1, "cpu", "meta", 1, 2, None)] * 20)
                writer.commit()
        assert [writer.take_dropped() for writer in writers] == [0, 0]
        assert caplog.records == []
        assert {stored.process for stored in StoreReader(disk).turns()} == {"a", "b"}
        for writer in writers:
            writer.close()


def test_a_limit_on_file_sizes_is_survived() -> None:
    """With RLIMIT_FSIZE in the way the host goes on and losses are counted; without it, everything is stored."""
    done = run_python("""
import resource, sys, tempfile
from pathlib import Path
from kvobs.store import StoreReader, StoreWriter
from tests.events import turn
now = [0]
with tempfile.TemporaryDirectory() as name:
    directory = Path(name)
    writer = StoreWriter(directory, 512 * 1024**2, "p", clock=lambda: now[0], wall=lambda: 10**18)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    number = lost = 0
    for _ in range(30):
        writer.write([turn(turn=number + i, t_ns=number + i) for i in range(100)])
        number += 100
        writer.commit()
        lost += writer.take_dropped()
        now[0] += 1_000_000_001
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    now[0] += 1_000_000_001
    writer.write([turn(turn=number, t_ns=number)])
    writer.commit()
    writer.close()
    stored = [found.record.turn for found in StoreReader(directory).turns()]
    assert lost > 0 and writer.take_dropped() == 0
    assert len(stored) == number - lost + 1 and stored[-1] == number, (len(stored), number, lost)
print("survived")
""")
    assert done.stdout == "survived\n", done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 300_000


def test_the_constructor_touches_nothing(tmp_path: Path) -> None:
    """Making a writer neither opens a file nor starts a thread: the drain thread's first commit does the work."""
    threads = threading.active_count()
    writer = StoreWriter(tmp_path / "store", BOUND, "p")
    assert os.listdir(tmp_path) == []
    assert threading.active_count() == threads
    writer.abandon()


def test_a_command_line_is_kept_without_its_values(tmp_path: Path) -> None:
    """Of a command line only the program and the names of options are stored: values may be prompts or keys."""
    words = _writer.process_words(["serve.py", "--prompt=secret", "-n", "3", "tell me a secret", "--verbose"])
    assert words == ["serve.py", "--prompt", "-n", "...", "...", "--verbose"]
