"""The ``[memory]`` events of a trace, as usage over time and, where there are addresses, as an allocator's history."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from kvobs.allocator.recording import ALLOC, FREE_COMPLETED, FREE_REQUESTED, UNKNOWN, DeviceRecording, Events, Usage

# c10::DeviceType (c10/core/DeviceType.h), as torch names the devices.
_KINDS = ("cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan", "metal", "xpu",
          "mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuseone")
_CPU = 0


class MemoryEvent(NamedTuple):
    """An allocation (``size`` above 0) or a free (below); ``time`` ns, totals in bytes or UNKNOWN."""

    time: int
    kind: int
    index: int
    address: int | None
    size: int
    allocated: int
    reserved: int
    process: int | str


class OomEvent(NamedTuple):
    """A request of ``size`` bytes that failed."""

    time: int
    kind: int
    index: int
    size: int


def usages(memory: list[MemoryEvent], ooms: list[OomEvent]) -> tuple[
        tuple[Usage, ...], tuple[DeviceRecording, ...], tuple[str, ...]]:
    """Usage of each device, the history of those that are no CPU, and what is missing in them, in sentences."""
    found: dict[tuple[int, int], list[MemoryEvent]] = {}
    for event in sorted(memory, key=lambda event: event.time):
        found.setdefault((event.kind, event.index), []).append(event)
    usage, devices, notes = [], [], []
    for (kind, index), events in sorted(found.items()):
        label = device_name(kind, index)
        usage.append(_usage(label, kind, events))
        if any(event.allocated == UNKNOWN for event in events):
            notes.append(f"The profiler did not record all totals of {label}; they are left out.")
        if kind == _CPU or index < 0:
            continue
        why = _no_history(events)
        if why:
            notes.append(f"The events of {label} give no history of its allocator: {why}.")
            continue
        devices.append(DeviceRecording(index, (), _history(events)))
        notes.append(
            f"The history of {label} is from a profiler: it has no segments, no streams (all events are shown on "
            "stream 0), sizes after rounding, and no times at which the device was done with what was freed.")
    for kind, index in sorted({(oom.kind, oom.index) for oom in ooms}):
        sizes = [oom.size for oom in ooms if (oom.kind, oom.index) == (kind, index)]
        notes.append(f"{device_name(kind, index)} ran out of memory {len(sizes)} times; the largest request that "
                     f"failed was of {max(sizes)} bytes. A trace does not tell what the device had free.")
    return tuple(usage), tuple(devices), tuple(notes)


def device_name(kind: int, index: int) -> str:
    """The device as torch writes it, for instance ``cuda:0``."""
    name = _KINDS[kind] if kind < len(_KINDS) else f"device type {kind}"
    return name if index < 0 else f"{name}:{index}"


def _usage(label: str, kind: int, events: list[MemoryEvent]) -> Usage:
    # A CPU allocator reserves nothing; torch writes 0 there, which would read as a measurement.
    return Usage(label, array("q", (event.time // 1000 for event in events)),
                 array("q", (event.allocated for event in events)),
                 array("q", (UNKNOWN if kind == _CPU else event.reserved for event in events)))


def _no_history(events: list[MemoryEvent]) -> str:
    if any(event.address is None for event in events):
        return "addresses are missing"
    if any(event.size == 0 for event in events):
        return "it holds events of 0 bytes"
    if len({event.process for event in events}) > 1:
        return "several processes used the device"
    return ""


def _history(events: list[MemoryEvent]) -> Events:
    history = Events()
    for event in events:
        for action in (ALLOC,) if event.size > 0 else (FREE_REQUESTED, FREE_COMPLETED):
            history.action.append(action)
            history.address.append(event.address or 0)
            history.size.append(abs(event.size))
            history.time_us.append(event.time // 1000)
    count = len(history.action)
    history.stream.extend([0] * count)
    history.stack.extend([UNKNOWN] * count)
    history.pool.extend([UNKNOWN] * count)
    return history
