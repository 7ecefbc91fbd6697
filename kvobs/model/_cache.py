"""What caches, steps and turns of an engine did."""

from __future__ import annotations

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
