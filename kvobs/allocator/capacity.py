"""How much memory the device had for the allocator of a recording, as far as the recording tells."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvobs.allocator.recording import (
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    DeviceRecording,
    Events,
)
from kvobs.allocator.settings import SMALL_SIZE, Settings

TAKEN, GIVEN_BACK = frozenset({SEGMENT_ALLOC, SEGMENT_MAP}), frozenset({SEGMENT_FREE, SEGMENT_UNMAP})


@dataclass(frozen=True, slots=True)
class Capacity:
    """``bytes``: None for a device without limit. ``reason``: where the figure comes from, a whole sentence."""

    bytes: int | None
    reason: str


def reserved_before(events: Events, last: int) -> array[int]:
    """Bytes reserved before each event, and after the last: ``last`` with the recorded device calls undone."""
    found = array("q", bytes(8 * (len(events) + 1)))
    found[len(events)] = last
    for index in range(len(events) - 1, -1, -1):
        action = events.action[index]
        if action in TAKEN:
            last -= events.size[index]
        elif action in GIVEN_BACK:
            last += events.size[index]
        found[index] = last
    return found


def reserved_bytes(device: DeviceRecording) -> int:
    """Bytes reserved in the last state."""
    return sum(segment.size for segment in device.state)


def granted(events: Events, reserved: Sequence[int], settings: Settings) -> int:
    """The most bytes that the device gave at one time, or would have given at an OOM had they been asked for."""
    return max(max(reserved), *_at_ooms(events, reserved, settings), 0)


def capacity_of(device: DeviceRecording, settings: Settings, refused: Sequence[int]) -> Capacity:
    """What the allocator could reserve on this device in all.

    What was reserved at a recorded OOM and what the device had left then (but less than the request, which failed);
    else, where memory had to be given back before the device could serve a request, less than that would have taken
    (``refused``). Never less than what was reserved at the peak.
    """
    reserved = reserved_before(device.events, reserved_bytes(device))
    most = granted(device.events, reserved, settings)
    if OOM in device.events.action:
        return Capacity(max(most, 1), "The capacity is what was reserved at a recorded OOM plus what the device had "
                        "left.")
    if refused:
        return Capacity(max(min(refused) - 1, most), "The capacity is estimated: the device gave less than this where "
                        "memory had to be given back before a request could be served.")
    return Capacity(None, "The capacity is not known, as no OOM was recorded: the modelled device is without limit.")


def _at_ooms(events: Events, reserved: Sequence[int], settings: Settings) -> list[int]:
    return [reserved[index] + min(events.address[index], _wanted(settings, events.size[index]) - 1)
            for index, action in enumerate(events.action) if action == OOM]


def _wanted(settings: Settings, size: int) -> int:
    """The bytes that the device is asked for."""
    rounded = settings.round_size(size)
    if settings.expandable_segments:
        page = settings.page_size(rounded <= SMALL_SIZE)
        return -(-rounded // page) * page
    return settings.segment_size(rounded)
