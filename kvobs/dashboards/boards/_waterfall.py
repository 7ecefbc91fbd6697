"""The fragmentation waterfall: parts of a device's memory that add up to its total, per process and device.

The driver's parts (torch, context, others, unexplained, free) add up by their definition. What torch holds is split
further by the allocator's and the caches' own counts; where one of these is absent, its bytes are in the next coarser
part, so that the sum holds. What the two readings of torch's share differ by is a part of its own.
"""

from __future__ import annotations

from kvobs.dashboards._model import Panel, Query
from kvobs.dashboards._panels import stacked_bars
from kvobs.dashboards._promql import Expr, beside, either, less, placed, state, total
from kvobs.dashboards.boards._shared import ACCELERATORS

PLACE = ("instance", "device")


def _owner(part: str) -> Expr:
    return state("kvobs.device.memory", *PLACE, part=part)


def parts() -> dict[str, Expr]:
    """The parts by name, from what serves to what nobody explains; with ``instance`` and ``device`` as labels."""
    allocated = state("kvobs.allocator.usage", *PLACE, state="allocated", device=ACCELERATORS)
    reserved = total(allocated, state("kvobs.allocator.usage", *PLACE, state="unused", device=ACCELERATORS))
    asked, active = state("kvobs.allocator.requested", *PLACE), state("kvobs.allocator.active", *PLACE)
    split = state("kvobs.allocator.inactive_split", *PLACE)
    caches = state("kvobs.kv.usage", *PLACE)
    tensors, idle = either(asked, allocated), less(reserved, either(active, allocated))
    return {
        "KV: tokens": beside(state("kvobs.kv.usage", *PLACE, state="held"), allocated),
        "KV: slack": beside(state("kvobs.kv.usage", *PLACE, state="slack"), allocated),
        "other tensors": either(less(tensors, caches), tensors),
        "rounding": less(allocated, asked),
        "waiting for a stream": less(active, allocated),
        "free in split segments": split,
        "cached, releasable": either(less(idle, split), idle),
        "between two readings": less(_owner("torch"), reserved),
        "context": _owner("context"),
        "other processes": _owner("others"),
        "unexplained": _owner("unexplained"),
        "free": _owner("free"),
    }


def waterfall() -> Panel:
    """The panel: one bar per process and device."""
    return stacked_bars(
        "Where the device's memory is", "What takes the device's memory, and how much of it does nobody explain?",
        *(Query(expr=placed(expr), legend=name) for name, expr in parts().items()), absent="no caching allocator",
        note="The parts of a bar add up to the device's total: free + unexplained + others + context + torch, torch "
             "split by the allocator and the caches. Without NVML the last five are absent and the bar ends at what "
             "torch reserved. Counts of caches and of the allocator are read up to a second apart: other tensors may "
             "be below 0 for that long.", width=24)


__all__ = ["parts", "waterfall"]
