"""The ``[memory]`` events of a trace as usage over time.

Their addresses make no history to replay: a trace tells neither the allocator's segments nor the streams, sizes are
those after rounding, and a free is told when it was asked for, not when the device was done with the memory. A device
made of them would have 0 bytes reserved, which is not what was.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from kvobs.allocator.recording import UNKNOWN, Usage

# c10::DeviceType (c10/core/DeviceType.h), as torch names the devices.
_KINDS = ("cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan", "metal", "xpu",
          "mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuseone")
_CPU = 0


class MemoryEvent(NamedTuple):
    """The totals (bytes, or UNKNOWN) after an allocation or a free; ``time`` in ns."""

    time: int
    kind: int
    number: int
    allocated: int
    reserved: int


class OomEvent(NamedTuple):
    """A request of ``size`` bytes that failed."""

    kind: int
    number: int
    size: int


def usages(memory: list[MemoryEvent], ooms: list[OomEvent]) -> tuple[tuple[Usage, ...], tuple[str, ...]]:
    """Usage of each device, and what is missing in it, in sentences."""
    found: dict[tuple[int, int], list[MemoryEvent]] = {}
    for event in sorted(memory, key=lambda event: event.time):
        found.setdefault((event.kind, event.number), []).append(event)
    usage, notes = [], []
    for (kind, index), events in sorted(found.items()):
        usage.append(_usage(device_name(kind, index), kind, events))
        if any(UNKNOWN in (event.allocated, event.reserved) for event in events):
            notes.append(f"The profiler did not record all totals of {usage[-1].device}; they are unknown.")
    if usage:
        notes.append("A trace tells neither the allocator's segments nor its streams: its memory events are shown over "
                     "time, and not replayed.")
    for kind, index in sorted({(oom.kind, oom.number) for oom in ooms}):
        sizes = [oom.size for oom in ooms if (oom.kind, oom.number) == (kind, index)]
        notes.append(f"{device_name(kind, index)} ran out of memory {len(sizes)} times; the largest request that "
                     f"failed was of {max(sizes)} bytes. A trace does not tell what the device had free.")
    return tuple(usage), tuple(notes)


def device_name(kind: int, index: int) -> str:
    """The device as torch writes it, for instance ``cuda:0``."""
    name = _KINDS[kind] if kind < len(_KINDS) else f"device type {kind}"
    return name if index < 0 else f"{name}:{index}"


def _usage(label: str, kind: int, events: list[MemoryEvent]) -> Usage:
    # A CPU allocator reserves nothing; torch writes 0 there, which would read as a measurement.
    return Usage(label, array("q", (event.time // 1000 for event in events)),
                 array("q", (event.allocated for event in events)),
                 array("q", (UNKNOWN if kind == _CPU else event.reserved for event in events)))
