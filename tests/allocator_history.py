"""Histories as torch records them, made by random programs on the twin: for what happens between the device and a file.

Where blocks go is the twin's own choice here, so this is no proof of the twin; the real snapshots and the C++ core are.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvobs.allocator import recording as rec
from kvobs.allocator.recorder import RecordingAllocator
from kvobs.allocator.recording import DeviceRecording, Events
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import State
from kvobs.allocator.twin import OutOfMemory

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 512, 3_000, 64 * KIB, MIB, MIB + 1, 3 * MIB, 7 * MIB, 10 * MIB, 12 * MIB + 5, 21 * MIB, 33 * MIB, 48 * MIB)


def events_of(history: Iterable[dict[str, Any]]) -> Events:
    """A recorder's history as columns."""
    made = Events()
    for entry in history:
        columns = (rec.ACTIONS.index(entry["action"]), entry.get("addr", entry.get("device_free")), entry["size"],
                   entry["stream"], entry["time_us"], -1, -1)
        for name, value in zip(Events.__slots__, columns, strict=True):
            getattr(made, name).append(value)
    return made


@dataclass(frozen=True)
class History:
    device: DeviceRecording
    settings: Settings
    begin: State  # the true state where the (shortened) history begins
    ooms: int
    emptied: int  # how often the program emptied the cache


def history(seed: int, settings: Settings, capacity: int | None, operations: int, kept: int | None = None,
            pools: tuple[int, ...] = (0,), streams: tuple[int, ...] = (0, 7)) -> History:
    """A random program's recording, of which torch's ring kept the last ``kept`` operations' events."""
    chance = random.Random(seed)
    # Far more addresses than these small devices have memory, as with a real one.
    allocator = RecordingAllocator(settings, capacity, space=1 << 40)
    live: list[int] = []
    begin: State = ()
    first = emptied = 0
    for operation in range(operations):
        if kept is not None and operation == operations - kept:
            begin, first = allocator.snapshot(), len(allocator.history)
        what = chance.random()
        if what < 0.5 or not live:
            try:
                live.append(allocator.alloc(chance.choice(SIZES), chance.choice(streams), chance.choice(pools)))
            except OutOfMemory:
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
            emptied += 1
    events = events_of(itertools.islice(allocator.history, first, None))
    device = DeviceRecording(0, allocator.snapshot(), events)
    return History(device, settings, begin, events.action.count(rec.OOM), emptied)
