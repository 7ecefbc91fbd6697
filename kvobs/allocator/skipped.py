"""Histories without one kind of free event (``skip_actions`` of ``torch.cuda.memory._record_memory_history``)."""

from __future__ import annotations

from array import array
from dataclasses import replace

from kvobs.allocator.recording import ALLOC, FREE_COMPLETED, FREE_REQUESTED, DeviceRecording, Events
from kvobs.allocator.state import PENDING


def completed(device: DeviceRecording) -> DeviceRecording:
    """A history without completions: every request to free is taken for its completion, except the last for a block
    that the final state shows as pending.
    """
    events = device.events
    if FREE_COMPLETED in events.action or FREE_REQUESTED not in events.action:
        return device
    pending = {block.address for segment in device.state for block in segment.blocks if block.state == PENDING}
    actions = array("B", events.action)
    for index in range(len(events) - 1, -1, -1):
        address = events.address[index]
        if actions[index] == ALLOC:
            pending.discard(address)
        elif actions[index] == FREE_REQUESTED:
            if address in pending:
                pending.remove(address)
            else:
                actions[index] = FREE_COMPLETED
    columns = {name: getattr(events, name) for name in Events.__slots__}
    return replace(device, events=Events(**{**columns, "action": actions}))


def requests_skipped(events: Events) -> bool:
    """Whether requests to free were not recorded: a block came and went, and nobody is said to have asked for it."""
    if FREE_REQUESTED in events.action:
        return False
    born: set[int] = set()
    for action, address in zip(events.action, events.address, strict=True):
        if action == ALLOC:
            born.add(address)
        elif action == FREE_COMPLETED and address in born:
            return True
    return False
