"""Out of memory on a virtual GPU, where the truth is known by construction; what kvobs says of it; what helps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import child_environment, run_child
from tests.vgpu import needs_vgpu, on_vgpu

pytestmark = needs_vgpu()
MIB = 1 << 20
# Of each: the device and what is asked for last, in MiB; what becomes of that, judged before; the verdict on the error.
TRUTHS = {
    # Ten segments of 20 MiB hold five blocks of 4 each, one of them at the edge stays: 16 MiB are free in each.
    "fragmented": (200, 32, "FRAGMENTED", "FRAGMENTED"),
    # 45 of 50 such blocks stay: 20 MiB are free in all.
    "capacity": (200, 32, "CAPACITY", "CAPACITY"),
    # 16 MiB of a segment that a block pins are free once another stream is done. PyTorch waits for it, and then asks
    # only the device once more: when the error is raised, the request would be served.
    "wait": (100, 16, "WAIT", "SERVED"),
    # 16 MiB are free side by side, for another stream.
    "pool": (100, 16, "WRONG_POOL", "WRONG_POOL"),
    # Two of five segments are wholly free.
    "reclaim": (100, 40, "RECLAIM", None),
}


def run(kind: str, last: int, before: str | None = None, dump: str | None = None) -> object:
    """Fill the device with blocks of 4 MiB, free some, and ask for ``last`` MiB."""
    import torch

    mib = 1 << 20
    torch.vgpu.memory._record_memory_history(stacks="python")
    total = torch.vgpu.mem_get_info(0)[1]
    other = torch.Stream(device="vgpu")

    def ask(size: int) -> torch.Tensor:
        return torch.empty(size * mib, dtype=torch.uint8, device="vgpu")

    def attempt(size: int) -> dict[str, object]:
        try:
            kept.append(ask(size))
        except torch.OutOfMemoryError as error:
            return {"type": type(error).__mro__[1].__name__, "message": str(error)}
        return {}

    kept: list[torch.Tensor] = []
    with other if kind == "pool" else torch.vgpu.current_stream(0):
        blocks = {number: ask(4) for number in range(total // (4 * mib))}
    if kind == "wait":
        torch.vgpu.hold(other)
        for number in range(4):
            blocks[number].record_stream(other)
    freed = {"fragmented": [number for number in blocks if number % 10 not in (4, 5)],
             "capacity": range(0, len(blocks), 10), "wait": range(4), "pool": range(4),
             "reclaim": range(5, 15)}[kind]
    for number in freed:
        del blocks[number]
    if before is not None:
        torch.vgpu.memory._dump_snapshot(before)
    stats = torch.vgpu.memory_stats(0)
    free, allocated = torch.vgpu.mem_get_info(0)[0], torch.vgpu.memory_allocated(0)
    told: dict[str, object] = {"first": attempt(last), "free": free, "allocated": allocated,
                               "reserved": torch.vgpu.memory_reserved(0), "total": total}
    if dump is not None:
        torch.vgpu.memory._dump_snapshot(dump)
    names = ("num_ooms", "num_alloc_retries", "num_sync_all_streams", "num_device_alloc", "num_device_free")
    told["counted"] = [torch.vgpu.memory_stats(0)[name] - stats[name] for name in names]
    told["again"] = attempt(last)
    with other:
        told["on the other stream"] = attempt(last)
    kept.clear()
    blocks.clear()
    told["afterwards"] = attempt(last)
    return told


def asked(command: str, file: Path, *options: str) -> Any:
    """What the real program prints."""
    done = run_child([sys.executable, "-m", "kvobs", command, str(file), "--json", *options],
                     env=child_environment(KVOBS_STORE="off"), timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", TRUTHS)
def test_the_verdict_is_the_truth(kind: str, tmp_path: Path) -> None:
    """``kvobs explain`` says of the files what was built, before and after; the message's figures are true, the process
    goes on, and what the verdict implies happens: a second try after WAIT, the other stream after WRONG_POOL.
    """
    device, last, before, verdict = TRUTHS[kind]
    files = tmp_path / "before.pickle", tmp_path / "after.pickle"
    found = on_vgpu(run, devices=(f"{device}MiB",), kind=kind, last=last, before=str(files[0]), dump=str(files[1]))
    document = asked("explain", files[0], "--request", f"{last}MiB", "--device-free", str(found["free"]))["devices"][0]
    assert document["requests"][0]["verdict"] == before
    in_sum = found["total"] - found["allocated"]
    assert (in_sum < last * MIB) == (before == "CAPACITY")
    document = asked("explain", files[1])["devices"][0]
    for score in ("addresses", "device_allocs", "device_frees"):
        assert document["replay"][score]["checked"] == document["replay"][score]["matched"], document["replay"]
    assert (document["replay"]["usable"], document["replay"]["reason"]) == (True, "")
    ooms, retries, syncs, device_allocs, device_frees = found["counted"]
    assert (retries, syncs) == (1, 1)
    if verdict is None:
        assert (document["ooms"], found["first"]) == ([], {})
        assert (ooms, device_allocs, device_frees) == (0, 1, 2)
        return
    assert (ooms, device_allocs, device_frees) == (1, 0, 0)
    oom, = document["ooms"]
    assert (oom["verdict"], oom["requested_bytes"], oom["device_free_bytes"]) == (verdict, last * MIB, found["free"])
    assert oom["label"].endswith("ask")  # the function that asked
    assert oom["reproduced"]
    assert ("succeeds now" in oom["note"]) == (kind == "wait")
    assert found["first"]["type"] == "RuntimeError"
    for size in (last * MIB, found["total"], found["allocated"], found["reserved"] - found["allocated"]):
        assert f"{size / MIB:.2f} MiB" in found["first"]["message"]
    assert bool(found["again"]) == (kind != "wait")
    assert bool(found["on the other stream"]) == (kind != "pool")
    assert found["afterwards"] == {}


def test_what_helps_fragmentation_helps_and_what_cannot_does_not(tmp_path: Path) -> None:
    """The best settings that ``kvobs whatif --search`` finds let the fragmented program run in a new process, given in
    either way; for the one without the memory it finds none, and the same settings do not help it.
    """
    advised: dict[str, str] = {}
    for kind in ("fragmented", "capacity"):
        device, last, *_ = TRUTHS[kind]
        file = tmp_path / f"{kind}.pickle"
        on_vgpu(run, devices=(f"{device}MiB",), kind=kind, last=last, dump=str(file))
        found = asked("whatif", file, "--search", "--capacity", f"{device}MiB")["devices"][0]["search"]
        assert (found["ranking"][0]["ooms"] == 0) == (kind == "fragmented")
        advised[kind] = found["ranking"][0]["settings"]
    assert "expandable_segments:True" in advised["fragmented"]
    for kind, fails in (("fragmented", False), ("capacity", True)):
        device, last, *_ = TRUTHS[kind]
        for settings, environ in ((advised["fragmented"], {}), ("", {"PYTORCH_ALLOC_CONF": advised["fragmented"]})):
            told = on_vgpu(run, devices=(f"{device}MiB",), settings=settings, environ=environ, kind=kind, last=last)
            assert bool(told["first"]) == fails


def grow(kind: str, dump: str | None = None) -> object:
    """One layer's keys and values grow by 10 MiB a token each, in transformers' own caches, up to 5 tokens."""
    import torch
    from transformers import DynamicCache, LlamaConfig, StaticCache

    torch.vgpu.memory._record_memory_history(stacks="python")
    config = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=1, vocab_size=8)
    cache = DynamicCache() if kind == "cat" else StaticCache(config, max_cache_len=5)
    given = torch.zeros(5, 1, 64, 1, 40_960, device="vgpu")  # 50 MiB: what the tokens bring along
    tokens = 0
    try:
        for token in range(5):
            cache.update(given[token], given[token], 0)
            tokens += 1
    except torch.OutOfMemoryError:
        pass
    told = {"tokens": tokens, "allocated": torch.vgpu.memory_allocated(0), "total": torch.vgpu.mem_get_info(0)[1]}
    if dump is not None:
        torch.vgpu.memory._dump_snapshot(dump)
    return told


def test_a_static_cache_fits_where_growing_by_copying_does_not(tmp_path: Path) -> None:
    """Three tensors at once are more than the device has: CAPACITY; a cache of the full length is not, as
    ``kvobs whatif --kv-growth static`` says beforehand and transformers' own proves; more settings do not help.
    """
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")
    file = tmp_path / "growth.pickle"
    found = on_vgpu(grow, devices=("178MiB",), kind="cat", dump=str(file))
    assert found["tokens"] == 4  # 50 + 40 + 40 MiB are held, 48 are left, and the fifth token's keys want 50
    assert found["allocated"] == 130 * MIB
    oom, = asked("explain", file)["devices"][0]["ooms"]
    assert (oom["verdict"], oom["requested_bytes"], oom["kind"]) == ("CAPACITY", 50 * MIB, "kv")
    said = asked("whatif", file, "--kv-growth", "static", "--capacity", "178MiB")["devices"][0]
    assert (said["before"]["ooms"], said["after"]["ooms"]) == (1, 0)
    assert on_vgpu(grow, devices=("178MiB",), kind="static")["tokens"] == 5
    assert on_vgpu(grow, devices=("178MiB",), settings="expandable_segments:True", kind="cat")["tokens"] == 4
