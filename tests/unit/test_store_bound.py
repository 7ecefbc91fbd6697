"""The size bound: all files of the directory, at every commit, whoever writes."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvobs import catalog, model
from kvobs.store import StoreReader, StoreWriter, _file, _space
from kvobs.store._batch import Batch
from kvobs.store._schema import PAGE_BYTES
from tests.events import EXAMPLES, ORIGIN, step, turn

MIB = 1024**2
POINTS = catalog.BY_NAME["kvobs.kv.written"]


def total(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


class Load:
    """Records whose times advance by a quarter of a second per commit, as an engine would make them."""

    def __init__(self, directory: Path, max_bytes: int, process: str) -> None:
        self.now = 0
        self.turns = 0
        self._random = random.Random(process)
        self.writer = StoreWriter(directory, max_bytes, process, clock=lambda: self.now, wall=lambda: 10**18)

    def commit(self, turns: int, others: int) -> None:
        self.now += 250_000_000
        self.writer.write([turn(t_ns=self.now + i, turn=self.turns + i, session=f"s{self._random.randrange(999)}")
                           for i in range(turns)])
        self.turns += turns
        self.writer.write([step(t_ns=self.now, cache_id=i) for i in range(others)])
        self.writer.write([model.Migration(self.now, ORIGIN, 1, "cpu", "meta", 1, 2, None)] * others)
        self.writer.write_points([(POINTS, {(f"m{i}", "cpu", "x"): i for i in range(others)})])
        self.writer.commit()


def turns_of(directory: Path, process: str) -> list[int]:
    return [stored.record.turn for stored in StoreReader(directory).turns() if stored.process == process]


def intact(directory: Path) -> bool:
    for path in directory.glob("*.sqlite"):
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        answer = connection.execute("PRAGMA integrity_check").fetchall()
        connection.close()
        if answer != [("ok",)]:
            return False
    return True


@settings(max_examples=6, phases=[Phase.reuse, Phase.generate])  # shrinking writes hundreds of stores
@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 150), st.integers(0, 40)), min_size=40, max_size=80))
def test_the_bound_holds_after_every_commit(tmp_path_factory: pytest.TempPathFactory, mib: int,
                                            loads: list[tuple[int, int]]) -> None:
    """Whatever is written, all files together stay within the bound, nothing is dropped, the newest turns stay."""
    directory = tmp_path_factory.mktemp("store")
    load = Load(directory, mib * MIB, "p")
    for turns, others in loads:
        load.commit(turns, others)
        assert total(directory) <= mib * MIB
    kept = turns_of(directory, "p")
    assert kept == list(range(load.turns - len(kept), load.turns))
    load.writer.close()
    assert load.writer.take_dropped() == 0
    assert intact(directory)


def test_the_oldest_rows_go_first_and_only_when_they_must(tmp_path: Path) -> None:
    """A full store keeps a contiguous newest part that fills more than half of the bound."""
    load = Load(tmp_path, 2 * MIB, "p")
    for _ in range(200):
        load.commit(50, 5)
    kept = turns_of(tmp_path, "p")
    assert 0 < len(kept) < load.turns
    assert kept == list(range(load.turns - len(kept), load.turns))
    assert total(tmp_path) > MIB
    load.writer.close()


def test_several_writers_share_the_bound_and_spare_each_other(tmp_path: Path) -> None:
    """Processes that join later get their share, nobody's live store is deleted, and the sum stays in bound."""
    loads: list[Load] = []
    for process in ("a", "b", "c"):
        loads.append(Load(tmp_path, 4 * MIB, process))
        for _ in range(60):
            for load in loads:
                load.commit(50, 10)
                assert total(tmp_path) <= 4 * MIB
    sizes = [load.writer.size_bytes() for load in loads]
    for load in loads:
        kept = turns_of(tmp_path, load.writer._process)
        assert kept == list(range(load.turns - len(kept), load.turns))
        assert load.writer.take_dropped() == 0
    assert max(sizes) <= 4 * MIB // 3 + MIB // 2
    assert min(sizes) >= 4 * MIB // 6
    for load in loads:
        load.writer.close()
    assert intact(tmp_path)


def test_finished_stores_go_before_rows_of_live_ones(tmp_path: Path) -> None:
    """Room is made by deleting the stores of ended processes, oldest first, before any own row is deleted."""
    for process in ("old", "new"):
        ended = Load(tmp_path, 2 * MIB, process)
        for _ in range(8):
            ended.commit(150, 0)
        ended.writer.close()
    load = Load(tmp_path, 2 * MIB, "live")
    held: list[set[str]] = []
    while not held or "live" not in held[-1] or 0 in turns_of(tmp_path, "live"):
        load.commit(300, 0)
        assert total(tmp_path) <= 2 * MIB
        held.append({store.process for store in _space.survey(tmp_path)})
    assert [held[0], held[-1]] == [{"old", "new", "live"}, {"live"}]
    assert {"new", "live"} in held
    assert {"old", "live"} not in held
    load.writer.close()


def test_without_room_for_a_store_telemetry_is_dropped_and_the_bound_holds(tmp_path: Path) -> None:
    """Where live stores leave no room, a newcomer drops and counts instead of exceeding the bound."""
    loads = [Load(tmp_path, MIB, f"p{i}") for i in range(6)]
    for _ in range(20):
        for load in loads:
            load.commit(10, 2)
            assert total(tmp_path) <= MIB
    assert any(load.writer.take_dropped() for load in loads)
    for load in loads:
        load.writer.close()


def test_a_new_store_vacuums_incrementally_and_is_as_small_as_assumed(tmp_path: Path) -> None:
    """auto_vacuum is INCREMENTAL from creation, and an empty store fits into the room that is made for it."""
    writer = StoreWriter(tmp_path, MIB, "p")
    writer.commit()
    path = next(tmp_path.glob("*.sqlite"))
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA page_size").fetchone() == (PAGE_BYTES,)
    connection.close()
    assert path.stat().st_size + _space.shm_bytes(0) <= _file.NEW_STORE_BYTES
    writer.close()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["kvobs-p-000001.sqlite", "kvobs.lock"]


@settings(max_examples=8, phases=[Phase.reuse, Phase.generate])
@given(st.integers(0, 5_000), st.integers(10, 200), st.lists(st.integers(0, 100), min_size=1, max_size=3),
       st.text(max_size=300))
def test_no_transaction_dirties_more_pages_than_its_estimate(tmp_path_factory: pytest.TempPathFactory, before: int,
                                                            pages: int, sizes: list[int], text: str) -> None:
    """The log grows by at most the estimated pages of each piece: the bound relies on it."""
    file = _file.create(tmp_path_factory.mktemp("store"), "p", 1)
    assert file is not None
    batch = Batch(lambda t: t, lambda: 0, 10**6)
    for i in range(before):
        batch.add(turn(t_ns=i))
    for piece in batch.pieces(5_000):
        file.write(piece)
    clock = before
    for size in sizes:
        batch.clear()
        for i in range(size):
            batch.add(turn(t_ns=clock + i, session=text))
            batch.add(step(t_ns=(clock + i) * 10**9, cache_id=i))
            for event in EXAMPLES:
                batch.add(event)
        batch.add_points(clock, [(POINTS, {(f"{text}{i}", "cpu", "x"): i for i in range(size)})])
        clock += size
        for piece in batch.pieces(pages):
            file.checkpoint()
            bound = piece.pages + file.naming_pages(piece)
            file.write(piece)
            assert file.log_bytes() <= 32 + bound * _file.FRAME_BYTES
    file.close()


def test_a_plan_leaves_an_eighth_to_others_beyond_the_equal_share() -> None:
    """A lone process may use everything; one of several gives room back down to its equal share, never below."""
    path, shm = Path("/x/kvobs-b-000001.sqlite"), _space.shm_bytes(0)

    def plan(other_bytes: int, alive: bool) -> tuple[int, int]:
        """Room now, and what database and log may take together in the long run."""
        found = _space.plan(80 * MIB, "a", [_space.Store(path, "b", 1, db_bytes=other_bytes, alive=alive)], None)
        return found.room, found.database + found.log_hard * 3 // 2

    assert plan(0, False) == (80 * MIB - shm, 80 * MIB - shm)
    assert plan(50 * MIB, False) == (30 * MIB - shm, 30 * MIB - shm)
    assert plan(MIB, True) == (79 * MIB - shm, 69 * MIB - shm)
    assert plan(35 * MIB, True) == (45 * MIB - shm, 40 * MIB)
    assert plan(50 * MIB, True) == (30 * MIB - shm, 30 * MIB - shm)
    own = _space.store_path(Path("/x"), "a", 1)
    assert _space.plan(80 * MIB, "a", [_space.Store(own, "a", 1, db_bytes=MIB, alive=True)], own).room == 80 * MIB
