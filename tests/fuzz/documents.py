"""Small snapshots of every age, as torch writes them: what the fuzzer begins with, and what tests read."""

from __future__ import annotations

import random
from typing import Any

_EVENT_KEYS = ("action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "pool_id", "frames")

BASE = 0x7F00_0000_0000
MIB = 1 << 20
_FRAME = {"name": "forward", "filename": "model.py", "line": 7}
_OUTER = {"name": "<module>", "filename": "serve.py", "line": 70_000}
_FRAMES = [_FRAME, _OUTER]


def modern(pool_of_events: bool = True) -> dict[str, Any]:
    """Two devices, two pools, an expandable segment, every action, and everything that torch 2.13 adds."""
    def event(action: str, address: int, size: int, time: int, **more: Any) -> dict[str, Any]:
        where = "device_free" if action == "oom" else "addr"
        told = {"action": action, where: address, "size": size, "stream": 0, "compile_context": "N/A",
                "user_metadata": "", "frames": _FRAMES, "time_us": 1_783_000_000_000_000 + time, **more}
        return told | {"pool_id": (0, 0)} if pool_of_events else told

    events = [
        event("segment_alloc", BASE, 2 * MIB, 1), event("alloc", BASE, 1000, 2), event("alloc", BASE + 1024, 600, 3),
        event("free_requested", BASE + 1024, 600, 4), event("free_completed", BASE + 1024, 600, 5),
        event("segment_map", BASE + 64 * MIB, 20 * MIB, 6), event("segment_unmap", BASE + 64 * MIB, 20 * MIB, 7),
        event("segment_free", BASE + 4 * MIB, 2 * MIB, 8), event("oom", 123_456, 1 << 30, 9),
        event("snapshot", 0, 2 * MIB, 10), event("workspace_snapshot", 0, 0, 11),
    ]
    return {"segments": [_segment(0, BASE, (0, 0), False), _segment(1, BASE, (0, 1), True)],
            "device_traces": [events, []],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "max_split_size": 64 * MIB,
                "garbage_collection_threshold": 0.5, "expandable_segments": True,
                "roundup_power2_divisions": {str(1 << index): 4 if index > 8 else 0 for index in range(16)}},
            "external_annotations": [{"name": "step", "stage": "START", "device": 0, "time_us": 1_783_000_000_000_001}]}


def of_2023() -> dict[str, Any]:
    """Histories instead of frames, neither addresses nor times, and a snapshot event."""
    history = [{"addr": BASE, "real_size": 1000, "frames": _FRAMES}, {"addr": BASE, "real_size": 900}]
    return {"segments": [{
        "device": 0, "address": BASE, "total_size": 2 * MIB, "allocated_size": 1024, "active_size": 1536, "stream": 0,
        "segment_type": "small", "blocks": [
            {"size": 1024, "state": "active_allocated", "history": history},
            {"size": 512, "requested_size": 500, "state": "active_pending_free"},
            {"size": 2 * MIB - 1536, "state": "inactive"}]}],
        "device_traces": [[{"action": "snapshot", "addr": 0, "size": 2 * MIB, "stream": 0}]]}


def segments() -> list[dict[str, Any]]:
    """What ``torch.cuda.memory_snapshot()`` gives: a plain list."""
    return [_segment(0, BASE, (0, 0), False), _segment(0, BASE + 2 * MIB, (0, 3), False)]


def _segment(device: int, address: int, pool: tuple[int, int], expandable: bool) -> dict[str, Any]:
    return {"device": device, "address": address, "total_size": 2 * MIB, "allocated_size": 1024, "active_size": 1536,
            "requested_size": 1500, "stream": 0, "segment_type": "small", "segment_pool_id": pool,
            "is_expandable": expandable, "frames": [], "blocks": [
                {"address": address, "size": 1024, "requested_size": 1000, "state": "active_allocated",
                 "frames": _FRAMES},
                {"address": address + 1024, "size": 512, "requested_size": 500, "state": "active_pending_free",
                 "frames": []},
                {"address": address + 1536, "size": 2 * MIB - 1536, "requested_size": 0, "state": "inactive",
                 "frames": []}]}


def history(seed: int) -> dict[str, Any]:
    """A snapshot with histories in torch's form, with keys in some order, and some events of another form."""
    draw = random.Random(seed)
    frames = [{"name": f"f{draw.randrange(9)}", "filename": "a" * draw.choice((3, 70, 300)) + f"{number}.py",
               "line": number} for number in range(12)]
    keys = [key for key in _EVENT_KEYS if key in {"action", "addr", "size", "frames"} or draw.random() < 0.7]
    if draw.random() < 0.3:
        draw.shuffle(keys)
    stacks: list[list[dict[str, Any]]] = [[]]
    texts = [f"context {number}" for number in range(3)]

    def event() -> dict[str, Any]:
        if draw.random() < 0.6:
            depth = draw.choice((0, 1, 2, 40))
            stacks.append([draw.choice(frames) for _ in range(depth)])
        values = {
            "action": draw.choice(("alloc", "free_requested", "free_completed", "segment_alloc", "new")),
            "addr": draw.choice((0, 255, 65_535, 1 << 20, 0x7F00_0000_0000, (1 << 62) + 1)) + 512 * draw.randrange(9),
            "size": draw.choice((1, 300, 70_000, 1 << 31, 1 << 40)), "stream": draw.choice((0, 7, -3, 1 << 40)),
            "time_us": 1_700_000_000_000_000 + draw.randrange(1000),
            "compile_context": draw.choice(("N/A", f"own {draw.random()}", *texts)),
            "user_metadata": draw.choice(("", texts[0])), "pool_id": (0, draw.randrange(3)),
            "frames": draw.choice(stacks[-3:])}
        made = {key: values[key] for key in keys}
        if draw.random() < 0.05:
            made["action"] = "oom"
            made["device_free"] = made.pop("addr")
        if draw.random() < 0.02:
            made["unheard_of"] = [1, {"of": 2.5}]
        return made

    traces = [[event() for _ in range(draw.choice((0, 3, 40, 1200)))] for _ in range(draw.choice((1, 2, 3)))]
    return {"segments": [{"device": 0, "address": 1 << 30, "total_size": 2 << 20, "stream": 0, "blocks": [
        {"address": 1 << 30, "size": 2 << 20, "requested_size": 5, "state": "inactive", "frames": stacks[-1]}]}],
        "device_traces": traces}
