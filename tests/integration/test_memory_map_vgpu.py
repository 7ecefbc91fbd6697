"""A memory map of a real torch process on the virtual GPU, from a look to the store."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvobs.allocator.memory_map import sums, unpack
from kvobs.store import StoreReader
from tests.support import ROOT, run_child, run_python

pytestmark = pytest.mark.torch

COMPILED_S = 600  # the first time, on a busy machine
CODE = """
import json, sys
from pathlib import Path
import kvobs.virtual
import torch
kvobs.virtual.setup(["256MiB", "256MiB"])
from kvobs import runtime
from kvobs.config import Config
from kvobs.store import touch
made = runtime.Runtime(Config(store=Path(sys.argv[1]), prometheus=None, otlp="off"))
made.start()
kept = [torch.empty(size, dtype=torch.uint8, device=device) for device in ("vgpu:0", "vgpu:1")
        for size in (100, 700_000, 3 << 20, 30 << 20)]
del kept[1], kept[4]
touch(Path(sys.argv[1]))
made.tick(sample=True)
stats = {f"vgpu:{index}": torch.vgpu.memory_stats(index) for index in range(2)}
made.stop()
print(json.dumps({device: [found[f"{name}.all.current"] for name in (
    "reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes")] for device, found in stats.items()}))
"""


def test_maps_of_the_virtual_gpu_equal_torchs_own_statistics(tmp_path: Path) -> None:
    """Per device the map's sums are what torch's memory_stats said while the process ran."""
    asked = run_child([sys.executable, "-c", "from kvobs.virtual import why_not; print(why_not() or '')"], cwd=ROOT,
                      timeout=COMPILED_S)
    if asked.stdout.strip():
        pytest.skip(asked.stdout.strip())
    assert asked.returncode == 0, asked.stderr
    done = run_python(CODE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    found = {stored.record.device: sums(unpack(stored.record.packed)) for stored in StoreReader(tmp_path).maps()}
    assert {device: [total.reserved, total.allocated, total.active, total.requested]
            for device, total in found.items()} == told
    assert all(values[1] > 30 << 20 for values in told.values())
