"""The Parquet export against the SQL content, and what it leaves behind when it fails."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import pytest

from kvobs import catalog
from kvobs.metrics import Histogram
from kvobs.store import StoreError, StoreWriter, _export, export_parquet
from kvobs.store._schema import TABLES
from tests.events import EXAMPLES, step, turn


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    directory = tmp_path / "stores"
    counter, histogram = catalog.BY_NAME["kvobs.kv.written"], catalog.BY_NAME["kvobs.alloc.latency"]
    state = Histogram(histogram.buckets)
    state.observe(0.01, None)
    for process in ("a", "b"):
        now = [0]
        writer = StoreWriter(directory, 64 * 1024**2, process, clock=lambda now=now: now[0], wall=lambda: 10**18)
        for second in range(30):
            now[0] = second * 10**9
            writer.write([*EXAMPLES, turn(turn=second, t_ns=now[0], ttft_ns=None), step(t_ns=now[0])])
            writer.write_points([(counter, {("m", process, "x"): second + 0.5}), (histogram, {("cpu",): state})])
            writer.commit()
        writer.close()
        assert writer.take_dropped() == 0
    return directory


def sql(directory: Path, statement: str) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for path in directory.glob("*.sqlite"):
        connection = sqlite3.connect(path)
        process = connection.execute("SELECT process FROM process").fetchone()
        rows += [process + row for row in connection.execute(statement)]
        connection.close()
    return sorted(rows, key=repr)


def test_parquet_holds_what_the_stores_hold(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back by pyarrow, each file has every row of its table in every store, batch by batch, types included."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed.")
    monkeypatch.setattr(_export, "_BATCH_ROWS", 7)
    files = export_parquet(stores, tmp_path / "out")
    assert {path.stem for path in files} == set(TABLES) - {"series"}
    assert sorted((tmp_path / "out").iterdir()) == sorted(files)
    for path in files:
        table = parquet.read_table(path)
        found = sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)
        names = [name for name in table.schema.names if name != "process"]
        source = "points JOIN series ON series.id = points.series" if path.stem == "points" else path.stem
        assert found == sql(stores, f"SELECT {', '.join(names)} FROM {source}")
        assert len(found) > 0
        times = table.column("wall_ns").to_pylist() if TABLES[path.stem].timed else []
        assert times == sorted(times)


def test_empty_tables_are_empty_files_with_their_columns(tmp_path: Path) -> None:
    """A store without turns still gives a file of turns, so that queries over it work."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed.")
    writer = StoreWriter(tmp_path, 64 * 1024**2, "p")
    writer.close()
    export_parquet(tmp_path, tmp_path / "out")
    table = parquet.read_table(tmp_path / "out" / "turns.parquet")
    assert table.num_rows == 0
    assert table.schema.names == ["process", *TABLES["turns"].names]


def test_without_pyarrow_the_sentence_names_the_extra(stores: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing pyarrow is one sentence with the line that installs it, and nothing is made."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(StoreError, match=r'install it with: pip install "kvobs\[lab\]"\.$'):
        export_parquet(stores, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_export_leaves_nothing_half_written(stores: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """When a later table fails, the earlier ones are not left either, and files of an older export stay whole."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed.")
    out = tmp_path / "out"
    out.mkdir()
    (out / "turns.parquet").write_text("older")
    columns = _export._columns

    def failing(table: str) -> list[tuple[str, str]]:
        return [("process", "TEXT"), ("nothing", "TEXT")] if table == "points" else columns(table)

    monkeypatch.setattr(_export, "_columns", failing)
    with pytest.raises(StoreError, match="no column 'nothing'"):
        export_parquet(stores, out)
    assert [path.name for path in out.iterdir()] == ["turns.parquet"]
    assert (out / "turns.parquet").read_text() == "older"


def test_an_export_leaves_no_store_out_in_silence(stores: Path, tmp_path: Path) -> None:
    """With an unreadable store in the directory the export is refused and names it."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed.")
    bad = stores / "kvobs-bad-000001.sqlite"
    bad.write_text("no database " * 1000)
    with pytest.raises(StoreError, match=f"{bad} cannot be read"):
        export_parquet(stores, tmp_path / "out")


def test_an_output_that_is_a_file_is_refused(stores: Path, tmp_path: Path) -> None:
    """The sentence says where the export failed and why."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed.")
    (tmp_path / "out").write_text("")
    with pytest.raises(StoreError, match=r"^The export to .*out failed: .*File exists.*\.$"):
        export_parquet(stores, tmp_path / "out")
