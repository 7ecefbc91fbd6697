"""Real snapshots from public repositories: counts against a walk of a few lines that shares nothing with the reader."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvobs.allocator.readers import read
from kvobs.allocator.recording import ACTIONS
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING
from tests.support import ROOT

FOLDER = ROOT.parent / "shared" / "data" / "snapshots"
FILES = sorted(FOLDER.glob("*.pickle"))
STATES = {ALLOCATED: "active_allocated", PENDING: "active_pending_free", INACTIVE: "inactive"}

pytestmark = pytest.mark.skipif(not FILES, reason=f"There are no snapshots in {FOLDER}.")


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        raise AssertionError(f"{module}.{name}")


def plain(path: Path) -> Any:
    with path.open("rb") as file:
        return _Plain(file).load()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_real_snapshot_reads_as_a_plain_walk_counts(path: Path) -> None:
    """Segments, blocks by state, bytes, events by action with their sums, and every stack are those of the document."""
    document, found = plain(path), read(path)
    traces = {index: trace for index, trace in enumerate(document["device_traces"]) if trace}
    assert {device.device for device in found.devices} == {s["device"] for s in document["segments"]} | set(traces)
    for device in found.devices:
        segments = [segment for segment in document["segments"] if segment["device"] == device.device]
        blocks = [block for segment in segments for block in segment["blocks"]]
        assert len(device.state) == len(segments)
        assert sum(segment.size for segment in device.state) == sum(segment["total_size"] for segment in segments)
        mine = [block for segment in device.state for block in segment.blocks]
        assert Counter(STATES[block.state] for block in mine) == Counter(block["state"] for block in blocks)
        assert sum(block.size for block in mine) == sum(block["size"] for block in blocks)
        assert sum(segment.small for segment in device.state) == sum(s["segment_type"] == "small" for s in segments)
        trace = traces.get(device.device, [])
        events = device.events
        assert [ACTIONS[action] for action in events.action] == [event["action"] for event in trace]
        assert list(events.size) == [event["size"] for event in trace]
        assert list(events.address) == [event.get("addr", event.get("device_free")) for event in trace]
        assert [[(name, line) for _, line, name in found.stacks.of(stack)] for stack in events.stack] == [
            [(frame["name"], frame["line"]) for frame in event.get("frames", ())] for event in trace]


def test_every_real_file_but_the_synthetic_one_is_without_contradiction() -> None:
    """What real allocators wrote gives no note but that a history or times are missing."""
    told = {path.stem: [note for note in read(path).notes if "no history" not in note and "no time" not in note]
            for path in FILES if path.stem != "mosaic_output"}
    assert {name: notes for name, notes in told.items() if notes} == {}


def test_the_synthetic_file_is_called_inconsistent() -> None:
    """mosaic_output.pickle: its blocks do not fill its segments, addresses are random, sums and frees contradict."""
    path = FOLDER / "mosaic_output.pickle"
    if not path.exists():
        pytest.skip(f"{path} is not there.")
    document, found = plain(path), read(path)
    missing = sum(segment["total_size"] - sum(block["size"] for block in segment["blocks"])
                  for segment in document["segments"])
    notes = " ".join(found.notes)
    assert f"5 segments are not filled by their blocks, {missing:,} bytes belong to no block" in notes
    assert "1,040 events have an address that is no multiple of 512" in notes
    assert "520 frees were completed without having been requested" in notes
    assert "520 allocs lie in no segment" in notes
    assert "5 segments have an allocated_size that their blocks contradict" in notes
