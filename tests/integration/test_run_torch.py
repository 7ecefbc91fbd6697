"""Plain PyTorch below ``kvobs run``: memory is observed, also without transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvobs.store import StoreReader
from tests.support import ROOT, child_environment, run_child

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
pytestmark = pytest.mark.torch

CODE = """
import sys, torch
assert "transformers" not in sys.modules
block = torch.ones(64 * 2**20)
print(int(open("/proc/self/statm").read().split()[1]) * 4096)
"""


def test_plain_torch_has_memory_and_reasons(tmp_path: Path) -> None:
    """The process's memory, heap and machine are in the store; what only an accelerator has is absent with a reason."""
    done = run_child([sys.executable, "-m", "kvobs", "run", "--store", tmp_path / "store", "--", sys.executable, "-c",
                      CODE], cwd=ROOT, env=child_environment(KVOBS_PROMETHEUS="off"))
    assert done.returncode == 0, done.stderr
    reader = StoreReader(tmp_path / "store")
    resident = [point.value for point in reader.points("process.memory.usage")]
    assert max(resident) == pytest.approx(int(done.stdout), rel=0.2)
    mapped = [point.value for point in reader.points("kvobs.heap.usage") if point.attributes["state"] == "mapped"]
    assert max(mapped) >= 256 * 2**20
    facts = {fact.record.subject: fact.record for fact in reader.availability()}
    assert facts["heap"].available
    assert not facts["transformers"].available
    assert not facts["nvml"].available or facts["torch"].available
    assert all(fact.available or fact.reason for fact in facts.values())
