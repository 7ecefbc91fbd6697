"""The inert data model: what happened, in integers with units in their names.

Sources append these records on the engine's thread; one drain thread interprets them. Times ending in
``_ns`` are ``time.monotonic_ns`` of the process that made the record and are never compared across
processes. ``None`` means absent (not known, not applicable), never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec


class Origin(msgspec.Struct, frozen=True, gc=False):
    """Who produced an event: shared by all events of one (engine, model, cache kind, device)."""

    source: str
    model: str
    cache: str
    device: str
    dtype: str


class Step(msgspec.Struct, frozen=True, gc=False):
    """One forward pass over one cache, as the sweep after it saw the cache.

    ``by_device`` splits the bytes as (device, held, reserved, largest) when the layers sit on several devices and
    is empty otherwise. ``kv_bytes`` counts bytes that hold tokens, ``kv_reserved_bytes`` the storages behind them and
    ``kv_largest_bytes`` the largest single one. ``bytes_written`` is new tokens' K and V, ``bytes_copied``
    what was copied again because a buffer moved. ``hook_ns`` is the time kvobs itself took.
    """

    t_ns: int
    duration_ns: int
    hook_ns: int
    origin: Origin
    cache_id: int
    prefill: bool
    tokens: int
    kv_bytes: int
    kv_reserved_bytes: int
    kv_largest_bytes: int
    reallocations: int
    bytes_written: int
    bytes_copied: int
    by_device: tuple[tuple[str, int, int, int], ...] = ()


class Migration(msgspec.Struct, frozen=True, gc=False):
    """KV bytes that changed device. ``duration_ns`` is host time, absent where only the result was seen."""

    t_ns: int
    origin: Origin
    cache_id: int
    src: str
    dst: str
    buffers: int
    bytes: int
    duration_ns: int | None


class Rewrite(msgspec.Struct, frozen=True, gc=False):
    """Buffers were rearranged between steps (beam reorder, batch repeat or selection, crop)."""

    t_ns: int
    origin: Origin
    cache_id: int
    reallocations: int
    bytes_copied: int


class Resized(msgspec.Struct, frozen=True, gc=False):
    """What a cache holds after it was rearranged or moved between steps; the byte fields are those of ``Step``."""

    t_ns: int
    origin: Origin
    cache_id: int
    kv_bytes: int
    kv_reserved_bytes: int
    kv_largest_bytes: int
    by_device: tuple[tuple[str, int, int, int], ...] = ()


class CacheGone(msgspec.Struct, frozen=True, gc=False):
    """A cache was freed: its bytes no longer count."""

    t_ns: int
    cache_id: int


class Blocks(msgspec.Struct, frozen=True, gc=False):
    """State of a paged pool after a scheduler step; counts in blocks, the last three since the pool began."""

    t_ns: int
    origin: Origin
    cache_id: int
    block_bytes: int
    used: int
    cached: int
    free: int
    allocations: int
    failures: int
    preemptions: int


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One generate call or request, closed. Sums are over its steps; sizes are at its end.

    ``prompt_tokens`` counts the whole prompt including ``cached_tokens``, ``new_tokens`` what was
    generated (both over all rows of a batch). ``ttft_ns`` runs from the call to the first token, ``tpot_ns``
    is the mean over the later ones; either is absent where no token was generated.
    """

    t_ns: int
    start_ns: int
    wall_start_ns: int
    origin: Origin
    cache_id: int
    session: str
    priority: str
    turn: int
    outcome: str
    steps: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    kv_bytes: int
    kv_reserved_bytes: int
    kv_largest_bytes: int
    reallocations: int
    bytes_written: int
    bytes_copied: int
    migrations: tuple[tuple[str, str, int, int], ...]
    ttft_ns: int | None
    tpot_ns: int | None
    prefill_ns: int | None
    hook_ns: int
    trace_id: str
    span_id: str
    sampled: bool


class Allocation(msgspec.Struct, frozen=True, gc=False):
    """One request to a memory allocator and how long it took."""

    t_ns: int
    device: str
    bytes: int
    latency_ns: int


class LatencyCounts(msgspec.Struct, frozen=True, gc=False):
    """A reading of a native counter of an allocator's calls; all but the setting ``sampled_every`` grows.

    ``allocations`` are those whose ``frees`` are counted too, so that the difference is what is alive, in number and
    in bytes; ``untracked`` are those whose free nobody sees. ``buckets`` counts the ``timed`` ones (one of
    ``sampled_every``, on average): bucket i those of at most the catalog's ``LATENCY_BOUNDS_NS[i]`` and above the bound
    before, one more bucket those above every bound.
    """

    allocations: int
    frees: int
    allocated_bytes: int
    freed_bytes: int
    buckets: tuple[int, ...]
    sum_ns: int
    sampled_every: int
    untracked: int = 0

    @property
    def timed(self) -> int:
        """How many were timed."""
        return sum(self.buckets)


class AllocationLatencies(msgspec.Struct, frozen=True, gc=False):
    """How long the requests that an allocator timed took since the last such event of its device, counted natively.

    ``counts`` has one number per bucket of the catalog's ``kvobs.alloc.latency`` (the last above every bound).
    """

    t_ns: int
    device: str
    counts: tuple[int, ...]
    sum_ns: int


class AllocatorState(msgspec.Struct, frozen=True, gc=False):
    """What an allocator held at one instant; ``largest_free_bytes`` is absent where it cannot be known."""

    t_ns: int
    device: str
    reserved_bytes: int
    allocated_bytes: int
    largest_free_bytes: int | None


class MemoryMap(msgspec.Struct, frozen=True, gc=False):
    """Segments and blocks of one device's allocator, as a snapshot listed them while somebody looked.

    ``packed`` is the state as ``kvobs.allocator.memory_map`` packs it; its blocks point into ``holders``, each (kind,
    name, cache id), and one that points nowhere has an unknown holder. The figures beside are the allocator's own
    statistics, which the metrics of this poll have too; an absent one is not kept here. ``steady`` says that they
    were the same before and after the snapshot: then the map is of that one moment. ``duration_ns`` is the CPU time
    that it took, ``every_ns`` how long there is no other one because of it, ``settings`` the allocator's settings.
    """

    t_ns: int
    device: str
    duration_ns: int
    every_ns: int
    steady: bool
    reserved_bytes: int
    allocated_bytes: int
    active_bytes: int | None
    requested_bytes: int | None
    segments: int | None
    settings: str
    holders: tuple[tuple[str, str, int | None], ...]
    packed: bytes


class OutOfMemory(msgspec.Struct, frozen=True, gc=False):
    """An engine call ended in an out-of-memory error (which passed on unchanged)."""

    t_ns: int
    origin: Origin | None
    session: str
    message: str


class HookFailed(msgspec.Struct, frozen=True, gc=False):
    """A hook of kvobs raised and was detached; the host did not see it."""

    t_ns: int
    source: str
    hook: str
    error: str


class Attention(msgspec.Struct, frozen=True, gc=False):
    """One sampled decode step, over all layers of one kind (``full`` or ``sliding``) and all rows of the batch.

    One of ``every`` steps is sampled now. ``queries`` counts query heads over rows and layers; ``local_sum`` and
    ``chance_sum`` add up, over them, the share of attention mass near the query and what uniform attention would
    give (S7; attention sinks left out; queries that see nothing but sinks count in none of the three).
    ``entries`` are K/V pairs in view (KV heads x tokens x layers) and ``alive`` those whose key has a cosine
    above 0.15 with a query head that reads it (S4). ``blocks`` are 16-token blocks per row and layer, ``pending``
    those that are Pending Evict, ``to_pending`` and ``to_active`` the transitions of this step. On an
    accelerator the numbers are of the latest sampled step of the cache that had finished at ``t_ns``: nobody waits.
    """

    t_ns: int
    hook_ns: int
    origin: Origin
    cache_id: int
    session: str
    turn: int
    layers: str
    every: int
    tokens: int
    queries: int
    local_sum: float
    chance_sum: float
    entries: int
    alive: int
    blocks: int
    pending: int
    to_pending: int
    to_active: int
    reclaimable_bytes: int


class CacheUpdates(msgspec.Struct, frozen=True, gc=False):
    """How long ``Cache.update`` took in one sampled pass: one duration per layer of a kind, host time."""

    t_ns: int
    origin: Origin
    cache_id: int
    layers: str
    durations_ns: tuple[int, ...]


class Poll(msgspec.Struct, frozen=True, gc=False):
    """What a polled source read at one instant: (metric of the catalog, its attributes, value).

    A gauge that the source's next poll does not name is absent from then on; a counter's value is the count since
    its own beginning (the process's, the device's), not a difference.
    """

    t_ns: int
    source: str
    duration_ns: int
    readings: tuple[tuple[str, tuple[str, ...], float], ...]


class FlightRecord(msgspec.Struct, frozen=True, gc=False):
    """What was known when memory ran out. ``windows`` (added by the runtime) and ``snapshot`` are JSON, or empty.

    ``windows`` holds the last minute of the window and usage metrics, one entry per second; ``snapshot`` a bounded
    summary of the allocator's segments and blocks, without traces.
    """

    t_ns: int
    reason: str
    device: str
    requested_bytes: int | None
    message: str
    windows: str
    snapshot: str


class Availability(msgspec.Struct, frozen=True, gc=False):
    """Whether something can be observed here; ``reason`` is a whole sentence when it cannot."""

    subject: str
    available: bool
    reason: str


Event = (
    Step | Migration | Rewrite | Resized | CacheGone | Blocks | Turn | Allocation | AllocationLatencies | AllocatorState
    | OutOfMemory | HookFailed | Attention | CacheUpdates | Poll | FlightRecord | MemoryMap | Availability
)
Emit = Callable[[Event], None]


class Source(Protocol):
    """One third party that kvobs observes. Installing must be exactly undone by uninstalling."""

    name: str

    def install(self, emit: Emit) -> None:
        """Hook in (or arrange to when the library is imported). Never raises for an absent library."""

    def uninstall(self) -> None:
        """Restore every patched object by identity; safe to call twice."""

    def sample(self, now_ns: int) -> Iterable[Event]:
        """Called about once a second on the drain thread; what a poll can see."""

    def availability(self) -> Iterable[Availability]:
        """What this source can observe here and what not, with reasons."""
