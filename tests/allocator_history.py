"""Histories as torch records them, made by random programs on the twin: for what happens between the device and a file.

Where blocks go is the twin's own choice here, so this is no proof of the twin; the real snapshots and the C++ core are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvobs.allocator import recording as rec
from kvobs.allocator.blocks import Block
from kvobs.allocator.device import SimulatedDevice
from kvobs.allocator.recording import DeviceRecording, Events
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import State
from kvobs.allocator.twin import Allocator, OutOfMemory

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 512, 3_000, 64 * KIB, MIB, MIB + 1, 3 * MIB, 7 * MIB, 10 * MIB, 12 * MIB + 5, 21 * MIB, 33 * MIB, 48 * MIB)


class Recorder(SimulatedDevice):
    """A device that writes down what is asked of it, in the order of torch's history.

    It does not tell its capacity: like a real one it reserves far more addresses than a small test can use up.
    """

    def __init__(self, capacity: int | None) -> None:
        super().__init__()
        self.limit = capacity
        self.events = Events()
        self.stream = 0
        self.time = 1_700_000_000_000_000

    def log(self, action: int, address: int, size: int, stream: int) -> None:
        self.time += 7
        columns = (action, address, size, stream, self.time, -1, -1)
        for column, value in zip((self.events.action, self.events.address, self.events.size, self.events.stream,
                                  self.events.time_us, self.events.stack, self.events.pool), columns, strict=True):
            column.append(value)

    def malloc(self, size: int) -> int | None:
        address = super().malloc(size)
        if address is not None:
            self.log(rec.SEGMENT_ALLOC, address, size, self.stream)
        return address

    def free(self, address: int, size: int) -> None:
        super().free(address, size)
        self.log(rec.SEGMENT_FREE, address, size, self.owner(address))

    def map(self, address: int, size: int) -> bool:
        mapped = super().map(address, size)
        if mapped:
            self.log(rec.SEGMENT_MAP, address, size, self.stream)
        return mapped

    def unmap(self, address: int, size: int) -> None:
        super().unmap(address, size)
        self.log(rec.SEGMENT_UNMAP, address, size, self.owner(address))

    def _take(self, size: int) -> bool:
        if self.limit is not None and self.used + size > self.limit:
            return False
        self.used += size
        return True

    def owner(self, address: int) -> int:
        """The stream of the latest segment or pages that cover an address."""
        events = self.events
        for index in range(len(events) - 1, -1, -1):
            start, size = events.address[index], events.size[index]
            if events.action[index] in {rec.SEGMENT_ALLOC, rec.SEGMENT_MAP} and start <= address < start + size:
                return events.stream[index]
        raise AssertionError(address)


class RecordedAllocator(Allocator):
    """The twin, with a history of what torch would have recorded."""

    def __init__(self, settings: Settings, capacity: int | None) -> None:
        self.recorder = Recorder(capacity)
        super().__init__(settings, self.recorder)

    def request(self, size: int, stream: int, pool: int) -> int | None:
        self.recorder.stream = stream
        try:
            address = self.alloc(size, stream, pool)
        except OutOfMemory:
            left = (self.recorder.limit or 0) - self.recorder.used
            self.recorder.log(rec.OOM, left, self.settings.round_size(size), stream)
            return None
        self.recorder.log(rec.ALLOC, address, size, stream)
        return address

    def free(self, address: int) -> None:
        block = self._active[address]
        self.recorder.log(rec.FREE_REQUESTED, address, block.requested, block.stream)
        super().free(address)

    def _free_block(self, block: Block) -> None:
        self.recorder.log(rec.FREE_COMPLETED, block.address, block.requested, block.stream)
        super()._free_block(block)


@dataclass(frozen=True)
class History:
    device: DeviceRecording
    settings: Settings
    begin: State  # the true state where the (shortened) history begins
    ooms: int


def history(seed: int, settings: Settings, capacity: int | None, operations: int, kept: int | None = None,
            pools: tuple[int, ...] = (0,), streams: tuple[int, ...] = (0, 7)) -> History:
    """A random program's recording, of which torch's ring kept the last ``kept`` operations' events."""
    chance = random.Random(seed)
    allocator = RecordedAllocator(settings, capacity)
    live: list[int] = []
    begin: State = ()
    first = 0
    for operation in range(operations):
        if kept is not None and operation == operations - kept:
            begin, first = allocator.snapshot(), len(allocator.recorder.events)
        what = chance.random()
        if what < 0.5 or not live:
            got = allocator.request(chance.choice(SIZES), chance.choice(streams), chance.choice(pools))
            if got is not None:
                live.append(got)
            else:
                for _ in range(len(live) // 2):
                    allocator.free(live.pop(chance.randrange(len(live))))
        elif what < 0.9:
            allocator.free(live.pop(chance.randrange(len(live))))
        elif what < 0.95:
            allocator.record_stream(chance.choice(live), chance.choice(streams))
        elif what < 0.99:
            allocator.advance(chance.choice(streams))
        else:
            allocator.empty_cache()
    events = allocator.recorder.events
    shortened = Events(*(getattr(events, name)[first:] for name in Events.__slots__))
    ooms = shortened.action.count(rec.OOM)
    return History(DeviceRecording(0, allocator.snapshot(), shortened), settings, begin, ooms)


def with_pools(device: DeviceRecording, pools: list[int]) -> DeviceRecording:
    """The same history with the pool of every event told."""
    events = device.events
    events.pool[:] = type(events.pool)("i", pools)
    return replace(device, events=events)
