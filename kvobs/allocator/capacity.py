"""How much memory the device had for the allocator of a recording, as far as the recording tells."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvobs.allocator.recording import GIVEN_BACK, OOM, TAKEN, DeviceRecording, Events
from kvobs.allocator.settings import SMALL_SIZE, Settings


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the allocator could take. ``bytes``: None for a device without limit. ``reason``: where the figure comes
    from, a whole sentence.
    """

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
    return max(max(reserved), *(total for total, _ in _at_ooms(events, reserved, settings)), 0)


def capacity_of(device: DeviceRecording, settings: Settings, refused: Sequence[int]) -> Capacity:
    """What the allocator could reserve on this device in all.

    What was reserved at a recorded OOM and what the device had left then (but less than the request, which failed);
    else, where memory had to be given back before the device could serve a request, less than that would have taken
    (``refused``). Never less than what was reserved at the peak. With a memory fraction, what could be reserved is
    that part of the capacity.
    """
    reserved = reserved_before(device.events, reserved_bytes(device))
    most, ooms = granted(device.events, reserved, settings), _at_ooms(device.events, reserved, settings)
    if not (ooms or refused):
        return Capacity(None, "The capacity is not known, as no OOM was recorded: the modelled device is without "
                        "limit.")
    limit = max(most, 1) if ooms else max(min(refused) - 1, most)
    if settings.memory_fraction is not None:
        return Capacity(_whole(limit, settings.memory_fraction), "The capacity is estimated: the part of it that "
                        "per_process_memory_fraction allows is the most that could be reserved.")
    if not ooms:
        return Capacity(limit, "The capacity is estimated: the device gave less than this where memory had to be given "
                        "back before a request could be served.")
    if (most, False) in ooms:
        return Capacity(limit, "The capacity is what was reserved at a recorded OOM plus what the device had left.")
    return Capacity(limit, "The capacity is estimated: at a recorded OOM the device refused what it had left, or had "
                    "less than at another time.")


def _whole(part: int, fraction: float) -> int:
    """The least whole bytes of which the fraction, rounded down as the allocator does, is a part."""
    found = math.ceil(part / fraction)
    return found + (int(fraction * found) < part)


def _at_ooms(events: Events, reserved: Sequence[int], settings: Settings) -> list[tuple[int, bool]]:
    """For each OOM the bytes that could have been reserved, and whether the device had enough left and refused."""
    found = []
    for index, action in enumerate(events.action):
        if action == OOM:
            left, wanted = events.address[index], _wanted(settings, events.size[index])
            found.append((reserved[index] + min(left, wanted - 1), left >= wanted))
    return found


def _wanted(settings: Settings, size: int) -> int:
    """The bytes that the device is asked for."""
    rounded = settings.round_size(size)
    if settings.expandable_segments:
        page = settings.page_size(rounded <= SMALL_SIZE)
        return -(-rounded // page) * page
    return settings.segment_size(rounded)
