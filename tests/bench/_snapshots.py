"""Large snapshots in torch's own form: the last part of a server's history, addresses decided by the twin.

``python -m tests.bench._snapshots FILE EVENTS [expandable]`` writes one, in a process of its own for its memory.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import sys
from pathlib import Path
from typing import Any

from kvobs.allocator.recorder import RecordingAllocator
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.twin import OutOfMemory
from tests.bench._inference import LAYERS, Server

CAPACITY = 6_300 * MIB  # some prefills do not fit
STACKS_PER_PLACE = 5
PLACES = 30
DEPTH = 30
Frames = list[dict[str, Any]]


def write(path: Path, events: int, *, expandable: bool = False) -> None:
    """Write a snapshot whose history is the last ``events`` of a server."""
    with path.open("wb") as file:
        pickle.dump(snapshot(events, expandable=expandable), file)


def snapshot(events: int, *, expandable: bool = False) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot`` would give."""
    allocator, stacks = _Recorded(Settings(expandable_segments=expandable)), _stacks()
    lines = itertools.cycle(range(STACKS_PER_PLACE))

    def alloc(size: int, layer: int, place: int) -> int | None:
        """A place is reached from several lines, as a model's code is."""
        return allocator.request(size, stacks[(layer * PLACES + place) * STACKS_PER_PLACE + next(lines)])

    server = Server(alloc, allocator.free)
    server.load()
    unrecorded = len(allocator.history)  # recording began when the model was loaded
    while len(allocator.history) < unrecorded + events:
        server.tick()
    document = allocator.snapshot_document()
    document["device_traces"] = [trace[len(trace) - events:] for trace in document["device_traces"]]
    return document


class _Recorded(RecordingAllocator):
    """Stacks share their frames, and each alloc and each free has a list of its own, as in torch's files."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, CAPACITY, now=itertools.count(1_700_000_000_000_000, 7).__next__)

    def request(self, size: int, frames: Frames) -> int | None:
        """The address, or None."""
        first, told = len(self.history), list(frames)
        try:
            address = self.alloc(size)
            self._frames[address] = told
        except OutOfMemory:
            address = None
        for place in range(first - len(self.history), 0):
            self.history[place]["frames"] = told
        return address

    def free(self, address: int) -> None:
        self._frames[address] = list(self._frames[address])
        super().free(address)


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


if __name__ == "__main__":
    gc.disable()  # millions of objects that live to the end
    write(Path(sys.argv[1]), int(sys.argv[2]), expandable="expandable" in sys.argv[3:])
