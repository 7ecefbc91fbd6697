"""What is alive now, and the gauges that follow from it. Nothing here outlives what it describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from kvobs import model
from kvobs.analysis import article_fragmentation_rate, unused_share
from kvobs.catalog import BY_NAME
from kvobs.metrics._points import Attributes, PointTable
from kvobs.windows import SlidingWindow

SECOND = 1e9  # in nanoseconds; dividing rounds once, so that a latency on a boundary is not above it
_PPB = 1e9  # windows hold integers: a share travels as parts per billion
STALE_NS = 5_000_000_000  # a polled source that has been silent for so long has no values any more
_READINGS = 10_000
T = TypeVar("T")


def who_of(origin: model.Origin) -> Attributes:
    """The attributes (model, device, cache) of an origin."""
    return (origin.model, origin.device, origin.cache)


class _Cache(msgspec.Struct):
    origin: model.Origin
    parts: tuple[tuple[str, int, int, int], ...]


class Caches:
    """Live caches, paged pools and the latest sampled attention of each."""

    def __init__(self) -> None:
        self._caches: dict[int, _Cache] = {}
        self._pools: dict[int, model.Blocks] = {}
        self._attention: dict[int, dict[str, model.Attention]] = {}

    def sizes(self, sizes: model.Step | model.Resized) -> None:
        """A cache's sizes changed."""
        parts = sizes.by_device or (
            (sizes.origin.device, sizes.kv_bytes, sizes.kv_reserved_bytes, sizes.kv_largest_bytes),)
        self._caches[sizes.cache_id] = _Cache(sizes.origin, parts)

    def pool(self, pool: model.Blocks) -> model.Blocks | None:
        """A pool's state changed; returns the one before."""
        before = self._pools.get(pool.cache_id)
        self._pools[pool.cache_id] = pool
        cache = self._caches.get(pool.cache_id)
        if cache is not None and len(cache.parts) == 1:
            # Blocks that were given back since the last step (finished, cancelled, preempted) are not held any more.
            device, _, reserved, largest = cache.parts[0]
            cache.parts = ((device, pool.used * pool.block_bytes, reserved, largest),)
        return before

    def attended(self, sample: model.Attention) -> None:
        """A decode step of a cache was sampled."""
        self._attention.setdefault(sample.cache_id, {})[sample.layers] = sample

    def gone(self, cache_id: int) -> None:
        """A cache was freed."""
        for alive in (self._caches, self._pools, self._attention):
            alive.pop(cache_id, None)

    def forget(self, *, caches: bool, attention: bool) -> None:
        """Sizes and states from before a pause are not those after it. Pools keep what their counters stand at."""
        if caches:
            self._caches.clear()
        if attention:
            self._attention.clear()

    def refresh(self, table: PointTable, *, caches: bool, attention: bool,
                pinned: Callable[[int], int | None] = lambda cache_id: None) -> None:
        """Write the gauges; of what is not observed at present there are none. ``pinned``: blocks of a pool."""
        self._refresh_sizes(table, self._caches.values() if caches else ())
        table.replace("kvobs.kv.blocks", self._blocks(pinned) if caches else {})
        self._refresh_attention(table, self._attention.values() if attention else ())

    def _refresh_sizes(self, table: PointTable, alive: Iterable[_Cache]) -> None:
        held, reserved, largest, caches = (dict[Attributes, int]() for _ in range(4))
        for cache in alive:
            for device, held_bytes, reserved_bytes, largest_bytes in cache.parts:
                who: Attributes = (cache.origin.model, device, cache.origin.cache)
                held[who] = held.get(who, 0) + held_bytes
                reserved[who] = reserved.get(who, 0) + reserved_bytes
                largest[who] = max(largest.get(who, 0), largest_bytes)
                caches[who] = caches.get(who, 0) + 1
        usage: dict[Attributes, float] = {}
        rates: dict[Attributes, float] = {}
        for who, total in reserved.items():
            usage[*who, "held"] = held[who]
            usage[*who, "slack"] = total - held[who]
            if (rate := article_fragmentation_rate(total, largest[who])) is not None:
                rates[who] = rate
        table.replace("kvobs.kv.usage", usage)
        table.replace("kvobs.kv.fragmentation.article", rates)
        table.replace("kvobs.kv.buffer.largest", largest)
        table.replace("kvobs.kv.caches", caches)

    def _blocks(self, pinned: Callable[[int], int | None]) -> dict[Attributes, float]:
        blocks: dict[Attributes, float] = {}
        for pool in self._pools.values():
            who = who_of(pool.origin)
            for state, number in (("used", pool.used), ("cached", pool.cached), ("free", pool.free),
                                  ("pinned", pinned(pool.cache_id))):
                if number is not None:
                    blocks[*who, state] = blocks.get((*who, state), 0) + number
        return blocks

    def _refresh_attention(self, table: PointTable, alive: Iterable[Mapping[str, model.Attention]]) -> None:
        blocks: dict[Attributes, float] = {}
        reclaimable: dict[Attributes, float] = {}
        interval: dict[Attributes, float] = {}
        for samples in alive:
            for sample in samples.values():
                who = (sample.origin.model, sample.origin.device, sample.layers)
                for state, number in (("active", sample.blocks - sample.pending), ("pending", sample.pending)):
                    blocks[*who, state] = blocks.get((*who, state), 0) + number
                reclaimable[who] = reclaimable.get(who, 0) + sample.reclaimable_bytes
                model_name = (sample.origin.model,)
                interval[model_name] = max(interval.get(model_name, 0), sample.every)
        table.replace("kvobs.attention.blocks", blocks)
        table.replace("kvobs.attention.reclaimable", reclaimable)
        table.replace("kvobs.attention.interval", interval)


class Allocators:
    """The latest state of each allocator, and what polled sources read last."""

    def __init__(self) -> None:
        self._states: dict[str, model.AllocatorState] = {}
        self._polls: dict[str, model.Poll] = {}
        self._counters: dict[tuple[str, str, Attributes], float] = {}
        self._totals: dict[tuple[str, str, Attributes], float] = {}
        self._gauges: set[str] = set()

    def state(self, state: model.AllocatorState) -> None:
        """An allocator's state."""
        self._states[state.device] = state

    def poll(self, poll: model.Poll, table: PointTable) -> None:
        """Counters are added by their growth; gauges wait for the refresh."""
        self._polls[poll.source] = poll
        for name, attributes, value in poll.readings:
            row = BY_NAME[name]
            if row.kind == "gauge":
                self._gauges.add(name)
                continue
            key = (poll.source, name, attributes)
            before = self._counters.get(key, 0)
            if key not in self._counters and len(self._counters) >= _READINGS:
                continue
            self._counters[key] = value
            grown = value - before if value >= before else value
            if row.nature == "scraped":  # another program's: shown only while that program is read
                self._gauges.add(name)
                self._totals[key] = self._totals.get(key, 0) + grown
            else:
                table.add(name, attributes, grown)

    def refresh(self, table: PointTable, now_ns: int) -> None:
        """Write the gauges; a source that stopped reporting has none."""
        usage: dict[Attributes, float] = {}
        for device, state in _fresh(self._states, lambda state: state.t_ns, now_ns).items():
            usage[device, "allocated"] = state.allocated_bytes
            usage[device, "unused"] = state.reserved_bytes - state.allocated_bytes
        table.replace("kvobs.allocator.usage", usage)
        polled: dict[str, dict[Attributes, float]] = {name: {} for name in self._gauges}
        for poll in _fresh(self._polls, lambda poll: poll.t_ns, now_ns).values():
            for name, attributes, value in poll.readings:
                if name in polled:
                    polled[name][attributes] = self._totals.get((poll.source, name, attributes), value)
        for name, points in polled.items():
            table.replace(name, points)


def _fresh(found: Mapping[str, T], when: Callable[[T], int], now_ns: int) -> dict[str, T]:
    return {name: value for name, value in found.items() if now_ns - when(value) <= STALE_NS}


WINDOW_ROWS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "step": (("kvobs.window.step.mean", "mean", SECOND), ("kvobs.window.step.variance", "variance", SECOND**2)),
    "allocation": (("kvobs.window.allocation.variance", "variance", SECOND**2),),
    "unused": (("kvobs.window.fragmentation", "maximum", _PPB),),
    "free": (("kvobs.window.largest_free", "minimum", 1),),
}


class Windows:
    """The sliding windows by what they are of and of whom; empty ones vanish."""

    def __init__(self, width_ns: int, limit: int) -> None:
        self._width_ns, self._limit = width_ns, limit
        self.windows: dict[tuple[str, Attributes], SlidingWindow] = {}

    def push(self, kind: str, attributes: Attributes, t_ns: int, value: int, table: PointTable) -> None:
        """Add a sample to a window."""
        window = self.windows.get((kind, attributes))
        if window is None:
            if len(self.windows) >= self._limit:
                table.add("kvobs.self.series.overflow", (WINDOW_ROWS[kind][0][0],), 1)
                return
            window = self.windows[kind, attributes] = SlidingWindow(self._width_ns)
        window.push(t_ns, value)

    def push_state(self, state: model.AllocatorState, table: PointTable) -> None:
        """Add what an allocator's state says of unused memory."""
        share = unused_share(state.reserved_bytes, state.allocated_bytes)
        if share is not None:
            self.push("unused", (state.device,), state.t_ns, round(share * _PPB), table)
        if state.largest_free_bytes is not None:
            self.push("free", (state.device,), state.t_ns, state.largest_free_bytes, table)

    def refresh(self, table: PointTable, now_ns: int) -> None:
        """Write the windows' gauges as of ``now_ns``."""
        fresh: dict[str, dict[Attributes, float]] = {
            name: {} for rows in WINDOW_ROWS.values() for name, _, _ in rows}
        for (kind, attributes), window in list(self.windows.items()):
            window.advance(now_ns)
            stats = window.stats()
            if not stats.count:
                del self.windows[kind, attributes]
            for name, field, scale in WINDOW_ROWS[kind]:
                value = getattr(stats, field)
                if value is not None:
                    fresh[name][attributes] = value / scale
        for name, points in fresh.items():
            table.replace(name, points)
