"""Recorded histories of real GPUs, made again by ``torch.empty`` and ``del`` on a virtual GPU of the same size."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from kvobs.allocator.readers import read
from kvobs.allocator.replay import replay
from kvobs.allocator.replayed import Score
from tests.support import ROOT
from tests.vgpu import needs_vgpu, on_vgpu

pytestmark = needs_vgpu()
FOLDER = ROOT.parent / "shared" / "data" / "snapshots"
# Both are complete from an empty allocator on: allocations, frees, segments taken from the device.
RECORDED = {"decomfl": (7946, 7549, 61), "silmont_mem": (36, 26, 9)}


def recorded(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"The public snapshots are not at {FOLDER.relative_to(ROOT.parent)} beside the project.")
    found: dict[str, Any] = pickle.loads(path.read_bytes())
    return found


def made_again(events: list[tuple[str, int, int]], dump: str | None) -> object:
    """Run the program behind a history; how often the address, a segment and the bytes allocated were as recorded."""
    from array import array

    import torch

    from kvobs.virtual import _setup

    library = _setup._library_of_process
    assert library is not None
    lowest = min(address for action, address, _ in events if action == "segment_alloc")
    places = array("Q", [address - lowest for action, address, _ in events if action == "segment_alloc"])
    library.check(library.plan(0, places.buffer_info()[0], len(places)))
    shift = library.base(0) - lowest
    torch.vgpu.memory._record_memory_history(stacks="python")
    live: dict[int, torch.Tensor] = {}
    counts = dict.fromkeys(("allocations", "as recorded", "frees"), 0)
    for action, address, size in events:
        if action == "alloc":
            live[address] = torch.empty(size, dtype=torch.uint8, device="vgpu")
            counts["allocations"] += 1
            counts["as recorded"] += live[address].data_ptr() - shift == address
        elif action == "free_requested":
            counts["frees"] += 1
            del live[address]
    if dump is not None:
        torch.vgpu.memory._dump_snapshot(dump)
    state = torch.vgpu.memory._snapshot()
    return counts | {
        "segments": [[one["address"] - shift, one["total_size"], one["segment_type"], one["allocated_size"],
                      [[block["address"] - shift, block["size"], block["requested_size"], block["state"]]
                       for block in one["blocks"]]] for one in state["segments"]],
        "events": [[event["action"], event["addr"] - shift, event["size"]] for event in state["device_traces"][0]
                   if event["action"] not in ("snapshot", "oom")]}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_program_gets_the_addresses_of_the_gpu(name: str, tmp_path: Path) -> None:
    """Given the recorded order of segments, every address, the whole history and the last state come out as recorded;
    and a twin that replays the virtual GPU's own history agrees with all of it.
    """
    real = recorded(name)
    trace, = (trace for trace in real["device_traces"] if trace)
    events = [(event["action"], event["addr"], event["size"]) for event in trace if event["action"] != "snapshot"]
    file = tmp_path / "own.pickle"
    found = on_vgpu(made_again, devices=("8GiB",), events=events, dump=str(file))
    allocations, frees, segments = RECORDED[name]
    assert (found["allocations"], found["as recorded"], found["frees"]) == (allocations, allocations, frees)
    assert [tuple(event) for event in found["events"]] == events
    assert found["segments"] == [
        [one["address"], one["total_size"], one["segment_type"], one["allocated_size"],
         [[block["address"], block["size"], block["requested_size"], block["state"]] for block in one["blocks"]]]
        for one in sorted(real["segments"], key=lambda one: one["address"])]
    recording = read(file)
    assert recording.settings is not None
    own = replay(recording.devices[0], recording.settings)
    assert (own.addresses, own.device_allocs, own.usable) == (
        Score(allocations, allocations), Score(segments, segments), True)


def test_without_the_recorded_order_some_addresses_differ() -> None:
    """The hook matters: where segments lie elsewhere, ties between equal blocks are broken elsewhere too."""
    trace, = (trace for trace in recorded("decomfl")["device_traces"] if trace)
    found = on_vgpu(unplanned, devices=("8GiB",), events=[(one["action"], one["addr"], one["size"]) for one in trace])
    assert found["allocations"] == RECORDED["decomfl"][0]
    assert found["blocks of another segment"] > 0


def unplanned(events: list[tuple[str, int, int]]) -> object:
    """The same program with segments wherever they come: how many blocks lie in another segment than recorded."""
    import bisect

    import torch

    starts = sorted(address for action, address, _ in events if action == "segment_alloc")
    torch.vgpu.memory._record_memory_history()
    live: dict[int, torch.Tensor] = {}
    places: list[tuple[int, int]] = []
    for action, address, size in events:
        if action == "alloc":
            live[address] = torch.empty(size, dtype=torch.uint8, device="vgpu")
            places.append((address, live[address].data_ptr()))
        elif action == "free_requested":
            del live[address]
    own = [event["addr"] for event in torch.vgpu.memory._snapshot()["device_traces"][0]
           if event["action"] == "segment_alloc"]
    order = [address for action, address, _ in events if action == "segment_alloc"]
    by_start = {start: number for number, start in enumerate(order)}
    mine, sorted_own = {start: number for number, start in enumerate(own)}, sorted(own)
    differ = sum(by_start[starts[bisect.bisect_right(starts, recorded_at) - 1]]
                 != mine[sorted_own[bisect.bisect_right(sorted_own, at) - 1]] for recorded_at, at in places)
    return {"allocations": len(places), "blocks of another segment": differ}
