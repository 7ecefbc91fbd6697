"""An allocator that writes down its history, and dumps snapshots in the schema of ``torch.cuda.memory._snapshot``."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvobs.allocator import torch_schema
from kvobs.allocator.blocks import Block
from kvobs.allocator.device import SimulatedDevice
from kvobs.allocator.recording import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
)
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import INACTIVE, Segment
from kvobs.allocator.twin import Allocator, OutOfMemory

Frame = tuple[str, int, str]  # file name, line, function


def microseconds() -> int:
    """The time of an event, microseconds since the epoch."""
    return time.time_ns() // 1000


class RecordingAllocator(Allocator):
    """The twin on a simulated device, with a history as torch keeps it: a ring of the last ``max_entries`` events.

    ``capacity`` in bytes, None for a device without limit; ``space`` as in ``Device``; ``now`` gives an event its time.
    """

    def __init__(self, settings: Settings | None = None, capacity: int | None = None, max_entries: int | None = None,
                 now: Callable[[], int] = microseconds, space: int | None = None) -> None:
        self.history: deque[dict[str, Any]] = deque(maxlen=max_entries)
        self._now, self._capacity = now, capacity
        self._frames: dict[int, list[dict[str, Any]]] = {}
        self._asking: tuple[int, list[dict[str, Any]]] = 0, []
        self._releasing = 0  # the stream of what is being given back
        super().__init__(settings, _Listening(self, capacity, space))

    def alloc(self, size: int, stream: int = 0, pool: int = 0, frames: Sequence[Frame] = ()) -> int:
        """Serve a request made by these ``frames`` (innermost first).

        Raises:
            OutOfMemory: nothing could serve it; that is recorded too.
        """
        told = _told(frames)
        self._asking = stream, told
        try:
            address = super().alloc(size, stream, pool)
        except OutOfMemory:
            free = 0 if self._capacity is None else self._capacity - self.reserved
            self._log(OOM, free, self.settings.round_size(size), stream, told)
            raise
        self._frames[address] = told
        self._log(ALLOC, address, size, stream, told)
        return address

    def free(self, address: int) -> None:
        """Give a block back."""
        block = self._active[address]
        self._log(FREE_REQUESTED, address, block.requested, block.stream, self._frames.get(address, []))
        super().free(address)

    def empty_cache(self, frames: Sequence[Frame] = ()) -> None:
        """Return every segment to the device that holds nothing, as these ``frames`` asked; no request is behind it."""
        self._asking = 0, _told(frames)
        super().empty_cache()

    def snapshot_document(self) -> dict[str, Any]:
        """The state and the history, as ``torch.cuda.memory._snapshot`` gives them for one device."""
        settings = self.settings
        return {
            "segments": [self._segment(segment) for segment in self.snapshot()],
            "device_traces": [list(self.history)],
            "allocator_settings": torch_schema.settings(settings, settings.conf()),
            "external_annotations": [],
        }

    def dump(self, path: Path) -> None:
        """Write the snapshot as ``torch.cuda.memory._dump_snapshot`` does."""
        path.write_bytes(pickle.dumps(self.snapshot_document(), protocol=4))

    def _free_block(self, block: Block) -> None:
        self._log(FREE_COMPLETED, block.address, block.requested, block.stream, self._frames.pop(block.address, []))
        super()._free_block(block)

    def _log(self, action: int, address: int, size: int, stream: int, frames: list[dict[str, Any]]) -> None:
        self.history.append(torch_schema.event(action, address, size, stream, self._now(), frames))

    def device_call(self, action: int, address: int, size: int) -> None:
        """Write down what the device did; used by the device."""
        stream, frames = self._asking
        self._log(action, address, size, stream if action in {SEGMENT_ALLOC, SEGMENT_MAP} else self._releasing,
                  frames)

    def _release(self, block: Block) -> None:
        self._releasing = block.stream
        super()._release(block)

    def _unmap_block(self, block: Block) -> None:
        self._releasing = block.stream
        super()._unmap_block(block)

    def _segment(self, segment: Segment) -> dict[str, Any]:
        parts = [torch_schema.block(*block[:4], self._frames.get(block.address, []) if block.state != INACTIVE else [])
                 for block in segment.blocks]
        return torch_schema.segment(0, *segment[:4], small=segment.small, expandable=segment.expandable, blocks=parts,
                                    frames=[])


def _told(frames: Sequence[Frame]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in frames]


class _Listening(SimulatedDevice):
    """A simulated device that tells the allocator what it did."""

    def __init__(self, listener: RecordingAllocator, capacity: int | None, space: int | None) -> None:
        super().__init__(capacity, space)
        self._listener = listener

    def malloc(self, size: int) -> int | None:
        """Take memory, and say so."""
        address = super().malloc(size)
        if address is not None:
            self._listener.device_call(SEGMENT_ALLOC, address, size)
        return address

    def free(self, address: int, size: int) -> None:
        """Give memory back, and say so."""
        super().free(address, size)
        self._listener.device_call(SEGMENT_FREE, address, size)

    def map(self, address: int, size: int) -> bool:
        """Map pages, and say so."""
        mapped = super().map(address, size)
        if mapped:
            self._listener.device_call(SEGMENT_MAP, address, size)
        return mapped

    def unmap(self, address: int, size: int) -> None:
        """Unmap pages, and say so."""
        super().unmap(address, size)
        self._listener.device_call(SEGMENT_UNMAP, address, size)
