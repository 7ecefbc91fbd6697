"""The published definitions of fragmentation, each under its owner's name, and why none of them decides a request.

Owners and sources:

- GMLake: Guo et al., "GMLake: Efficient and Transparent GPU Memory Defragmentation for Large-scale DNN Training with
  Virtual Memory Stitching", ASPLOS 2024: utilisation is peak active over peak reserved, fragmentation is 1 minus it.
- STAlloc: Infinigence, "STAlloc: Enhancing Memory Efficiency in Large-Scale Model Training with Spatio-Temporal
  Planning": memory efficiency is peak allocated over peak reserved, severe fragmentation below 0.9.
- stormlog: ``check_memory_fragmentation`` in Silas-Asamoah/stormlog (gpumemprof/utils.py) divides the allocator's
  inactive_split_bytes by its reserved_bytes; ``suggest_memory_optimization`` warns above 0.3.
- pytorch#29554: a function in that issue (2020-08-04).
- vllm#37428: that pull request's description.
- largest free: LLNL Umpire's ``relative_fragmentation`` and many others.
- Linux: ``__fragmentation_index`` in mm/vmstat.c, shown in debugfs as extfrag/extfrag_index.
- kvcached: ovg-project/kvcached#359 tells pages that are pinned, because a block on them is kept, among the pages held.
- the article: S5 of the reference article, as :func:`kvobs.analysis.article_fragmentation_rate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvobs.allocator.settings import MIB, SMALL_SIZE, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, State
from kvobs.analysis import article_fragmentation_rate

PAGE = 2 * MIB  # kvcached's pages
NO_HISTORY = "There is no replayed history to take peaks from."
NOTHING = "Nothing is reserved."
NO_FREE = "Nothing is free."
NO_REQUEST = "It is defined for a request, and none was given."
EXPANDABLE = "The allocator's inactive_split has no meaning with expandable segments."


class Peaks(NamedTuple):
    """The largest values over a history, bytes. ``active`` is allocated plus pending."""

    reserved: int
    allocated: int
    active: int


class Wanted(NamedTuple):
    """The request that a definition asks about. ``size`` in bytes."""

    size: int
    stream: int = 0
    pool: int = 0


@dataclass(frozen=True, slots=True)
class Definition:
    """One definition and its value for a state: unitless, or bytes (``unit`` "By"); None with a ``reason``."""

    name: str
    owner: str
    formula: str
    value: float | None
    reason: str
    objection: str
    unit: str = "1"


def definitions(state: State, settings: Settings, peaks: Peaks | None = None,
                wanted: Wanted | None = None) -> tuple[Definition, ...]:
    """Every published definition, applied to one state."""
    found = _totals(state)
    peak = peaks if peaks is not None and peaks.reserved > 0 else None
    no_peak = "" if peak else NO_HISTORY
    reserved, idle = found.reserved, "" if found.reserved else NOTHING
    return (
        Definition("gmlake", "GMLake, ASPLOS 2024", "1 - peak active / peak reserved",
                   1 - peak.active / peak.reserved if peak else None, no_peak,
                   "The two peaks may be of different moments, and what was cached for reuse counts as fragmented."),
        Definition("stalloc", "STAlloc", "peak allocated / peak reserved (severe below 0.9)",
                   peak.allocated / peak.reserved if peak else None, no_peak,
                   "It cannot tell memory that can be returned at once from memory that a block pins."),
        Definition("stormlog", "stormlog", "inactive_split / reserved (warns above 0.3)",
                   None if found.expandable else _ratio(found.inactive_split, reserved),
                   EXPANDABLE if found.expandable else idle,
                   "A state that serves every request may be far above 0.3, and one that runs out far below."),
        Definition("pytorch_29554", "pytorch/pytorch#29554", "sum(allocated) / sum(segment size)",
                   _ratio(found.allocated, reserved), idle,
                   "It is the share in use; the rest may be one block that serves anything, or thousands of gaps."),
        Definition("vllm_37428", "vllm-project/vllm#37428", "reserved - allocated", reserved - found.allocated, "",
                   "What is cached and can be returned is in it, so an empty process may look worst.", "By"),
        Definition("largest_free", "Umpire relative_fragmentation, and others", "1 - largest free / total free",
                   1 - found.largest_free / found.free if found.free else None, "" if found.free else NO_FREE,
                   "Where almost nothing is free it is near 1 although the memory is simply used up."),
        _extfrag(state, settings, wanted),
        Definition("kvcached", "ovg-project/kvcached#359", "pinned pages / held pages (of 2 MiB)",
                   _ratio(found.pinned_pages, found.pages), idle,
                   "An idle page is returned only if all of its cudaMalloc segment is, and no request is asked about."),
        Definition("article", "the reference article, S5", "(total allocated - largest free block) / total allocated",
                   article_fragmentation_rate(found.allocated, found.largest_free),
                   "" if found.allocated else "Nothing is allocated.",
                   "It compares used with free bytes: it falls when more is free, and is near 1 whenever all is used."),
    )


class _Totals(NamedTuple):
    reserved: int
    allocated: int
    free: int
    largest_free: int
    inactive_split: int
    pages: int
    pinned_pages: int
    expandable: bool


def _totals(state: State) -> _Totals:
    reserved = allocated = free = largest = split = pages = pinned = 0
    expandable = False
    for segment in state:
        reserved += segment.size
        pages += -(-segment.size // PAGE)
        expandable = expandable or segment.expandable
        counted = -1
        for address, size, _, kind, _ in segment.blocks:
            if kind == INACTIVE:
                free += size
                largest = max(largest, size)
                if len(segment.blocks) > 1:
                    split += size
                continue
            if kind == ALLOCATED:
                allocated += size
            if size:
                first, last = (address - segment.address) // PAGE, (address + size - 1 - segment.address) // PAGE
                pinned += max(last - max(first, counted + 1) + 1, 0)
                counted = last
    return _Totals(reserved, allocated, free, largest, split, pages, pinned, expandable)


def _extfrag(state: State, settings: Settings, wanted: Wanted | None) -> Definition:
    """The kernel's index with bytes for pages and the request's stream, pool and block kind for the zone.

    The kernel asks about 2^order pages, here it is the rounded request. It gives -1 where a free block is large
    enough, and 0 where nothing is free at all; else towards 0 means too little memory, towards 1 fragmentation. Like
    the kernel's, the value counts free blocks, so equal blocks lead to the value that their number gives.
    """
    value: float | None = None
    if wanted is not None:
        rounded = settings.round_size(wanted.size)
        group = (wanted.stream, wanted.pool, rounded <= SMALL_SIZE)
        free = [block.size for segment in state if (segment.stream, segment.pool, segment.small) == group
                for block in segment.blocks if block.state == INACTIVE]
        if not free:
            value = 0.0
        elif max(free) >= rounded:
            value = -1.0
        else:
            value = 1 - (1 + sum(free) / rounded) / len(free)
    return Definition(
        "extfrag", "Linux, mm/vmstat.c", "1 - (1 + free / requested) / free blocks; -1 where a free block is enough",
        value, "" if wanted is not None else NO_REQUEST,
        "It knows neither the device nor what can be returned: a failing request may be one cudaMalloc from success.")


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
