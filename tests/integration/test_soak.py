"""The soak in short: the long one is a make target."""

from __future__ import annotations

import json
import sys

from tests.support import ROOT, child_environment, run_child
from tests.vgpu import needs_vgpu


@needs_vgpu()
def test_sessions_on_two_devices_add_up() -> None:
    """After 300 steps of sessions that begin, end and move, state, statistics, metrics and tensors still agree."""
    ran = run_child([sys.executable, "-m", "tests.soak", "--steps", "300", "--seed", "2"],
                    env=child_environment(OMP_NUM_THREADS="1"), cwd=ROOT, timeout=300)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert (told["steps"], told["checks"]) == (300, 3)
    assert min(told["sessions"], told["moved"]) > 0
