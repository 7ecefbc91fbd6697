"""Files and recordings of a small server that runs out of memory, with the frames of real libraries."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

from kvobs.allocator.readers import read
from kvobs.allocator.recorder import RecordingAllocator
from kvobs.allocator.recording import Recording
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.twin import OutOfMemory

Frame = tuple[str, int, str]
WEIGHTS: Frame = ("site-packages/torch/nn/modules/module.py", 1357, "convert")
KV: Frame = ("site-packages/transformers/cache_utils.py", 119, "update")
ACTIVATION: Frame = ("site-packages/torch/nn/modules/linear.py", 134, "forward")
STEPS = 6


def dump(path: Path, function: str = "answer", settings: Settings | None = None) -> Path:
    """10 MiB of weights, a KV cache that grows by copying (a tensor of n MiB in step n), 3 MiB that stay pending, and a
    request for 256 MiB of which the device has 64. ``function`` is the user's, of most of these.
    """
    clock = itertools.count(1_700_000_000_000_000, 1_000)
    made = RecordingAllocator(settings, 64 * MIB, now=lambda: next(clock), space=1 << 40)
    made.alloc(10 * MIB, frames=(WEIGHTS, ("app/serve.py", 10, "load")))
    held = None
    for step in range(1, STEPS + 1):
        grown = made.alloc(step * MIB, frames=(KV, ("app/serve.py", 20, function)))
        if held is not None:
            made.free(held)
        held = grown
    passing = made.alloc(3 * MIB, frames=(ACTIVATION, ("app/serve.py", 20, function)))
    made.record_stream(passing, 7)
    made.free(passing)
    with contextlib.suppress(OutOfMemory):
        made.alloc(256 * MIB, frames=(ACTIVATION, ("app/serve.py", 20, function)))
    made.dump(path)
    return path


def recorded(path: Path, function: str = "answer", settings: Settings | None = None) -> Recording:
    """What is read from such a file."""
    return read(dump(path, function, settings))
