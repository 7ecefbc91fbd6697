"""How much memory the device had for the allocator of a recording, as far as the recording tells."""

from __future__ import annotations

from dataclasses import dataclass

from kvobs.allocator.demand import Demand, reserved_before, reserved_bytes
from kvobs.allocator.recording import OOM, DeviceRecording
from kvobs.allocator.settings import SMALL_SIZE, Settings


@dataclass(frozen=True, slots=True)
class Capacity:
    """``bytes``: None for a device without limit. ``reason``: where the figure comes from, a whole sentence."""

    bytes: int | None
    reason: str


def capacity_of(device: DeviceRecording, demand: Demand, settings: Settings) -> Capacity:
    """What the allocator could reserve on this device in all.

    What was reserved at a recorded OOM and what the device had left then (but less than the request, which failed);
    else, where memory had to be given back before the device could serve a request, less than that would have taken.
    Never less than what was reserved at the peak.
    """
    events = device.events
    reserved = reserved_before(events, reserved_bytes(device))
    found = [reserved[index] + min(events.address[index], _wanted(settings, events.size[index]) - 1)
             for index, action in enumerate(events.action) if action == OOM]
    if found:
        return Capacity(max(*found, max(reserved)), "The capacity is what was reserved at a recorded OOM plus what the "
                        "device had left for it.")
    if demand.refused:
        return Capacity(max(min(demand.refused) - 1, max(reserved)), "The capacity is estimated: the device gave less "
                        "than this where memory had to be given back before a request could be served.")
    return Capacity(None, "The capacity is not known, as no OOM was recorded: the modelled device is without limit.")


def _wanted(settings: Settings, size: int) -> int:
    """The bytes that the device is asked for."""
    rounded = settings.round_size(size)
    if settings.expandable_segments:
        page = settings.page_size(rounded <= SMALL_SIZE)
        return -(-rounded // page) * page
    return settings.segment_size(rounded)
