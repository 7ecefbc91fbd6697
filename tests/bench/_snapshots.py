"""Large snapshots in torch's own form: a server's history as torch 2.9 dumps it, addresses decided by the twin."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from kvobs.allocator import recording as rec
from kvobs.allocator.recording import Events
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, Segment
from tests.allocator_history import RecordedAllocator, Recorder
from tests.bench._inference import LAYERS, MIB, Server

CAPACITY = 6_300 * MIB  # some prefills do not fit
STACKS_PER_PLACE = 5
PLACES = 30
DEPTH = 30
_STATES = {INACTIVE: "inactive", PENDING: "active_pending_free", ALLOCATED: "active_allocated"}
Frames = list[dict[str, Any]]


def write(path: Path, events: int, *, expandable: bool = False, capacity: int = CAPACITY) -> int:
    """Write a snapshot whose history is the last ``events`` of a server; returns how many of them are OOMs."""
    document = snapshot(events, expandable=expandable, capacity=capacity)
    with path.open("wb") as file:
        pickle.dump(document, file)
    return sum(event["action"] == "oom" for event in document["device_traces"][0])


def snapshot(events: int, *, expandable: bool = False, capacity: int = CAPACITY) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot`` would give."""
    settings = Settings(expandable_segments=expandable)
    allocator = _Recorded(settings, capacity)
    stacks = _stacks()

    def alloc(size: int, layer: int, place: int) -> int | None:
        """A place is reached from several lines, as a model's code is."""
        recorder = allocator.recorder
        recorder.stack = (layer * PLACES + place) * STACKS_PER_PLACE + len(recorder.events) // 7 % STACKS_PER_PLACE
        return allocator.request(size, 0, 0)

    server = Server(alloc, allocator.free)
    server.load()
    unrecorded = len(allocator.recorder.events)  # recording began when the model was loaded
    while len(allocator.recorder.events) < unrecorded + events:
        server.tick()
    told = allocator.recorder.events
    first = len(told) - events
    held = {address: stack for action, address, stack in zip(told.action, told.address, told.stack, strict=True)
            if action == rec.ALLOC}
    return {"segments": [_segment(segment, held, stacks) for segment in allocator.snapshot()],
            "device_traces": [_trace(told, first, stacks)], "allocator_settings": _settings(settings),
            "external_annotations": []}


class _Recorder(Recorder):
    stack = -1

    def log(self, action: int, address: int, size: int, stream: int) -> None:
        self.time += 7
        events = self.events
        events.action.append(action)
        events.address.append(address)
        events.size.append(size)
        events.stream.append(stream)
        events.time_us.append(self.time)
        events.stack.append(self.stack)

    def owner(self, address: int) -> int:
        return 0  # there is one stream


class _Recorded(RecordedAllocator):
    recorder: _Recorder

    def __init__(self, settings: Settings, capacity: int) -> None:
        super().__init__(settings, capacity)
        self.recorder = _Recorder(capacity)
        self.device = self.recorder


def _stacks() -> list[Frames]:
    """Stacks of 30 frames that share most of them; about 700 frames in all."""
    def frame(name: str, file: str, line: int) -> dict[str, Any]:
        return {"name": name, "filename": file, "line": line}

    outer = [frame("generate", "/opt/venv/lib/python3.12/site-packages/transformers/generation/utils.py", 2_500 + line)
             for line in range(STACKS_PER_PLACE)]
    served = frame("handle", "/srv/app/server.py", 88)
    found: list[Frames] = []
    for layer in range(LAYERS):
        inside = frame("forward", "/opt/venv/lib/python3.12/site-packages/transformers/models/llama/modeling_llama.py",
                       300 + layer)
        middle = [frame("_call_impl", "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py",
                        1_700 + layer * DEPTH + line) for line in range(DEPTH - 4)]
        for place in range(PLACES):
            innermost = frame(*_place(place))
            found += [[innermost, inside, *middle, entry, served] for entry in outer]
    return found


def _place(place: int) -> tuple[str, str, int]:
    library = "/opt/venv/lib/python3.12/site-packages"
    if place < 10:
        return "convert", f"{library}/torch/nn/modules/module.py", 1_300 + place
    if place in {23, 24}:
        return "update", f"{library}/transformers/cache_utils.py", 100 + place
    return "forward", f"{library}/torch/nn/modules/linear.py", 100 + place


def _trace(events: Events, first: int, stacks: list[Frames]) -> list[dict[str, Any]]:
    """One dict per event. A list of frames is made anew for each alloc, and for each free, as torch does."""
    made: list[dict[str, Any]] = []
    empty: Frames = []
    frames = empty
    for index in range(first, len(events)):
        action = events.action[index]
        if action != rec.FREE_COMPLETED:
            frames = list(stacks[events.stack[index]]) if events.stack[index] >= 0 else empty
        where = "device_free" if action == rec.OOM else "addr"
        made.append({"action": rec.ACTIONS[action], where: events.address[index], "size": events.size[index],
                     "stream": events.stream[index], "time_us": events.time_us[index],
                     "compile_context": "N/A", "user_metadata": "", "frames": frames})
    return made


def _segment(segment: Segment, held: dict[int, int], stacks: list[Frames]) -> dict[str, Any]:
    def total(least: int) -> int:
        return sum(block.size for block in segment.blocks if block.state >= least)

    return {"device": 0, "address": segment.address, "total_size": segment.size, "allocated_size": total(ALLOCATED),
            "active_size": total(PENDING), "requested_size": sum(block.requested for block in segment.blocks),
            "stream": segment.stream, "segment_type": "small" if segment.small else "large",
            "segment_pool_id": (0, 0), "is_expandable": segment.expandable, "frames": [],
            "blocks": [{"address": block.address, "size": block.size, "requested_size": block.requested,
                        "state": _STATES[block.state],
                        "frames": list(stacks[held[block.address]]) if block.state else []}
                       for block in segment.blocks]}


def _settings(settings: Settings) -> dict[str, Any]:
    return {"PYTORCH_CUDA_ALLOC_CONF": settings.conf(), "max_split_size": -1, "garbage_collection_threshold": 0.0,
            "expandable_segments": settings.expandable_segments, "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False, "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)}}
