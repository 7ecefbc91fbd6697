"""What the breaker wants to know of torch's devices once a second: what is left, and what becomes of the next step.

A snapshot takes the lock that every allocation waits for. So two bounds are asked first, from counters alone. If the
device gives even a new segment for each request, nothing can fail; if the first request is larger than all that is
free anywhere, nothing can help. Only in between a snapshot tells, and together all of this takes no more than the share
of the time that it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvobs.allocator.forecast import Forecast
from kvobs.model import DeviceNow
from kvobs.sources._torch_handle import Torch
from kvobs.sources._torch_stats import read, touched
from kvobs.sources._torch_verdict import verdicts

MOST_DEVICES = 64
OVERDUE = "The last look took so long that the next one is still to come."
SERVED, GROW, CAPACITY = "SERVED", "GROW", "CAPACITY"


def headroom(allocated: int, reserved: int, given: int) -> float | None:
    """1 - allocated / (reserved + given): ``given`` bytes could still be reserved. None where there is nothing."""
    whole = reserved + given
    return min(max(1 - allocated / whole, 0.0), 1.0) if whole > 0 else None


def bound(sizes: list[int], conf: str, unallocated: int, given: int) -> str | None:
    """What certainly becomes of requests, one after the other; None where only a snapshot tells.

    Args:
        sizes: bytes of each request, none empty.
        conf: the allocator's settings string in effect.
        unallocated: bytes that the allocator has reserved and not handed out (free or pending, of any pool).
        given: bytes that the device would still give to this process.
    """
    from kvobs.allocator.settings import SMALL_SIZE, known  # for few processes

    settings = known(conf)
    rounded = [settings.round_size(size) for size in sizes]
    if not rounded:
        return SERVED
    if rounded[0] > unallocated + given:
        return CAPACITY
    worst = 0
    for size in rounded:
        page = settings.page_size(size <= SMALL_SIZE) if settings.expandable_segments else 1
        worst += max(settings.segment_size(size), -(-size // page) * page)
    return GROW if worst <= given else None


class Live:
    """Looks at the devices of a process; one thread calls. ``clock`` is the thread's CPU time in ns."""

    def __init__(self, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._clock = clock
        self._next_ns: int | None = None

    def look(self, torch: Torch, kind: str, capturing: Callable[[], bool], forecast: Callable[[], Forecast],
             now_ns: int, share: float) -> list[DeviceNow] | None:
        """Each device of ``kind`` that this process uses; None until the last look's cost is ``share`` of the time.

        torch's exceptions pass through.
        """
        if self._next_ns is not None and now_ns < self._next_ns:
            return None
        began = self._clock()
        try:
            return self._look(torch, kind, capturing, forecast())
        finally:
            self._next_ns = now_ns + int((self._clock() - began) / share)

    def _look(self, torch: Torch, kind: str, capturing: Callable[[], bool], forecast: Forecast) -> list[DeviceNow]:
        found = []
        for index in range(min(torch.device_count(), MOST_DEVICES)):
            stats = torch.stats(index)
            if touched(stats):
                found.append(self._device(torch, kind, index, stats, capturing, forecast))
        return found

    def _device(self, torch: Torch, kind: str, index: int, stats: Mapping[str, Any], capturing: Callable[[], bool],
                forecast: Forecast) -> DeviceNow:
        device = f"{kind}:{index}"
        told = read(device, stats)
        if told.reserved_bytes is None or told.allocated_bytes is None:
            return DeviceNow(device, None, None, f"The allocator of {device} does not tell its bytes.")
        if why := torch.unlisted(kind):
            return DeviceNow(device, None, None, f"No verdict: {why}.")
        free, allowed = torch.free_bytes(kind, index)
        given = free if allowed is None else min(free, max(allowed - told.reserved_bytes, 0))
        left = headroom(told.allocated_bytes, told.reserved_bytes, given)
        sizes = [size for growth in forecast.growths if growth.demand.device == device for size in growth.demand.sizes]
        if forecast.unknown and not sizes:
            return DeviceNow(device, left, None, forecast.unknown[0])
        certain = bound(sizes, torch.settings()[0], told.reserved_bytes - told.allocated_bytes, given)
        if certain is not None:
            return DeviceNow(device, left, certain)
        step, = verdicts(torch, kind, capturing, forecast, device)
        return DeviceNow(device, left, None if step.verdict is None else str(step.verdict),
                         step.sentence if step.verdict is None else "")
