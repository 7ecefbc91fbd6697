"""Recordings for what-if tests: the recorder with one number per stack, and requests that may fail."""

from __future__ import annotations

import itertools
import random

from kvobs.allocator.recorder import RecordingAllocator
from kvobs.allocator.recording import Calls, DeviceRecording, Recording, Stacks
from kvobs.allocator.settings import Settings
from kvobs.allocator.twin import OutOfMemory
from tests.allocator_history import SIZES, events_of

EMPTY, ASK = 0, 1
STACKS = Stacks((("memory.py", 1, "empty_cache"), ("model.py", 2, "forward")), ((EMPTY,), (ASK,)))


class Recorder(RecordingAllocator):
    """``stack`` is a number that the recording's events carry; -1 for none."""

    def __init__(self, settings: Settings | None = None, capacity: int | None = None) -> None:
        clock = itertools.count(1_700_000_000_000_000, 7)
        super().__init__(settings, capacity, now=lambda: next(clock))

    def ask(self, size: int, stack: int = -1, stream: int = 0) -> int:
        """A request; 0 where it fails."""
        try:
            return self.alloc(size, stream, 0, [("code", stack, "line")])
        except OutOfMemory:
            return 0

    def empty(self, stack: int = -1) -> None:
        """A call of empty_cache, which has a stack of its own."""
        self.empty_cache([("code", stack, "line")])

    def recording(self, stacks: Stacks | None = None, calls: Calls | None = None) -> Recording:
        """What a reader would make of it."""
        events = events_of(self.history)
        for event, entry in enumerate(self.history):
            events.stack[event] = entry["frames"][0]["line"] if entry["frames"] else -1
        device = DeviceRecording(0, self.snapshot(), events)
        return Recording("made", "made", self.settings, (device,), stacks=stacks or Stacks(), calls=calls or Calls())


def random_recording(seed: int, settings: Settings, capacity: int | None, operations: int) -> Recording:
    """A random program whose releases carry the stacks of who asked for them.

    A block that another stream uses is never freed directly before a request: if that request waits for the block, its
    history reads as if the block had been free at once.
    """
    chance = random.Random(seed)
    allocator = Recorder(settings, capacity)
    live: list[int] = []
    used: set[int] = set()

    def free() -> None:
        address = live.pop(chance.randrange(len(live)))
        if address in used:
            plain = [one for one in live if one not in used]
            if not plain:
                live.append(address)
                return
            used.discard(address)
            allocator.free(address)
            live.remove(plain[0])
            address = plain[0]
        allocator.free(address)

    for _ in range(operations):
        what = chance.random()
        if what < 0.5 or not live:
            address = allocator.ask(chance.choice(SIZES), ASK, chance.choice((0, 7)))
            if address:
                live.append(address)
            else:
                for _ in range(len(live) // 2):
                    free()
        elif what < 0.9:
            free()
        elif what < 0.94:
            address = chance.choice(live)
            used.add(address)
            allocator.record_stream(address, chance.choice((0, 7)))
        elif what < 0.97:
            allocator.advance(chance.choice((0, 7)))
        else:
            allocator.empty(EMPTY)
    return allocator.recording(STACKS)
