"""``kvobs export`` against a store that a real process wrote."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import child_environment, run_child

_KVOBS = [sys.executable, "-m", "kvobs"]


def test_a_written_store_becomes_parquet(tmp_path: Path) -> None:
    """The files that export prints exist, can be read by pyarrow, and name the process that wrote the store."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed.")
    settings = child_environment(KVOBS_STORE=str(tmp_path / "store"), KVOBS_PROMETHEUS="off")
    code = "import kvobs\nwith kvobs.instrument() as handle:\n    print(handle.runtime.process_id)"
    wrote = run_child([sys.executable, "-c", code], env=settings)
    for named in ([], [tmp_path / "store"], ["--store", tmp_path / "store"]):
        out = tmp_path / f"out{len(named)}"
        done = run_child([*_KVOBS, "export", *named, "--parquet", out], env=settings)
        assert done.returncode == 0, done.stderr
        assert {Path(line) for line in done.stdout.splitlines()} == set(out.iterdir())
        assert parquet.read_table(out / "process.parquet").column("process").to_pylist() == [wrote.stdout.strip()]


def test_a_store_is_named_once() -> None:
    """A store as an argument and by --store is one sentence and exit 2, whichever was meant."""
    done = run_child([*_KVOBS, "export", "one", "--store", "two", "--parquet", "out"], env=child_environment())
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", "kvobs: The store is named twice: as an argument and by --store.\n")


@pytest.mark.parametrize("kind", ["missing", "not a store", "empty directory"])
def test_what_is_no_store_is_refused(kind: str, tmp_path: Path) -> None:
    """A missing store, a file that is none and a directory without any: one sentence, exit 2, nothing written."""
    named = tmp_path / "named"
    if kind == "not a store":
        named.write_text("text")
    elif kind == "empty directory":
        named.mkdir()
    done = run_child([*_KVOBS, "export", named, "--parquet", tmp_path / "out"], env=child_environment())
    assert done.returncode == 2
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert str(named) in done.stderr
    assert not list(tmp_path.glob("out/*"))
