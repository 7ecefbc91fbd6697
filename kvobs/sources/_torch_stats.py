"""What torch's nested allocator statistics and its settings say. Pure.

The statistics are those that ``torch.cuda.memory_stats`` documents, before it flattens them:
``stats[family][pool][figure]`` with pool ``all``, and plain counters such as ``num_ooms``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

Readings = tuple[tuple[str, tuple[str, ...], float], ...]
NATIVE, ASYNC = "native", "cudaMallocAsync"
SETTINGS_LIMIT, VALUE_LIMIT = 32, 64

_GAUGES = (("kvobs.allocator.requested", "requested_bytes"), ("kvobs.allocator.active", "active_bytes"),
           ("kvobs.allocator.inactive_split", "inactive_split_bytes"), ("kvobs.allocator.segments", "segment"))
_COUNTERS = (("kvobs.allocator.retries", (), "num_alloc_retries"),
             ("kvobs.allocator.out_of_memory", (), "num_ooms"),
             ("kvobs.allocator.device.operations", ("allocate",), "num_device_alloc"),
             ("kvobs.allocator.device.operations", ("free",), "num_device_free"))


class DeviceReading(msgspec.Struct, frozen=True):
    """One device's allocator: its bytes (None where the back end does not tell them) and the other readings."""

    device: str
    reserved_bytes: int | None
    allocated_bytes: int | None
    readings: Readings


def read(device: str, stats: Mapping[str, Any], *, backend: str = NATIVE, expandable: bool = False) -> DeviceReading:
    """The readings of one device.

    A back end that does not keep a family still fills it in with zeros: what stayed zero although memory was reserved
    is taken for not kept. ``cudaMallocAsync`` keeps the reserved and allocated bytes and no more. Bytes of inactive
    split blocks mean nothing with expandable segments, whose free parts are unmapped rather than split.
    """
    reserved, allocated = _current(stats, "reserved_bytes"), _current(stats, "allocated_bytes")
    found: list[tuple[str, tuple[str, ...], float]] = []
    if backend != ASYNC:
        used = _ever(stats, "allocated_bytes")
        for name, family in _GAUGES:
            value = _current(stats, family)
            if family == "inactive_split_bytes":
                kept = not expandable and (_ever(stats, "active") or not used)
            else:
                kept = _ever(stats, family) or not used
            if value is not None and kept:
                found.append((name, (device,), value))
        # Begun anew (reset_accumulated_memory_stats) they are true zeros: nothing was reserved since.
        begun = _number(_figures(stats, "reserved_bytes").get("allocated")) == 0
        counts = _number(stats.get("num_device_alloc")) or not used or begun
        for name, operation, key in _COUNTERS:
            count = _number(stats.get(key))
            if count or (count is not None and counts):
                found.append((name, (device, *operation), count))
    return DeviceReading(device, reserved, allocated, tuple(found))


def touched(stats: Mapping[str, Any]) -> bool:
    """Has this process ever reserved memory of the device, as far as its statistics still know?"""
    return _ever(stats, "reserved_bytes") or _ever(stats, "allocated_bytes")


def blocks(stats: Mapping[str, Any]) -> int:
    """How many blocks a snapshot of the device would list, at most (an unsplit free segment is one block)."""
    return sum(_current(stats, family) or 0 for family in ("active", "inactive_split", "segment"))


def settings(text: str) -> tuple[tuple[str, str], ...]:
    """The pairs of an allocator settings string, as ``key:value,key:[a:1,b:2]``; the last of equal keys counts.

    At most ``SETTINGS_LIMIT`` pairs, in the string's order, values cut to ``VALUE_LIMIT`` characters.
    """
    pairs: dict[str, str] = {}
    for item in _split("".join(text.split())):
        key, colon, value = item.partition(":")
        if key and colon and value:
            pairs.pop(key, None)
            pairs[key] = value
    return tuple((key[:VALUE_LIMIT], value[:VALUE_LIMIT]) for key, value in list(pairs.items())[-SETTINGS_LIMIT:])


def _split(text: str) -> Iterator[str]:
    """The items between commas that stand in no brackets."""
    depth, start = 0, 0
    for at, character in enumerate(text):
        depth = max(0, depth + (character == "[") - (character == "]"))
        if character == "," and not depth:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _figures(stats: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    pools = stats.get(family)
    figures = pools.get("all") if isinstance(pools, Mapping) else None
    return figures if isinstance(figures, Mapping) else {}


def _current(stats: Mapping[str, Any], family: str) -> int | None:
    return _number(_figures(stats, family).get("current"))


def _ever(stats: Mapping[str, Any], family: str) -> bool:
    figures = _figures(stats, family)
    return any(_number(figures.get(figure)) for figure in ("current", "peak", "allocated"))
