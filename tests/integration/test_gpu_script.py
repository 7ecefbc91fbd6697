"""The script of tests/gpu as a whole: on the virtual GPU, in rehearsal, and where there is no device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.gpu.record import every_check
from tests.support import ROOT, child_environment, run_child

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
virtual = pytest.importorskip("kvobs.virtual")

pytestmark = pytest.mark.torch
SCRIPT = ROOT / "tests" / "gpu" / "record.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a CUDA device here.")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    """Where torch sees no CUDA device, the script ends with 2 and one sentence, and no part is begun."""
    ended = run_child([sys.executable, SCRIPT, "--out", tmp_path], env=child_environment())
    assert ended.returncode == 2, ended.stderr
    assert "sees no device of kind cuda." in ended.stdout.splitlines()[-1]
    assert "begins" not in ended.stdout


@pytest.mark.slow
def test_its_parts_run_on_the_virtual_gpu(tmp_path: Path) -> None:
    """Streams and out-of-memory errors of a tiny model: each fact is replayed by both engines, every comparison holds.

    The parts with CUDA graphs are skipped, with the reason.
    """
    if (reason := virtual.why_not()) is not None:
        pytest.skip(reason)
    parts = ("streams", "oom", "graph-plain")
    ended = run_child([sys.executable, SCRIPT, "--out", tmp_path, "--kind", "vgpu", "--tiny", "--patience", "6",
                       *(word for part in parts for word in ("--only", part))], env=child_environment(), timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["parts"]
    assert told["graph-plain"]["skipped"] == "Devices of kind vgpu capture no graphs."
    for part in ("streams", "oom"):
        assert [one for one in every_check(told[part]) if not one["ok"]] == []
        scores = [score for engine in told[part]["judged"]["scores"].values() for score in engine]
        assert all(score[fact][0] == score[fact][1] > 0 for score in scores
                   for fact in ("addresses", "device_allocs", "device_frees"))
        assert 0 < (tmp_path / f"trace-{part}.pickle.gz").stat().st_size < 1 << 20
    assert {oom["label"]: oom["verdict"] for oom in told["oom"]["judged"]["ooms"][-2:]} == {
        "fragments": "FRAGMENTED", "bytes": "CAPACITY"}
