"""Scenes: actions on the virtual GPU, with the allocator's own statistics as what must come out."""

from __future__ import annotations

import copy
import gc
import time
import traceback
from typing import Any

import torch
import transformers

from kvobs import virtual
from kvobs.bus import Bus
from kvobs.model import Migration, Order
from kvobs.sources._torch import TorchSource
from kvobs.virtual._settings import in_effect
from tests.contract import tiny
from tests.contract.actuators import Answers, Caches, CachesContract, TorchContract, caches
from tests.contract.ordered import WAYS, disturbed, rearranged

transformers.logging.set_verbosity_error()
FIRST, SECOND = "vgpu:0", "vgpu:1"
MIB = 1 << 20


class _Caches(CachesContract):
    acts = ("chunked_growth", "compact", "offload")
    device = FIRST


class _Torch(TorchContract):
    acts = ("empty_cache", "malloc_trim", "gc_threshold")


def _stat(name: str, device: int = 0) -> int:
    return int(torch.accelerator.memory_stats(device)[f"{name}.all.current"])


def _tensors(*found: Any) -> list[Any]:
    return [tensor for cache in found for layer in cache.layers for tensor in (layer.keys, layer.values)]


def contract() -> dict[str, str]:
    """The contract of both actuators: a traceback of each test that fails."""
    failed: dict[str, str] = {}
    torch.accelerator.memory_stats(0)
    torch.vgpu.set_per_process_memory_fraction(0.9, 0)
    kept = torch.empty(MIB, device=FIRST)
    for suite in (_Caches(), _Torch()):
        for name in dir(suite):
            if name.startswith("test_"):
                try:
                    getattr(suite, name)()
                except Exception:
                    failed[f"{type(suite).__name__}.{name}"] = traceback.format_exc(limit=-5)
    torch.vgpu.set_per_process_memory_fraction(1.0, 0)
    return failed if kept.numel() else {}


def tokens() -> dict[str, Any]:
    """Every way of generating with orders at random steps: each cache counts as idle between its own passes."""
    found = {}
    with caches(FIRST) as engine:
        for seed, way in enumerate(WAYS):
            found[way] = disturbed(engine, way, seed, new=40)
    return found


def rearrangements() -> list[bool]:
    """Caches rearranged at random while they move to host memory and back."""
    with caches(FIRST) as engine:
        return [rearranged(engine, seed, steps=40) for seed in range(3)]


def emptied() -> dict[str, Any]:
    """Cached segments go back to the device: planned, told and reserved bytes."""
    answers, source = Answers(), TorchSource(Bus(64))
    source.install(answers.append)
    point: Any = source.actuators[0]
    kept = [torch.empty(30 * MIB, dtype=torch.uint8, device=FIRST) for _ in range(3)]
    kept.append(torch.empty(4 * MIB, dtype=torch.uint8, device=SECOND))
    del kept[1:3]
    before = _stat("reserved_bytes"), _stat("reserved_bytes", 1)
    planned = point.plan("empty_cache").bytes
    point.submit(Order(1, "empty_cache", 1, 1 << 62, False))
    point.run()
    after = _stat("reserved_bytes"), _stat("reserved_bytes", 1)
    taken, = answers.taken()
    source.uninstall()
    return {"planned": planned, "told": taken.bytes, "fell": sum(before) - sum(after), "kept": len(kept),
            "again": _stat("reserved_bytes")}


def offloaded() -> dict[str, Any]:
    """Idle sessions go to host memory and come back before they are used: bytes, devices, tokens, migrations."""
    with caches(FIRST, idle_ns=1) as engine:
        sessions = [engine.session(30, 20, seed) for seed in (1, 2, 3)]
        twins = copy.deepcopy(sessions)
        content = engine.state(*sessions)
        size = sum(tensor.nbytes for tensor in _tensors(*sessions))
        planned = engine.point.plan("offload").bytes
        del twins
        gc.collect()
        engine.watch.events()
        before = _stat("allocated_bytes")
        engine.submit("offload")
        engine.reach()
        events = engine.watch.events()
        fell = before - _stat("allocated_bytes")
        taken, = [one for one in events if type(one).__name__ == "ActionTaken"]
        away = sorted({str(tensor.device) for tensor in _tensors(*sessions)})
        moved = sum(one.bytes for one in events if isinstance(one, Migration))
        other = copy.deepcopy(sessions[1])  # brings its own back
        copied = sorted({str(tensor.device) for tensor in _tensors(sessions[1], other)})
        reply = _chat(engine, sessions[0], 3, 12)
        used = sorted({str(tensor.device) for tensor in _tensors(sessions[0])})
        expected = _chatted(engine, [30, 20, 1], 3, 12)
        undone = engine.order("offload", undo=True)
        back = sorted({str(tensor.device) for tensor in _tensors(*sessions)})
        same = engine.state(*sessions[1:])[0] == content[0][len(_tensors(sessions[0])):]
        return {"size": size, "planned": planned, "told": taken.bytes, "fell": fell, "moved": moved, "away": away,
                "copied": copied, "used": used, "reply": torch.equal(reply.cpu(), expected.cpu()),
                "undone": undone.done, "back": back, "same": same, "late": taken.late,
                "restored": engine.state()[1] == content[1]}


def _chat(engine: Caches, cache: Any, length: int, new: int) -> Any:
    """The last token of a greedy loop over a cache."""
    ids = tiny.prompt(length).to(FIRST)
    for _ in range(new):
        with torch.no_grad():
            ids = engine.model(input_ids=ids, use_cache=True, **{tiny.CACHE: cache})[0][:, -1:].argmax(-1)
    return ids


def _chatted(engine: Caches, session: list[int], length: int, new: int) -> Any:
    engine.watch.bus.active = False
    try:
        return _chat(engine, engine.session(*session), length, new)
    finally:
        engine.watch.bus.active = True


def recalled() -> dict[str, Any]:
    """Idle sessions are recalled to a device of which half and room for three of them is free."""
    with caches(FIRST, idle_ns=1) as engine:
        sessions = [_wide(engine, seed) for seed in range(8)]
        size = sum(tensor.nbytes for tensor in _tensors(sessions[0]))
        content = [tensor.cpu().clone() for tensor in _tensors(*sessions)]
        engine.order("offload")
        torch.accelerator.empty_cache()
        half = torch.vgpu.mem_get_info(0)[1] // 2
        room = 3.5 * size - (half - _stat("allocated_bytes"))
        hog = torch.empty(-int(room), dtype=torch.uint8, device=FIRST)
        before = _stat("allocated_bytes")
        undone = engine.order("offload", undo=True)
        came = _stat("allocated_bytes") - before
        away = sum(tensor.device.type == "cpu" for tensor in _tensors(*sessions)) // len(_tensors(sessions[0]))
        same = all(map(torch.equal, content, (tensor.cpu() for tensor in _tensors(*sessions))))
        del hog
        for session in sessions:
            session.crop(-4)  # brings its own back
        back = sorted({str(tensor.device) for tensor in _tensors(*sessions)})
        return {"size": size, "came": came, "away": away, "done": undone.done, "told": undone.reason,
                "same": same, "back": back}


def ended() -> dict[str, Any]:
    """Observation ends after idle sessions were recalled to a device of which half and room for three of them is free:
    how many are away before and after it.
    """
    with caches(FIRST, idle_ns=1) as engine:
        sessions = [_wide(engine, seed) for seed in range(8)]
        size = sum(tensor.nbytes for tensor in _tensors(sessions[0]))
        engine.order("offload")
        torch.accelerator.empty_cache()
        half = torch.vgpu.mem_get_info(0)[1] // 2
        hog = torch.empty(int(half - _stat("allocated_bytes") - 3.5 * size), dtype=torch.uint8, device=FIRST)
        engine.order("offload", undo=True)
        before = sum(tensor.device.type == "cpu" for tensor in _tensors(*sessions)) // len(_tensors(sessions[0]))
    after = sum(tensor.device.type == "cpu" for tensor in _tensors(*sessions))
    return {"before": before, "after": after, "hog": hog.numel()}


def unseen() -> dict[str, Any]:
    """A session that lies in host memory is used while observation pauses, and after it was uninstalled."""
    with caches(FIRST, idle_ns=1) as engine:
        cache, later = engine.session(12, 4, 1), engine.session(12, 4, 2)
        expected = [_chatted(engine, [12, 4, seed], 3, 9) for seed in (1, 2)]
        engine.order("offload")
        before = sorted({str(tensor.device) for tensor in _tensors(cache, later)})
        engine.watch.bus.pause()
        reply = _chat(engine, cache, 3, 9)
    after = sorted({str(tensor.device) for tensor in _tensors(later)})
    return {"before": before, "paused": torch.equal(reply, expected[0]), "closed": after,
            "later": torch.equal(_chat(engine, later, 3, 9), expected[1])}


def crowded() -> dict[str, Any]:
    """The device is full when a session is to come back: torch's own error, and it goes on once there is room."""
    with caches(FIRST, idle_ns=1) as engine:
        cache = engine.session(400, 2)
        expected = _chatted(engine, [400, 2], 1, 3)
        engine.order("offload")
        torch.accelerator.empty_cache()
        free = torch.vgpu.mem_get_info(0)[0]
        hog: list[Any] = []
        for size in (256 * MIB, 16 * MIB, MIB, 4096, 512):
            try:
                while True:
                    hog.append(torch.empty(size, dtype=torch.uint8, device=FIRST))
            except torch.OutOfMemoryError:
                continue
        error = ""
        try:
            _chat(engine, cache, 1, 1)
        except torch.OutOfMemoryError as caught:
            error = type(caught).__name__
        hog.clear()
        rest = _chat(engine, cache, 1, 3)
        return {"error": error, "free": free > 0, "goes on": torch.equal(rest, expected)}


def compacted() -> dict[str, Any]:
    """Sessions come and go; what is left pins segments, and compaction lets them go: the allocator's reserved bytes."""
    with caches(FIRST) as engine:
        sessions = [_wide(engine, seed) for seed in range(24)]
        for index in range(24):
            if index % 6:
                sessions[index] = None
        gc.collect()
        torch.accelerator.empty_cache()
        kept = [session for session in sessions if session is not None]
        content = engine.state(*kept)
        before, allocated = _stat("reserved_bytes"), _stat("requested_bytes")
        began = time.perf_counter()
        engine.submit("compact")
        engine.reach()
        took = time.perf_counter() - began
        taken, = engine.answers()
        fell = before - _stat("reserved_bytes")
        same = engine.state(*kept) == content
        return {"told": taken.bytes, "fell": fell, "before": before, "allocated": allocated,
                "after": _stat("requested_bytes"), "same": same, "late": taken.late, "took_ms": took * 1e3}


def _wide(engine: Caches, seed: int) -> Any:
    """A session whose K and V weigh 1.5 MiB each, as of a larger model."""
    cache = engine.session(4, 2, seed)
    generator = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        for name in ("keys", "values"):
            setattr(layer, name, torch.rand(1, 2, 12 * 1024, 16, generator=generator).to(FIRST))
    return cache


def threshold() -> dict[str, Any]:
    """The garbage-collection threshold: refused without a memory fraction, set beside other settings, put back."""
    answers, source = Answers(), TorchSource(Bus(64))
    source.install(answers.append)
    point: Any = source.actuators[0]

    def order(generation: int, *, undo: bool = False) -> Any:
        point.submit(Order(1, "gc_threshold", generation, 1 << 62, undo))
        point.run()
        taken, = answers.taken()
        return taken

    kept = torch.empty(64 * MIB, dtype=torch.uint8, device=FIRST)
    without = order(1)
    restoring = virtual.change_settings("max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,>:4]")
    torch.vgpu.set_per_process_memory_fraction(0.5, 0)
    read = torch._C._accelerator_getAllocatorSettings
    before, plain = read(), in_effect()
    done = order(2)
    text, effect = read(), in_effect()
    again = order(3)
    undone = order(4, undo=True)
    exact, after = read() == before, in_effect() == plain
    order(5)
    virtual.change_settings("max_split_size_mb:128")  # somebody else's change stays
    order(6, undo=True)
    others = in_effect()
    torch.vgpu.set_per_process_memory_fraction(1.0, 0)
    torch._C._accelerator_setAllocatorSettings(restoring)
    source.uninstall()
    free = [block["size"] for segment in torch.vgpu.memory_snapshot() if segment["device"] == 0
            for block in segment["blocks"] if block["state"] == "inactive"]
    return {"without": [without.done, without.reason], "done": done.done, "again": [again.done, again.bytes],
            "undone": undone.done, "exact": exact, "after": after, "text": text, "kept": kept.numel(),
            "threshold": effect.garbage_collection_threshold, "split": effect.max_split_size,
            "divisions": effect.roundup_power2_divisions == plain.roundup_power2_divisions,
            "fraction": effect.memory_fraction, "allocated": _stat("allocated_bytes"), "largest": max(free, default=0),
            "others": [others.max_split_size, others.garbage_collection_threshold]}
