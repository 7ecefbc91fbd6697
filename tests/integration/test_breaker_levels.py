"""The experiment on the virtual GPU in its quick form: what the breaker promises under rising load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvobs.lab.breaker._results import Results
from tests.vgpu import ROOT, needs_vgpu

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")
TRACE = ROOT.parent / "shared" / "data" / "serving" / "AzureLLMInferenceTrace_conv.csv"
pytestmark = [pytest.mark.torch, needs_vgpu()]


@pytest.mark.skipif(not TRACE.exists(), reason=f"There is no {TRACE}.")
def test_act_finishes_what_it_admits_and_observe_changes_no_token(tmp_path: Path) -> None:
    """Where the baseline runs out of memory, act does not; observe answers to the token as the baseline does."""
    out = tmp_path / "levels.json"
    done = subprocess.run([sys.executable, "-m", "kvobs.lab.breaker_levels", "--quick", "--trace", str(TRACE), "--out",
                           str(out)], capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    results = msgspec.json.decode(out.read_bytes(), type=Results)
    baseline, observe, act = results.runs
    assert [run.arm for run in results.runs] == ["baseline", "observe", "act"]
    assert baseline.errors == baseline.admitted - baseline.finished > 0
    assert (observe.answers, observe.errors, observe.tokens) == (baseline.answers, baseline.errors, baseline.tokens)
    assert (act.errors, act.unfinished, act.finished) == (0, 0, act.admitted)
    assert act.asked == act.admitted + act.shed
    assert act.highest > 0
    assert observe.highest > 0  # it decided, and did nothing
    assert done.stdout.count("\n") == 5
    shown = subprocess.run([sys.executable, "-m", "kvobs.lab.breaker_levels", "--show", str(out)], capture_output=True,
                           text=True, timeout=60, check=True, cwd=ROOT)
    assert shown.stdout == done.stdout


def test_a_trace_that_is_not_there_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Exit code 2 and one sentence that names the file."""
    done = subprocess.run([sys.executable, "-m", "kvobs.lab.breaker_levels", "--trace", str(tmp_path / "no.csv")],
                          capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no.csv" in done.stderr
