"""What kvobs recorded of an out-of-memory error, and which settings its what-if says would have helped."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvobs.lab.demo._observer import Observer


def flight(observer: Observer) -> tuple[dict[str, Any], str]:
    """Verdict and evidence of the first flight record, as said, and the sentence."""
    observer.record()
    record = observer.reader().flights()[0].record
    verdict = json.loads(record.snapshot)["verdict"]
    evidence = verdict["evidence"]
    return {"verdict": verdict["verdict"], "requested_bytes": record.requested_bytes,
            "free_bytes": evidence["sum_bytes"], "largest_free_bytes": evidence["largest_free_bytes"],
            "device": record.device}, verdict["sentence"]


def advice(capacity: int) -> str | None:
    """The settings under which what vgpu:0 recorded would have run without an error, the best of them; None: none.

    Modelled, by ``kvobs whatif --search`` over the snapshot of this moment.
    """
    import torch

    from kvobs.allocator.readers import read
    from kvobs.allocator.replay import replay
    from kvobs.allocator.search import compare_best
    from kvobs.allocator.whatif import case_of

    with tempfile.TemporaryDirectory(prefix="kvobs-scenario-") as folder:
        path = Path(folder) / "snapshot.pickle"
        torch.vgpu.memory._dump_snapshot(path)
        recording = read(path)
    device = recording.devices[0]
    case = case_of(recording, device, capacity)
    _, found = compare_best(case, recording, {}, replay=replay(device, case.settings))
    return None if found.best.figures.ooms else found.best.figures.settings


def first(observer: Observer, fails: Callable[[], bool], capacity: int) -> tuple[dict[str, Any], str]:
    """Run into the error with a recorded history; what kvobs said of it, with its advice, and in a sentence."""
    import torch

    torch.vgpu.memory._record_memory_history()
    said, sentence = flight(observer) if fails() else ({}, "Nothing failed.")
    said["remedy"] = advice(capacity)
    torch.vgpu.memory._record_memory_history(None)
    return said, sentence


def again(change: str, fails: Callable[[], bool]) -> str:
    """Whether the same fails or succeeds with other settings, once what is free was given back."""
    import gc

    import torch

    from kvobs.virtual import change_settings

    gc.collect()
    torch.accelerator.empty_cache()
    before = change_settings(change)
    try:
        return "fails" if fails() else "succeeds"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def errors(observer: Observer) -> int:
    """How many allocations failed for good, by kvobs's counter."""
    observer.record()
    return sum(int(point.value) for point in observer.points("kvobs.allocator.out_of_memory"))
