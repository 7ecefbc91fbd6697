"""What the breaker wants to know of torch's devices once a second: what is left, and what becomes of the next step.

A snapshot takes the lock that every allocation waits for. So two bounds are asked first, from counters alone. If the
device gives even a new segment for each request, nothing can fail; if the first request is larger than all that is
free anywhere, nothing can help. Only in between a snapshot tells. Counters and snapshots have intervals of their own,
each as long as its share of the time asks for, so that a dear snapshot does not keep anybody from what counters tell.

Of a step that is known in part SERVED and GROW are not told: what is not known can only add to it.
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
SERVED, GROW, CAPACITY = "SERVED", "GROW", "CAPACITY"
GOOD = (SERVED, GROW)


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
        self._next_ns = self._exact_ns = 0  # when counters, and snapshots, may be looked at again

    def look(self, torch: Torch, kind: str, capturing: Callable[[], bool], forecast: Callable[[], Forecast],
             now_ns: int, share: float) -> list[DeviceNow] | None:
        """Each device of ``kind`` that this process uses; None until the last look's cost is half of ``share`` of the
        time. A verdict that only a snapshot tells is left out, without a reason, until it is due again in that sense.

        torch's exceptions pass through.
        """
        if now_ns < self._next_ns:
            return None
        began, share = self._clock(), share / 2
        found: list[DeviceNow] = []
        open_to: list[DeviceNow] = []
        try:
            foreseen = forecast()
            for index in range(min(torch.device_count(), MOST_DEVICES)):
                stats = torch.stats(index)
                if touched(stats):
                    one = self._device(torch, kind, index, stats, foreseen)
                    (found if one.verdict or one.why else open_to).append(one)
        finally:
            self._next_ns = now_ns + int((self._clock() - began) / share)
        if open_to and now_ns >= self._exact_ns:
            began = self._clock()
            try:
                open_to = [self._exact(torch, kind, one, capturing, foreseen) for one in open_to]
            finally:
                self._exact_ns = now_ns + int((self._clock() - began) / share)
        return found + open_to

    def _exact(self, torch: Torch, kind: str, now: DeviceNow, capturing: Callable[[], bool],
               forecast: Forecast) -> DeviceNow:
        step, = verdicts(torch, kind, capturing, forecast, now.device)
        if step.verdict is None:
            return DeviceNow(now.device, now.headroom, None, step.sentence)
        return _partly(DeviceNow(now.device, now.headroom, str(step.verdict)), forecast)

    def _device(self, torch: Torch, kind: str, index: int, stats: Mapping[str, Any], forecast: Forecast) -> DeviceNow:
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
        certain = bound(sizes, torch.settings()[0], told.reserved_bytes - told.allocated_bytes, given)
        return _partly(DeviceNow(device, left, certain), forecast)


def _partly(now: DeviceNow, forecast: Forecast) -> DeviceNow:
    """Without good news of a step that is known in part."""
    if forecast.unknown and now.verdict in GOOD:
        return DeviceNow(now.device, now.headroom, None, forecast.unknown[0])
    return now
