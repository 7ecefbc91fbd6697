"""The store and real processes: killed, forked, stuck readers, several at once."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvobs.store import StoreReader, StoreWriter, _space
from tests.events import turn
from tests.support import ROOT, child_environment, run_python, wait_until

MIB = 1024**2

WRITES_UNTIL_KILLED = """
import sys
from pathlib import Path
from kvobs.store import StoreWriter
from tests.events import step, turn
writer = StoreWriter(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], clock=lambda: 0, wall=lambda: 10**18)
number = 0
while True:
    writer.write([turn(turn=number + i, t_ns=number + i) for i in range(20)])
    writer.write([step(t_ns=number * 10**6, cache_id=i) for i in range(20)])
    number += 20
    writer.commit()
    print(number, writer.take_dropped(), flush=True)
"""

READS_UNTIL_TOLD = """
import sqlite3, sys
connection = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True, isolation_level=None)
connection.execute("BEGIN")
before = connection.execute("SELECT count(*) FROM turns").fetchone()[0]
print(before, flush=True)
sys.stdin.readline()
print(connection.execute("SELECT count(*) FROM turns").fetchone()[0] == before)
"""


@contextmanager
def child(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True, env=child_environment(), cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def assert_intact(directory: Path) -> None:
    for path in directory.glob("*.sqlite"):
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()


def total(directory: Path) -> int:
    """The bytes of all files at an instant at which nobody commits."""
    with _space.DirectoryLock(directory).held(30):
        return sum(path.stat().st_size for path in directory.iterdir())


def test_a_killed_process_leaves_everything_it_committed(tmp_path: Path) -> None:
    """After kill -9 in the midst of writing, every committed turn is there, and the file is whole."""
    with child(WRITES_UNTIL_KILLED, tmp_path, 512 * MIB, "victim") as victim:
        committed = 0
        while committed < 2_000:
            committed = int(line(victim).split()[0])
        assert StoreReader(tmp_path).processes()[0].alive
        victim.send_signal(signal.SIGKILL)
        assert victim.stdout is not None
        committed = max([committed, *(int(rest.split()[0]) for rest in victim.stdout.read().splitlines(True)
                                      if rest.endswith("\n"))])
        assert victim.wait(30) == -signal.SIGKILL
    reader = StoreReader(tmp_path)
    found = [stored.record.turn for stored in reader.turns()]
    assert found[:committed] == list(range(committed))
    assert len(found) % 20 == 0
    (process,) = reader.processes()
    assert not process.alive
    assert process.ended_wall_ns is None
    assert sum(stored.record.steps for stored in reader.steps()) in (committed, committed + 20)
    assert_intact(tmp_path)


def test_a_killed_process_is_finished_to_the_others(tmp_path: Path) -> None:
    """The store of a killed process makes room for the living once the bound is reached."""
    with child(WRITES_UNTIL_KILLED, tmp_path, 2 * MIB, "victim") as victim:
        while int(line(victim).split()[0]) < 2_000:
            pass
    writer = StoreWriter(tmp_path, 2 * MIB, "heir", clock=lambda: 0, wall=lambda: 10**18)
    number = 0
    while any(store.process == "victim" for store in _space.survey(tmp_path)):
        writer.write([turn(turn=number + i, t_ns=number + i) for i in range(200)])
        number += 200
        writer.commit()
        assert total(tmp_path) <= 2 * MIB
        assert number < 100_000
    assert writer.take_dropped() == 0
    writer.close()


def test_processes_that_write_at_once_keep_the_bound_between_them(tmp_path: Path) -> None:
    """Three real processes that write as fast as they can stay within one bound, and nobody's store is deleted."""
    with ExitStack() as stack:
        children = [stack.enter_context(child(WRITES_UNTIL_KILLED, tmp_path, 4 * MIB, name)) for name in "abc"]
        sizes = []
        for _ in range(150):
            for process in children:
                assert line(process)
            sizes.append(total(tmp_path))
        assert max(sizes) <= 4 * MIB
        assert max(sizes) > MIB
        assert {process.process for process in StoreReader(tmp_path).processes() if process.alive} == {"a", "b", "c"}
    assert_intact(tmp_path)


def test_a_stuck_reader_makes_the_writer_begin_a_successor(tmp_path: Path) -> None:
    """While a reader keeps the log from being emptied, the bound holds, nothing is lost, the newest is readable."""
    writer = StoreWriter(tmp_path, 4 * MIB, "w", clock=lambda: 0, wall=lambda: 10**18)
    writer.write([turn(turn=0)])
    writer.commit()
    first = next(tmp_path.glob("*.sqlite"))
    with child(READS_UNTIL_TOLD, first) as stuck:
        assert line(stuck) == "1"
        number, stores = 1, set()
        while len(stores) < 2 or first.exists():
            writer.write([turn(turn=number + i, t_ns=number + i, session=f"{i}") for i in range(100)])
            number += 100
            writer.commit()
            assert total(tmp_path) <= 4 * MIB
            stores |= {path.name for path in tmp_path.glob("*.sqlite")}
            assert number < 100_000
        assert writer.take_dropped() == 0
        found = [stored.record.turn for stored in StoreReader(tmp_path).turns()]
        assert found == list(range(number - len(found), number))
        assert len(found) > 100
        assert StoreReader(tmp_path).processes()[0].process == "w"
        stuck.communicate("go on\n", timeout=30)
        assert stuck.returncode == 0
    writer.close()
    assert writer.take_dropped() == 0
    assert_intact(tmp_path)


def test_a_reader_sees_what_is_committed_while_it_is_written(tmp_path: Path) -> None:
    """Every commit of a live process is readable at once, in full, from another process."""
    with child(WRITES_UNTIL_KILLED, tmp_path, 64 * MIB, "w") as process:
        for _ in range(20):
            committed = int(line(process).split()[0])
            found = [row[1] for row in StoreReader(tmp_path).rows("turns", ["turn"])]
            assert found == list(range(len(found)))
            assert len(found) >= committed


def test_a_forked_child_has_its_own_store(tmp_path: Path) -> None:
    """After a fork the child's records are in its own store and the parent's, also what waited, in the parent's."""
    done = run_python("""
import os, sys
from pathlib import Path
from kvobs.store import StoreWriter
from tests.events import turn
directory = Path(sys.argv[1])
writer = StoreWriter(directory, 64 * 1024**2, "parent")
writer.write([turn(turn=1, t_ns=1)])
writer.commit()
writer.write([turn(turn=2, t_ns=2)])
child = os.fork()
if child == 0:
    writer.abandon()
    own = StoreWriter(directory, 64 * 1024**2, "child")
    own.write([turn(turn=10)])
    own.commit()
    own.close()
    writer.write([turn(turn=66)])
    writer.commit()
    writer.close()
    del writer
    sys.exit(0)  # with all the destructors of an orderly end
assert os.waitpid(child, 0)[1] == 0
writer.write([turn(turn=3, t_ns=3)])
writer.commit()
child = os.fork()
if child == 0:
    os._exit(0)  # a child that knows nothing of kvobs
os.waitpid(child, 0)
writer.write([turn(turn=4, t_ns=4)])
writer.close()
print(writer.take_dropped())
""", str(tmp_path))
    assert done.stdout == "0\n", done.stderr
    turns = StoreReader(tmp_path).turns()
    assert [stored.record.turn for stored in turns if stored.process == "parent"] == [1, 2, 3, 4]
    assert [stored.record.turn for stored in turns if stored.process == "child"] == [10]
    assert not any(process.alive for process in StoreReader(tmp_path).processes())
    assert_intact(tmp_path)


def test_a_lock_ends_with_its_writer_even_if_a_child_lives_on(tmp_path: Path) -> None:
    """A child that abandoned the parent's store does not keep it alive after the parent was killed."""
    code = """
import os, sys
from pathlib import Path
from kvobs.store import StoreWriter
writer = StoreWriter(Path(sys.argv[1]), 64 * 1024**2, "parent")
writer.commit()
if os.fork() == 0:
    writer.abandon()
    print("abandoned", flush=True)
    sys.stdin.readline()
    os._exit(0)
sys.stdin.readline()
"""
    with child(code, tmp_path) as parent:
        assert line(parent) == "abandoned"
        assert [store.alive for store in _space.survey(tmp_path)] == [True]
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: [store.alive for store in _space.survey(tmp_path)] == [False], 30, "the store's end")


def test_forking_while_another_thread_commits_never_hangs_the_child(tmp_path: Path) -> None:
    """Forty children forked while a thread commits all write a store of their own and end."""
    done = run_python("""
import os, sys, threading
from pathlib import Path
from kvobs.store import StoreWriter
from tests.events import turn
directory = Path(sys.argv[1])
writer, stop = StoreWriter(directory, 64 * 1024**2, "parent"), threading.Event()
def commit():
    number = 0
    while not stop.is_set():
        writer.write([turn(turn=number + i) for i in range(50)])
        number += 50
        writer.commit()
thread = threading.Thread(target=commit)
thread.start()
failed = 0
for index in range(40):
    child = os.fork()
    if child == 0:
        writer.abandon()
        own = StoreWriter(directory, 64 * 1024**2, f"child{index}")
        own.write([turn()])
        own.close()
        os._exit(own.take_dropped())
    failed += os.waitpid(child, 0)[1] != 0
stop.set()
thread.join()
writer.close()
print(failed, writer.take_dropped())
""", str(tmp_path))
    assert done.stdout == "0 0\n", (done.stdout, done.stderr)
    by_process: dict[str, int] = {}
    for stored in StoreReader(tmp_path).turns():
        by_process[stored.process] = by_process.get(stored.process, 0) + 1
    assert {f"child{index}": 1 for index in range(40)}.items() <= by_process.items()
    assert by_process.keys() - {f"child{index}" for index in range(40)} == {"parent"}
