"""Memory maps in the store: the newest of each device, whatever was written before, and none in older stores."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs import model
from kvobs.store import StoreReader, StoreWriter
from kvobs.store._schema import TABLES

MIB = 1 << 20
WALL = 1_700_000_000_000_000_000
counts = st.integers(0, 2**62)
words = st.text(max_size=20)
maps = st.builds(
    model.MemoryMap, st.integers(0, 3_600 * 10**9), st.sampled_from(["cuda:0", "cuda:1", "vgpu:0"]), counts, counts,
    st.booleans(), counts, counts, st.none() | counts, st.none() | counts, st.none() | counts, words,
    st.lists(st.tuples(words, words, st.none() | counts), max_size=4).map(tuple), st.binary(max_size=200))


def a_map(t_ns: int, packed: bytes, device: str = "cuda:0") -> model.MemoryMap:
    return model.MemoryMap(t_ns, device, 1, 1, True, 1, 1, None, None, None, "", (), packed)


@settings(max_examples=40)
@given(st.lists(st.lists(maps, max_size=4), max_size=4))
def test_the_map_written_last_of_each_device_comes_back(parts: list[list[model.MemoryMap]]) -> None:
    """Of all maps of a device the one written last is there, equal in every field; no other row is kept."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        writer = StoreWriter(Path(directory), 64 * MIB, "p", clock=lambda: 0, wall=lambda: WALL)
        for part in parts:
            writer.write(part)
            writer.commit()
        writer.close()
        assert writer.take_dropped() == 0
        last = {one.device: one for part in parts for one in part}
        found = StoreReader(directory).maps()
        assert {stored.record.device: stored.record for stored in found} == last
        assert all(stored.wall_ns == WALL + stored.record.t_ns for stored in found)
        assert len(list(StoreReader(directory).rows("maps"))) == len(last)


def test_maps_do_not_fill_the_store(tmp_path: Path) -> None:
    """A thousand large maps take the room of one, and the bound holds in a small store, with nothing lost."""
    writer = StoreWriter(tmp_path, 4 * MIB, "p")
    noise = random.Random(1)
    largest = 0
    for second in range(300):
        writer.write([a_map(second, noise.randbytes(60_000))])
        writer.commit()
        largest = max(largest, sum(path.stat().st_size for path in tmp_path.iterdir()))
    writer.close()
    assert largest <= 4 * MIB
    assert writer.take_dropped() == 0
    (stored,) = StoreReader(tmp_path).maps()
    assert stored.record.t_ns == 299
    (path,) = tmp_path.glob("*.sqlite")
    assert path.stat().st_size < MIB // 2


def test_a_store_without_the_table_has_no_maps(tmp_path: Path) -> None:
    """A store of schema version 2 is read as before, beside one that has maps; of maps it has none."""
    writer = StoreWriter(tmp_path, 64 * MIB, "old")
    writer.write([model.CacheGone(1, 5)])
    writer.close()
    (path,) = tmp_path.glob("*.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE maps")
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    assert StoreReader(tmp_path).maps() == []
    assert [stored.record for stored in StoreReader(tmp_path).events()] == [model.CacheGone(1, 5)]
    writer = StoreWriter(tmp_path, 64 * MIB, "new")
    writer.write([a_map(7, b"x")])
    writer.close()
    assert [(stored.process, stored.record.t_ns) for stored in StoreReader(tmp_path).maps()] == [("new", 7)]


def test_the_newest_of_several_stores_of_a_process_counts(tmp_path: Path) -> None:
    """Where a process began a successor, the map of the later time is told, once."""
    for clock, packed in ((5, b"late"), (2, b"early")):
        writer = StoreWriter(tmp_path, 64 * MIB, "p", clock=lambda: 0, wall=lambda: WALL)
        writer.write([a_map(clock, packed)])
        writer.close()
    assert [stored.record.packed for stored in StoreReader(tmp_path).maps()] == [b"late"]
    assert len(list(tmp_path.glob("*.sqlite"))) == 2
    assert TABLES["maps"].key == ("device",)
