"""How long calls that take or give back device memory take: as recorded, and estimated where nothing was recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvobs.allocator.recording import Calls

PAGE = 2 << 20  # the physical page of CUDA's virtual memory management, and the unit of mapped_pages
# What each kind of call is called by CUDA's runtime and driver and by HIP, without the versions that Nsight appends.
_ALLOCATES = frozenset({
    "cudaMalloc", "cudaMallocAsync", "cudaMallocFromPoolAsync", "cudaMallocManaged", "cuMemAlloc", "cuMemAllocAsync",
    "cuMemAllocFromPoolAsync", "cuMemAllocManaged", "hipMalloc", "hipExtMallocWithFlags", "hipMallocAsync",
    "hipMallocManaged"})
_FREES = frozenset({
    "cudaFree", "cudaFreeAsync", "cuMemFree", "cuMemFreeAsync", "hipFree", "hipFreeAsync"})
_MAPS = frozenset({"cuMemMap", "hipMemMap"})
_UNMAPS = frozenset({"cuMemUnmap", "hipMemUnmap"})
_WITH_MAPS = frozenset({"cuMemCreate", "cuMemSetAccess", "hipMemCreate", "hipMemSetAccess"})
_WITH_UNMAPS = frozenset({"cuMemRelease", "hipMemRelease"})
_RANGES = frozenset({"cuMemAddressReserve", "cuMemAddressFree", "hipMemAddressReserve", "hipMemAddressFree"})
_APPENDED = re.compile(r"(?:_pt[sd][sz])?(?:_v\d+)?(?:_pt[sd][sz])?\Z")
MEMORY_CALLS = _ALLOCATES | _FREES | _MAPS | _UNMAPS | _WITH_MAPS | _WITH_UNMAPS | _RANGES


@dataclass(frozen=True, slots=True)
class CallSummary:
    """All calls of one name; durations in ns. ``p95_ns`` is the nearest rank.

    ``first_ns`` is the duration of the first of them: a process's very first call also creates the device's context.
    """

    name: str
    count: int
    total_ns: int
    median_ns: int
    p95_ns: int
    max_ns: int
    first_ns: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What one call of each kind takes, ns; None where ``source`` does not tell. ``map_ns`` is per page of 2 MiB."""

    name: str
    source: str
    alloc_ns: int | None = None
    free_ns: int | None = None
    map_ns: int | None = None
    unmap_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """*Estimated* time in calls to the device: each count times what one call takes in ``source``.

    ``ns`` is None where the source tells about none of the operations; ``missing`` names the operations it does not
    tell about, whose time is not part of ``ns``.
    """

    ns: int | None
    source: str
    missing: tuple[str, ...] = ()


# Two machines far apart rather than one typical one: between them lies a factor of 15.
FAST = Costs("fast", "medians of 28 cudaMalloc and 17 cudaFree calls in a public trace of an A100 (Holistic Trace "
             "Analysis, cupti_profiler); 193 us mean per mapped page of 2 MiB, an A100",
             alloc_ns=364_500, free_ns=319_000, map_ns=193_000)
SLOW = Costs("slow", "medians of 24 cudaMalloc and 15 cudaFree calls in a public trace of an A100 (Holistic Trace "
             "Analysis, alexnet); 14.2 ms for 25 mapped pages of 2 MiB, an L40S",
             alloc_ns=5_458_000, free_ns=1_451_000, map_ns=568_000)
PROFILES = (FAST, SLOW)


def call_name(name: str) -> str:
    """The name without what profilers append: ``cuMemAlloc_v2`` and ``cudaMalloc_v3020`` lose their versions."""
    return _APPENDED.sub("", name)


def summary(calls: Calls) -> tuple[CallSummary, ...]:
    """One entry per name, the largest total first."""
    found: dict[str, list[int]] = {}
    for index in sorted(range(len(calls.name)), key=calls.start_ns.__getitem__):
        found.setdefault(calls.name[index], []).append(calls.duration_ns[index])
    return tuple(sorted((_summary(name, durations) for name, durations in found.items()),
                        key=lambda entry: (-entry.total_ns, entry.name)))


def costs_of(calls: Calls) -> Costs | None:
    """What one call took in this recording (medians), or None where it has no such calls.

    Mapping a page also creates its handle and sets its access, and unmapping releases it: their medians are added
    where they were recorded. A map is counted as one page, whatever its size.
    """
    medians = {entry.name: entry.median_ns for entry in summary(calls)}
    alloc, free = _of_main(medians, _ALLOCATES), _of_main(medians, _FREES)
    mapped, unmapped = _of_main(medians, _MAPS), _of_main(medians, _UNMAPS)
    if alloc is None and free is None and mapped is None and unmapped is None:
        return None
    if mapped is not None:
        mapped += sum(medians.get(name, 0) for name in _WITH_MAPS)
    if unmapped is not None:
        unmapped += sum(medians.get(name, 0) for name in _WITH_UNMAPS)
    return Costs("recorded", "medians of the calls that this file recorded", alloc, free, mapped, unmapped)


def cost_ns(costs: Costs, device_allocs: int = 0, device_frees: int = 0, mapped_pages: int = 0,
            unmapped_pages: int = 0) -> Estimate:
    """The time that so many calls would take.

    ``mapped_pages`` and ``unmapped_pages`` count pages of 2 MiB. PyTorch maps 20 MiB at once in its large pools, and
    no source tells whether that takes less than ten small maps: for those the result is an upper bound.
    """
    parts = (("cudaMalloc", device_allocs, costs.alloc_ns), ("cudaFree", device_frees, costs.free_ns),
             ("map", mapped_pages, costs.map_ns), ("unmap", unmapped_pages, costs.unmap_ns))
    told = [count * each for _, count, each in parts if count and each is not None]
    missing = tuple(name for name, count, each in parts if count and each is None)
    return Estimate(None if missing and not told else sum(told), costs.source, missing)


def estimates(calls: Calls, device_allocs: int = 0, device_frees: int = 0, mapped_pages: int = 0,
              unmapped_pages: int = 0) -> tuple[Estimate, ...]:
    """One estimate from the recording's own calls where they tell about everything asked, else one per profile."""
    own = costs_of(calls)
    if own is not None:
        estimate = cost_ns(own, device_allocs, device_frees, mapped_pages, unmapped_pages)
        if not estimate.missing:
            return (estimate,)
    return tuple(cost_ns(costs, device_allocs, device_frees, mapped_pages, unmapped_pages) for costs in PROFILES)


def _summary(name: str, durations: Sequence[int]) -> CallSummary:
    ordered = sorted(durations)
    middle, odd = divmod(len(ordered), 2)
    median = ordered[middle] if odd else (ordered[middle - 1] + ordered[middle]) // 2
    return CallSummary(name, len(ordered), sum(ordered), median, ordered[-(-len(ordered) * 95 // 100) - 1], ordered[-1],
                       durations[0])


def _of_main(medians: dict[str, int], names: frozenset[str]) -> int | None:
    """The median of the one of ``names`` that took most time in all: ``medians`` is in that order."""
    return next((median for name, median in medians.items() if name in names), None)
