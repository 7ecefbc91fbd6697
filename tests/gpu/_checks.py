"""Comparing what kvobs says with what torch says. Pure: no torch, no device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Check = dict[str, Any]  # name, expected, found, ok
Points = dict[tuple[str, tuple[tuple[str, str], ...]], float]
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_AMOUNT = r"([\d.]+) (bytes|KiB|MiB|GiB)"
# What an out-of-memory message of torch 2.0 to 2.13 tells, by the words around each amount.
_SAID = {"requested": rf"Tried to allocate {_AMOUNT}", "device_free": rf"of which {_AMOUNT} is free",
         "allowed": rf"{_AMOUNT} allowed", "allocated": rf"{_AMOUNT} is allocated by PyTorch",
         "unallocated": rf"{_AMOUNT} is reserved by PyTorch but unallocated"}


def check(name: str, expected: Any, found: Any) -> Check:
    """One comparison."""
    return {"name": name, "expected": expected, "found": found, "ok": expected == found}


def failed(checks: Iterable[Check]) -> list[str]:
    """The names of those that did not hold."""
    return [one["name"] for one in checks if not one["ok"]]


def points_read(samples: Mapping[str, list[tuple[int, Mapping[str, str], float]]]) -> Points:
    """The last value of each series; a series that the metric's last sample does not name has none any more."""
    found: Points = {}
    for metric, told in samples.items():
        last = max((wall_ns for wall_ns, _, _ in told), default=0)
        found |= {(metric, tuple(sorted(attributes.items()))): value for wall_ns, attributes, value in told
                  if wall_ns == last}
    return found


def compared(points: Points, stats: Mapping[str, Any], device: str, expandable: bool) -> list[Check]:
    """kvobs's points of an idle allocator against ``memory_stats``. Absent is None."""
    def point(metric: str, **more: str) -> int | None:
        value = points.get((metric, tuple(sorted((("device", device), *more.items())))))
        return None if value is None else int(value)

    def stat(key: str) -> int | None:
        value = stats.get(key)
        return None if value is None else int(value)

    reserved, allocated = stat("reserved_bytes.all.current"), stat("allocated_bytes.all.current")
    unused = None if reserved is None or allocated is None else reserved - allocated
    operations = "kvobs.allocator.device.operations"
    split = None if expandable else stat("inactive_split_bytes.all.current")
    segments = stat("segment.all.current") or (None if expandable else 0)  # torch does not count expandable ones
    return [
        check("usage, allocated", allocated, point("kvobs.allocator.usage", state="allocated")),
        check("usage, unused", unused, point("kvobs.allocator.usage", state="unused")),
        check("requested", stat("requested_bytes.all.current"), point("kvobs.allocator.requested")),
        check("active", stat("active_bytes.all.current"), point("kvobs.allocator.active")),
        check("inactive split (absent with expandable segments)",
              split, point("kvobs.allocator.inactive_split")),
        check("segments (absent where all are expandable)", segments, point("kvobs.allocator.segments")),
        check("retries", stat("num_alloc_retries"), point("kvobs.allocator.retries")),
        check("out of memory", stat("num_ooms"), point("kvobs.allocator.out_of_memory")),
        check("device allocations", stat("num_device_alloc"), point(operations, operation="allocate")),
        check("device frees", stat("num_device_free"), point(operations, operation="free")),
    ]


def said(message: str) -> dict[str, tuple[float, int]]:
    """The amounts in torch's message: number as printed (two decimals at most), and the bytes of its unit."""
    found = {}
    for name, pattern in _SAID.items():
        if match := re.search(pattern, message):
            found[name] = float(match[1]), _UNITS[match[2]]
    return found


def agrees(amount: tuple[float, int] | None, size: int) -> bool:
    """Is ``size`` what torch printed, to the decimals that it prints?"""
    return amount is not None and abs(size / amount[1] - amount[0]) <= 0.0051


def ground_truth(rounded: int, allowed: int, reserved: int, allocated: int, device_free: int) -> str | None:
    """What bytes alone say of a request that failed: CAPACITY, or ENOUGH IN SUM; None within the process's last
    allowance, which the allocator cannot use for want of a whole segment.

    ``allocated`` excludes pending frees, ``allowed`` is the memory fraction's limit.
    """
    cached, more = reserved - allocated, max(min(allowed - reserved, device_free), 0)
    if rounded > cached + more:
        return "CAPACITY"
    return "ENOUGH IN SUM" if rounded <= cached else None
