"""Events, blocks, segments and settings as ``torch.cuda.memory._snapshot`` gives them, for who writes snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvobs.allocator.recording import ACTIONS, OOM
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE

STATES = {INACTIVE: "inactive", ALLOCATED: "active_allocated"}
PENDING_STATE = "active_pending_free"
Frames = list[dict[str, Any]]


def event(action: int, address: int, size: int, stream: int, time_us: int, frames: Frames) -> dict[str, Any]:
    """An event; of an OOM ``address`` is the bytes that the device had left."""
    return {"action": ACTIONS[action], "device_free" if action == OOM else "addr": address, "size": size,
            "stream": stream, "time_us": time_us, "compile_context": "N/A", "user_metadata": "", "frames": frames}


def block(address: int, size: int, requested: int, state: int, frames: Frames) -> dict[str, Any]:
    """A block, in bytes."""
    return {"address": address, "size": size, "requested_size": requested,
            "state": STATES.get(state, PENDING_STATE), "frames": frames}


def segment(device: int, address: int, size: int, stream: int, pool: int, *, small: bool, expandable: bool,
            blocks: Sequence[dict[str, Any]], frames: Frames) -> dict[str, Any]:
    """A segment with the sums over its blocks; those of a pool other than 0 are a private pool's."""
    active = [one for one in blocks if one["state"] != STATES[INACTIVE]]
    return {
        "device": device, "address": address, "total_size": size,
        "allocated_size": sum(one["size"] for one in active if one["state"] == STATES[ALLOCATED]),
        "active_size": sum(one["size"] for one in active),
        "requested_size": sum(one["requested_size"] for one in active), "stream": stream,
        "segment_type": "small" if small else "large", "segment_pool_id": (0, pool), "is_expandable": expandable,
        "frames": frames, "blocks": list(blocks)}


def settings(found: Settings, conf: str) -> dict[str, Any]:
    """The settings, and the text that gave them."""
    return {"PYTORCH_CUDA_ALLOC_CONF": conf,
            "max_split_size": -1 if found.max_split_size is None else found.max_split_size,
            "garbage_collection_threshold": found.garbage_collection_threshold,
            "expandable_segments": found.expandable_segments,
            "roundup_power2_divisions": {str(1 << index): divisions
                                         for index, divisions in enumerate(found.roundup_power2_divisions)}}
