"""The summary on real public snapshots (torch 2.0 to 2.9) against a count that shares nothing with it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from kvobs.sources._torch_segments import summary
from tests.support import ROOT

FOLDER = ROOT.parent / "shared" / "data" / "snapshots"
# The one of the folder that no GPU made contradicts itself: its blocks do not fill their segments.
SNAPSHOTS = sorted(path for path in FOLDER.glob("*.pickle") if path.name != "mosaic_output.pickle")


class NoGlobals(pickle.Unpickler):
    """Data only: any class or function named in the file is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"The snapshot asks for {module}.{name}.")


def segments_of(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        found = NoGlobals(file).load()
    segments: list[dict[str, Any]] = found["segments"] if isinstance(found, dict) else found
    return segments


@pytest.mark.parametrize("path", SNAPSHOTS or [pytest.param(None, marks=pytest.mark.skip(
    reason=f"The public snapshots are not at {FOLDER.relative_to(ROOT.parent)} beside the project."))],
    ids=lambda path: path.stem if path else "absent")
def test_a_real_snapshot_is_summed_up(path: Path) -> None:
    """Sums equal the allocator's own per-segment ledger, blocks fill their segments, and the text is small."""
    segments = segments_of(path)
    text = summary(segments)
    assert len(text) <= 48_000
    told = json.loads(text)
    totals = told["totals"]
    assert told["omitted"] == 0
    assert totals["segments"] == len(segments)
    assert totals["reserved"] == sum(segment["total_size"] for segment in segments)
    # allocated_size and active_size are kept by torch itself, block by block.
    assert totals["allocated"] == sum(segment["allocated_size"] for segment in segments)
    assert totals["active_pending"] == sum(segment["active_size"] - segment["allocated_size"] for segment in segments)
    assert totals["allocated"] + totals["active_pending"] + totals["free"] == totals["reserved"]
    free = sorted((block["size"] for segment in segments for block in segment["blocks"]
                   if block["state"] == "inactive"), reverse=True)
    assert sorted((size for group in told["groups"] for size in group["largest_free"]), reverse=True)[:10] == free[:10]
    assert sum(row[1] for group in told["groups"] for row in group["free_histogram"]) == len(free)
    assert sum(row[2] for group in told["groups"] for row in group["free_histogram"]) == totals["free"]
