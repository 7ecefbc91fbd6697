"""Histories and snapshots of virtual devices: what is kept for whom, torch's own tools, threads, forks and exits."""

from __future__ import annotations

import base64
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, child_environment, run_child
from tests.vgpu import needs_vgpu, on_vgpu

pytestmark = needs_vgpu()
MIB = 1 << 20
# A snapshot that torch wrote on a GPU, with the keys of today.
REAL = ROOT.parent / "shared" / "data" / "snapshots" / "bcrafton.pickle"


def small_program(dump: str | None = None) -> object:
    """Two streams, a private pool, a pending block, memory given back, an error; with Python stacks."""
    import contextlib

    import torch

    mib = 1 << 20

    def weights() -> list[torch.Tensor]:
        return [torch.empty(size * mib, dtype=torch.uint8, device="vgpu") for size in (3, 30, 1)]

    def activation(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="vgpu:0")

    torch.vgpu.memory._record_memory_history(stacks="python")
    kept = weights()
    other = torch.Stream(device="vgpu")
    with other:
        passing = activation(5 * mib)
    passing.record_stream(torch.vgpu.current_stream(0))
    torch.vgpu.hold(torch.vgpu.current_stream(0))
    pool = torch.vgpu.MemPool()
    with torch.vgpu.use_mem_pool(pool):
        graph = activation(2 * mib)
    with torch.vgpu.device(1):
        second = torch.empty(7, device="vgpu:1")
    for _ in range(4):
        activation(25 * mib)
    torch.accelerator.empty_cache()
    del passing
    with contextlib.suppress(torch.OutOfMemoryError):
        activation(1 << 40)
    if dump is not None:
        torch.vgpu.memory._dump_snapshot(dump)
    told = torch.vgpu.memory._snapshot()
    return {"snapshot": told, "stats": [dict(torch.vgpu.memory_stats(index)) for index in range(2)],
            "alive": len(kept) + (graph is not None) + (second is not None)}


def keys(snapshot: dict[str, Any]) -> dict[str, set[str]]:
    """Every key, by where it is."""
    events = [event for trace in snapshot["device_traces"] for event in trace if event["action"] != "oom"]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    frames = [frame for one in (*events, *blocks) for frame in one["frames"]]
    return {"snapshot": set(snapshot), **{name: set().union(*rows) for name, rows in (
        ("segment", snapshot["segments"]), ("block", blocks), ("event", events), ("frame", frames))}}


def test_the_schema_is_torchs(tmp_path: Path) -> None:
    """Segments, blocks, events and frames have exactly the keys that torch writes on a GPU; an event tells its pool
    too, as newer ones do, and an error what was free in place of an address.
    """
    if not REAL.exists():
        pytest.skip(f"The public snapshots are not at {REAL.parent.relative_to(ROOT.parent)} beside the project.")
    found = on_vgpu(small_program, devices=("200MiB", "100MiB"))["snapshot"]
    wanted = keys(pickle.loads(REAL.read_bytes()))
    assert keys(found) == wanted | {"event": wanted["event"] | {"pool_id"}}
    error, = (event for event in found["device_traces"][0] if event["action"] == "oom")
    assert set(error) == wanted["event"] - {"addr"} | {"device_free", "pool_id"}


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    """``torch.cuda._memory_viz`` sums the same bytes as the allocator, names the functions that asked, and makes the
    pages of its plots with all of the snapshot in them.
    """
    from torch.cuda import _memory_viz

    file = tmp_path / "own.pickle"
    found = on_vgpu(small_program, devices=("200MiB", "100MiB"), dump=str(file))
    snapshot = pickle.loads(file.read_bytes())
    reserved = sum(stats["reserved_bytes.all.current"] for stats in found["stats"])
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}" in _memory_viz.segsum(snapshot)
    flames = _memory_viz.memory(snapshot, format_flamegraph=lambda lines: lines)
    assert "weights" in flames
    assert "activation" in flames
    blocks = [block for one in snapshot["segments"] for block in one["blocks"] if block["state"] == "active_allocated"]
    weights = sum(int(line.rsplit(" ", 1)[1]) for line in flames.splitlines() if "weights" in line)
    assert weights == sum(block["size"] for block in blocks if block["frames"][1]["name"] == "weights") == 34 * MIB
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert base64.b64encode(pickle.dumps(snapshot)[:-3]).decode().rstrip("=")[:-3] in plot(snapshot)
    told = _memory_viz.trace(snapshot)
    assert (told.count("cudaMalloc("), told.count("cudaFree(")) == (7, 2)
    assert "raise OutOfMemoryError # 1.0TiB requested, 128.0MiB free" in told  # 200 less 20, 30, 2 and 20
    assert found["alive"] == 5


def levels() -> object:
    """Who is named by the events of an allocation and its free, and by the block, at each level of recording."""
    import sys

    import torch

    def make() -> torch.Tensor:
        return torch.empty(1 << 20, dtype=torch.uint8, device="vgpu")

    def drop(held: list[torch.Tensor]) -> None:
        held.clear()

    def name(frames: list[dict[str, str]]) -> str:
        return next((one["name"] for one in frames if one["name"] in ("make", "drop")), "")

    told: dict[str, list[object]] = {}
    for enabled, context in (("all", None), ("all", "state"), ("all", "alloc"), ("all", "all"), ("state", "all")):
        torch.vgpu.memory._record_memory_history(enabled, context, "python", clear_history=True)
        kept, held = make(), [make()]
        drop(held)
        snapshot = torch.vgpu.memory._snapshot()
        trace = snapshot["device_traces"][0]
        told[f"{enabled} {context}"] = [
            sorted({name(event["frames"]) for event in trace if event["action"] == "alloc"}),
            sorted({name(event["frames"]) for event in trace if event["action"] == "free_requested"}),
            sorted({name(block["frames"]) for segment in snapshot["segments"] for block in segment["blocks"]
                    if block["state"] == "active_allocated" and block["address"] == kept.data_ptr()})]
        assert torch.vgpu.is_history_enabled()
        torch.vgpu.memory._record_memory_history(None)
        assert not torch.vgpu.is_history_enabled()
        make()
        assert torch.vgpu.memory._snapshot()["device_traces"] == [[], []]
        kept = None
        torch.accelerator.empty_cache()
    told["compiler imported"] = ["torch._inductor"] * ("torch._inductor" in sys.modules)
    own = torch._C._profiler.gather_traceback(python=True, script=False, cpp=False)
    told["torch's own"] = [one["name"] for one in torch._C._profiler.symbolize_tracebacks([own])[0]]
    return told


def test_stacks_are_kept_for_what_was_asked() -> None:
    """As PyTorch's levels have it: for live blocks, for allocations too (their frees tell the same stack), for frees.
    To tell the names, torch's compiler is not imported, which takes seconds in torch's own snapshots.
    """
    found = on_vgpu(levels)
    assert found["all None"] == [[""], [""], [""]]
    assert found["all state"] == [[""], [""], ["make"]]
    assert found["all alloc"] == [["make"], ["make"], ["make"]]
    assert found["all all"] == [["make"], ["drop"], ["make"]]
    assert not found["compiler imported"]
    assert found["torch's own"][0] == "levels"  # torch gathers its stacks as before
    assert found["state all"][2] == ["make"]


def rings() -> object:
    """The last events of a long history, in a ring, and which devices have one."""
    import torch

    def work(index: int) -> None:
        for size in range(1, 40):
            torch.empty(size * 100_000, dtype=torch.uint8, device=f"vgpu:{index}")

    def trace(index: int) -> list[list[object]]:
        events = torch.vgpu.memory._snapshot()["device_traces"][index]
        return [[event["action"], event["addr"], event["size"]] for event in events if event["action"] != "snapshot"]

    told = []
    for most in (1_000_000, 7, 1):
        torch.vgpu.memory._record_memory_history(max_entries=most, clear_history=True)
        work(0)
        told.append(trace(0))
        torch.accelerator.empty_cache()
    torch.vgpu.memory._record_memory_history(None)
    torch.vgpu.memory._record_memory_history(device=1)
    work(0)
    work(1)
    alone = [len(trace(0)), len(trace(1)) > 0]
    torch.vgpu.memory._record_memory_history(max_entries=9, device=1)
    return {"full": told[0], "seven": told[1], "one": told[2], "alone": alone, "shortened": len(trace(1))}


def test_a_ring_keeps_the_last_events_of_its_device() -> None:
    """Of ``max_entries`` events those that came last are kept, in their order; a device that is not recorded has none;
    a ring made smaller forgets the oldest.
    """
    found = on_vgpu(rings)
    assert len(found["full"]) > 100
    assert found["seven"] == found["full"][-7:]
    assert found["one"] == found["full"][-1:]
    assert found["alone"] == [0, True]
    assert found["shortened"] <= 9


def crowd(seconds: float) -> object:
    """Threads allocate and free on two devices while others take snapshots, change the history and fork."""
    import gc
    import os
    import random
    import threading
    import time

    import torch

    end = time.monotonic() + seconds
    counts = dict.fromkeys(("allocations", "snapshots", "changes", "forks"), 0)
    faults: list[str] = []

    def guarded(work: object) -> threading.Thread:
        def run() -> None:
            try:
                while time.monotonic() < end:
                    work()  # type: ignore[operator]
            except BaseException as error:
                faults.append(repr(error))
        return threading.Thread(target=run)

    def allocate() -> None:
        draw, held = random.Random(threading.get_ident()), []
        for _ in range(200):
            try:
                size, device = draw.randrange(1, 3 << 20), f"vgpu:{draw.randrange(2)}"
                held.append(torch.empty(size, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                held.clear()
            if len(held) > 20:
                del held[draw.randrange(len(held))]
        counts["allocations"] += 200

    def look() -> None:
        for segment in torch.vgpu.memory._snapshot()["segments"]:
            assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        counts["snapshots"] += 1

    def change() -> None:
        torch.vgpu.memory._record_memory_history(random.choice(["all", "all", "state", None]), "all", "python",
                                                 random.choice([10, 5_000]))
        gc.collect()
        counts["changes"] += 1

    def fork() -> None:
        child = os.fork()
        if not child:
            try:
                held = [torch.empty(1 << 10, dtype=torch.uint8, device="vgpu") for _ in range(3)]
                torch.vgpu.memory._snapshot()
                held.clear()
            except BaseException as error:
                os.write(2, repr(error).encode())
                os._exit(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            faults.append(f"a child ended with {status}")
        counts["forks"] += 1

    threads = [guarded(work) for work in (allocate, allocate, allocate, look, change, fork)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    from tests.vgpu_player import conserved
    for index in range(2):
        faults += conserved(dict(torch.vgpu.memory_stats(index)), torch.vgpu.memory_snapshot(), index)
    return {"counts": counts, "faults": faults, "left": [torch.vgpu.memory_allocated(index) for index in range(2)]}


def test_threads_forks_and_histories_at_once() -> None:
    """Nobody waits for ever, nothing fails, the sums hold afterwards, and all memory is free again."""
    found = on_vgpu(crowd, devices=("256MiB", "64MiB"), seconds=8.0, timeout=240.0)
    assert found["faults"] == []
    assert found["left"] == [0, 0]
    assert all(found["counts"].values()), found["counts"]


def short_lived(rounds: int) -> object:
    """Code that ran once, and allocated: how much of it is alive while the history has it, and after."""
    import gc
    import weakref

    import torch

    torch.vgpu.memory._record_memory_history(stacks="python", max_entries=10)
    codes = []
    for number in range(rounds):
        space: dict[str, object] = {"torch": torch}
        exec(f"def passing_{number}():\n torch.empty(1000, device='vgpu')\n", space)
        function = space.pop(f"passing_{number}")
        codes.append(weakref.ref(function.__code__))  # type: ignore[attr-defined]
        function()  # type: ignore[operator]
        del function, space
    gc.collect()

    def flush() -> None:
        torch._C._profiler.gather_traceback(python=True, script=False, cpp=False)  # frees what was let go

    flush()
    meanwhile = sum(code() is not None for code in codes)
    torch.vgpu.memory._record_memory_history(None)
    torch.accelerator.empty_cache()
    flush()
    gc.collect()
    return {"meanwhile": meanwhile, "after": sum(code() is not None for code in codes)}


def test_code_that_allocated_is_let_go() -> None:
    """A ring keeps the code of its own events alive and no more; without a history none is."""
    found = on_vgpu(short_lived, rounds=300)
    assert 0 < found["meanwhile"] <= 11
    assert found["after"] == 0


ALIVE = """
import threading
import kvobs.virtual
kvobs.virtual.setup(["64MiB"])
import torch
torch.vgpu.memory._record_memory_history(stacks="python")
kept = [torch.empty(1000, device="vgpu") for _ in range(5)]
local = threading.local()
local.kept = torch.empty(1000, device="vgpu")

class Cycle:
    def __init__(self):
        self.me, self.held = self, torch.empty(1000, device="vgpu")

    def __del__(self):
        self.held = None

cycle = Cycle()
threading.Thread(target=lambda: threading.Event().wait(), daemon=True).start()
torch.vgpu.attach_out_of_memory_observer(lambda *told: None)
torch.vgpu.hold(torch.vgpu.current_stream(0))
print("end")
"""


def test_a_process_ends_with_tensors_alive() -> None:
    """Tensors in globals, cycles and threads, a held stream, a history and an observer: it ends, and says nothing."""
    done = run_child([sys.executable, "-c", ALIVE], env=child_environment(KVOBS_STORE="off"), cwd=ROOT, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
