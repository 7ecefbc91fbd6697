"""Stores as Parquet, one file per table, for pandas, DuckDB and the like.

Streams in batches; every file is complete when its name appears, and a failed export leaves nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

from kvobs.store._reader import NAMED, StoreReader
from kvobs.store._schema import TABLES, StoreError

_BATCH_ROWS = 20_000


def export_parquet(path: Path | str, out_dir: Path | str) -> list[Path]:
    """Write every table of the stores at ``path`` to ``out_dir`` and return the files.

    The column ``process`` comes first and tells the stores of a directory apart; an existing file of the same
    name is replaced. The series number of ``points`` is per store: its metric and attributes stand beside it.

    Raises:
        StoreError: a store or ``out_dir`` cannot be used, or pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise StoreError("Parquet needs pyarrow, which is not installed; install it with: "
                         'pip install "kvobs[lab]".') from None
    reader, out = StoreReader(path), Path(out_dir)
    reader.refuse_problems()
    done: list[tuple[Path, Path]] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for table in TABLES:
            if table == "series":
                continue
            columns = _columns(table)
            schema = pyarrow.schema([(name, _types(pyarrow)[kind]) for name, kind in columns])
            raw = out / f".{table}.parquet.{os.getpid()}.new"
            done.append((raw, out / f"{table}.parquet"))
            with parquet.ParquetWriter(raw, schema) as writer:
                rows = reader.rows(table, [name for name, _ in columns[1:]])
                while batch := list(itertools.islice(rows, _BATCH_ROWS)):
                    arrays = [pyarrow.array(values, type=field.type)
                              for values, field in zip(zip(*batch, strict=True), schema, strict=True)]
                    writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
        for raw, final in done:
            raw.replace(final)
    except OSError as error:
        raise StoreError(f"The export to {out} failed: {error}.") from None
    finally:
        for raw, _ in done:
            with contextlib.suppress(OSError):
                raw.unlink(missing_ok=True)
    return [final for _, final in done]


def _types(pyarrow: Any) -> dict[str, Any]:
    return {"INTEGER": pyarrow.int64(), "REAL": pyarrow.float64(), "TEXT": pyarrow.string(),
            "BLOB": pyarrow.binary()}


def _columns(table: str) -> list[tuple[str, str]]:
    own = [column for column in TABLES[table].columns if (table, column[0]) != ("process", "process")]
    named = [(name, "TEXT") for name in NAMED] if table == "points" else []
    return [("process", "TEXT"), *own, *named]

