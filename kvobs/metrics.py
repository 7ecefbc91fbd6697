"""Fold events into metric state; read the state as points. Pure: time comes in as a value.

One drain thread folds; exporters read copies under a short lock. Gauges are recomputed from what is alive,
so a value that nobody reports any more disappears instead of going stale.
"""

from __future__ import annotations

import bisect
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from kvobs import model
from kvobs.analysis import article_fragmentation_rate, unused_share
from kvobs.catalog import BY_NAME, ROWS, Row
from kvobs.windows import SlidingWindow

Attributes = tuple[str, ...]
_SECOND = 1e9  # in nanoseconds; dividing rounds once, so that a latency on a boundary is not above it
_PPB = 1e9  # windows hold integers: a share travels as parts per billion


class Exemplar(msgspec.Struct, frozen=True, gc=False):
    """The latest traced observation of a bucket; ``wall_s`` is Unix time."""

    trace_id: str
    span_id: str
    value: float
    wall_s: float


class Histogram:
    """Counts per bucket (the last is +Inf), sum, and at most one exemplar per bucket."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, exemplar: Exemplar | None) -> None:
        """Count a value: bucket i holds values with bounds[i-1] < value <= bounds[i]."""
        index = bisect.bisect_left(self.bounds, value)
        self.counts[index] += 1
        self.total += value
        if exemplar is not None:
            self.exemplars[index] = exemplar

    def copy(self) -> Histogram:
        """A copy that later observations do not change."""
        other = Histogram(self.bounds)
        other.counts, other.exemplars, other.total = list(self.counts), list(self.exemplars), self.total
        return other


Value = int | float | Histogram


class Observation(msgspec.Struct, frozen=True, gc=False):
    """One histogram observation, for exporters that must record it themselves."""

    row: Row
    attributes: Attributes
    value: float
    trace_id: str
    span_id: str
    sampled: bool


class _Cache(msgspec.Struct):
    origin: model.Origin
    parts: tuple[tuple[str, int, int, int], ...]


class Metrics:
    """All metric state of a process."""

    def __init__(self, *, window_ms: int = 64, max_series: int = 64,
                 wall: Callable[[], float] = time.time, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._width_ns = window_ms * 1_000_000
        self._max_series = max_series
        self._wall, self._clock = wall, clock
        self._lock = threading.Lock()
        self._points: dict[str, dict[Attributes, Value]] = {row.name: {} for row in ROWS}
        self._caches: dict[int, _Cache] = {}
        self._pools: dict[int, model.Blocks] = {}
        self._allocators: dict[str, model.AllocatorState] = {}
        self._windows: dict[tuple[str, Attributes], SlidingWindow] = {}
        self._pending: list[Observation] = []
        self._window_ns = 0

    # -- writing (drain thread) ------------------------------------------------------------------------

    def fold(self, events: Iterable[model.Event]) -> int:
        """Take events into the state; returns how many. Unknown record types are a bug and raise."""
        count = 0
        started = self._clock()
        with self._lock:
            self._window_ns = 0
            for event in events:
                _FOLDERS[type(event)](self, event)
                count += 1
            if count:
                self._add("kvobs.self.events", (), count)
                self._add("kvobs.self.fold.duration", (), (self._clock() - started) / _SECOND)
                self._add("kvobs.self.window.duration", (), self._window_ns / _SECOND)
        return count

    def refresh(self, now_ns: int) -> None:
        """Recompute gauges as of ``now_ns``; windows that emptied lose their points."""
        with self._lock:
            self._refresh_caches()
            self._refresh_pools()
            self._refresh_allocators()
            started = self._clock()
            self._refresh_windows(now_ns)
            self._add("kvobs.self.window.duration", (), (self._clock() - started) / _SECOND)

    def count(self, name: str, attributes: Attributes, amount: float) -> None:
        """Add to a counter from outside the event stream (drops, failures)."""
        if amount:
            with self._lock:
                self._add(name, attributes, amount)

    def begin(self, name: str, *attributes: Attributes) -> None:
        """Show counters at 0 whose attribute sets are known beforehand: an alert must see the first count rise."""
        with self._lock:
            for key in attributes:
                self._points[name].setdefault(key, 0)

    def set(self, name: str, attributes: Attributes, value: float | None) -> None:
        """Set a gauge from outside the event stream; None removes it."""
        with self._lock:
            if value is None:
                self._points[name].pop(attributes, None)
            else:
                self._put(name, attributes, value)

    def take_observations(self) -> list[Observation]:
        """Histogram observations since the last call."""
        with self._lock:
            pending, self._pending = self._pending, []
        return pending

    # -- reading (any thread) --------------------------------------------------------------------------

    def collect(self) -> list[tuple[Row, dict[Attributes, Value]]]:
        """Every row that has points, with copies of its values."""
        with self._lock:
            return [
                (BY_NAME[name], {a: v.copy() if isinstance(v, Histogram) else v for a, v in points.items()})
                for name, points in self._points.items() if points
            ]

    # -- inside ----------------------------------------------------------------------------------------

    def _admit(self, name: str, attributes: Attributes) -> Attributes:
        points = self._points[name]
        if attributes in points or len(points) < self._max_series:
            return attributes
        overflow = self._points["kvobs.self.series.overflow"]
        before = overflow.get((name,), 0)
        overflow[(name,)] = (0 if isinstance(before, Histogram) else before) + 1
        return ("other",) * len(attributes)

    def _add(self, name: str, attributes: Attributes, amount: float) -> None:
        key = self._admit(name, attributes)
        before = self._points[name].get(key, 0)
        if not isinstance(before, Histogram):
            self._points[name][key] = before + amount

    def _observe(self, name: str, attributes: Attributes, value: float, turn: model.Turn | None = None) -> None:
        row = BY_NAME[name]
        key = self._admit(name, attributes)
        histogram = self._points[name].get(key)
        if not isinstance(histogram, Histogram):
            histogram = self._points[name][key] = Histogram(row.buckets)
        exemplar = None
        if turn is not None and turn.sampled and turn.trace_id:
            exemplar = Exemplar(turn.trace_id, turn.span_id, value, self._wall())
        histogram.observe(value, exemplar)
        if len(self._pending) < 100_000:  # nobody takes them when no exporter needs them
            self._pending.append(Observation(row, key, value, turn.trace_id if turn else "",
                                             turn.span_id if turn else "", bool(turn and turn.sampled)))

    def _window(self, name: str, attributes: Attributes, t_ns: int, value: int) -> None:
        started = self._clock()
        window = self._windows.get((name, attributes))
        if window is None:
            if len(self._windows) >= 4 * self._max_series:
                self._add("kvobs.self.series.overflow", (_WINDOW_ROWS[name][0][0],), 1)
                return
            window = self._windows[name, attributes] = SlidingWindow(self._width_ns)
        window.push(t_ns, value)
        self._window_ns += self._clock() - started

    def _fold_step(self, step: model.Step) -> None:
        origin = step.origin
        who = (origin.model, origin.device, origin.cache)
        phase = "prefill" if step.prefill else "decode"
        self._fold_sizes(step)
        self._add("kvobs.kv.reallocations", (*who, phase), step.reallocations)
        self._add("kvobs.kv.written", who, step.bytes_written)
        self._add("kvobs.kv.copied", who, step.bytes_copied)
        self._add("kvobs.step.tokens", (origin.model, origin.device, phase), step.tokens)
        self._add("kvobs.self.hook.duration", (origin.source,), step.hook_ns / _SECOND)
        self._observe("kvobs.step.duration", (origin.model, origin.device, phase), step.duration_ns / _SECOND)
        self._window("step", (origin.model, origin.device), step.t_ns, step.duration_ns)

    def _fold_sizes(self, sizes: model.Step | model.Resized) -> None:
        parts = sizes.by_device or (
            (sizes.origin.device, sizes.kv_bytes, sizes.kv_reserved_bytes, sizes.kv_largest_bytes),)
        self._caches[sizes.cache_id] = _Cache(sizes.origin, parts)

    def _fold_rewrite(self, rewrite: model.Rewrite) -> None:
        who = (rewrite.origin.model, rewrite.origin.device, rewrite.origin.cache)
        self._add("kvobs.kv.reallocations", (*who, "rewrite"), rewrite.reallocations)
        self._add("kvobs.kv.copied", who, rewrite.bytes_copied)

    def _fold_migration(self, move: model.Migration) -> None:
        pair = (move.src, move.dst)
        self._add("kvobs.migration.io", pair, move.bytes)
        self._add("kvobs.migration.operations", pair, move.buffers)
        if move.duration_ns is not None:
            self._observe("kvobs.migration.duration", pair, move.duration_ns / _SECOND)

    def _fold_gone(self, gone: model.CacheGone) -> None:
        self._caches.pop(gone.cache_id, None)
        self._pools.pop(gone.cache_id, None)

    def _fold_blocks(self, pool: model.Blocks) -> None:
        before = self._pools.get(pool.cache_id)
        who = (pool.origin.model, pool.origin.device, pool.origin.cache)
        self._add("kvobs.kv.block.allocations", who, pool.allocations - (before.allocations if before else 0))
        self._add("kvobs.kv.block.failures", who, pool.failures - (before.failures if before else 0))
        self._add("kvobs.kv.preemptions", who, pool.preemptions - (before.preemptions if before else 0))
        self._pools[pool.cache_id] = pool
        cache = self._caches.get(pool.cache_id)
        if cache is not None and len(cache.parts) == 1:
            # Blocks that were given back since the last step (finished, cancelled, preempted) are not held any more.
            device, _, reserved, largest = cache.parts[0]
            cache.parts = ((device, pool.used * pool.block_bytes, reserved, largest),)

    def _fold_turn(self, turn: model.Turn) -> None:
        name = turn.origin.model
        self._add("kvobs.turns", (name, turn.outcome), 1)
        self._add("kvobs.self.hook.duration", (turn.origin.source,), turn.hook_ns / _SECOND)
        who = ("text_completion", turn.origin.source, name)
        self._observe("gen_ai.server.request.duration", who, (turn.t_ns - turn.start_ns) / _SECOND, turn)
        if turn.ttft_ns is not None:
            self._observe("gen_ai.server.time_to_first_token", who, turn.ttft_ns / _SECOND, turn)
        if turn.tpot_ns is not None:
            self._observe("gen_ai.server.time_per_output_token", who, turn.tpot_ns / _SECOND, turn)
        self._observe("gen_ai.client.token.usage", (*who, "input"), turn.prompt_tokens, turn)
        self._observe("gen_ai.client.token.usage", (*who, "output"), turn.new_tokens, turn)

    def _fold_allocation(self, allocation: model.Allocation) -> None:
        self._observe("kvobs.alloc.latency", (allocation.device,), allocation.latency_ns / _SECOND)
        self._window("allocation", (allocation.device,), allocation.t_ns, allocation.latency_ns)

    def _fold_allocator(self, state: model.AllocatorState) -> None:
        self._allocators[state.device] = state
        share = unused_share(state.reserved_bytes, state.allocated_bytes)
        if share is not None:
            self._window("unused", (state.device,), state.t_ns, round(share * _PPB))
        if state.largest_free_bytes is not None:
            self._window("free", (state.device,), state.t_ns, state.largest_free_bytes)

    def _fold_oom(self, oom: model.OutOfMemory) -> None:
        self._add("kvobs.out_of_memory", (oom.origin.model if oom.origin else "unknown",), 1)

    def _fold_failure(self, failure: model.HookFailed) -> None:
        self._add("kvobs.self.hook.failures", (failure.source,), 1)

    def _fold_availability(self, fact: model.Availability) -> None:
        points = self._points["kvobs.availability"]
        for key in [key for key in points if key[0] == fact.subject]:
            del points[key]
        self._put("kvobs.availability", (fact.subject, fact.reason), int(fact.available))

    def _refresh_caches(self) -> None:
        who: Attributes
        held: dict[Attributes, int] = {}
        reserved: dict[Attributes, int] = {}
        largest: dict[Attributes, int] = {}
        caches: dict[Attributes, int] = {}
        for cache in self._caches.values():
            for device, held_bytes, reserved_bytes, largest_bytes in cache.parts:
                who = (cache.origin.model, device, cache.origin.cache)
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
        self._replace("kvobs.kv.usage", usage)
        self._replace("kvobs.kv.fragmentation.article", rates)
        self._replace("kvobs.kv.buffer.largest", largest)
        self._replace("kvobs.kv.caches", caches)

    def _refresh_pools(self) -> None:
        blocks: dict[Attributes, float] = {}
        for pool in self._pools.values():
            who = (pool.origin.model, pool.origin.device, pool.origin.cache)
            for state, number in (("used", pool.used), ("cached", pool.cached), ("free", pool.free)):
                blocks[*who, state] = blocks.get((*who, state), 0) + number
        self._replace("kvobs.kv.blocks", blocks)

    def _refresh_allocators(self) -> None:
        usage: dict[Attributes, float] = {}
        for device, state in self._allocators.items():
            usage[device, "allocated"] = state.allocated_bytes
            usage[device, "unused"] = state.reserved_bytes - state.allocated_bytes
        self._replace("kvobs.allocator.usage", usage)

    def _refresh_windows(self, now_ns: int) -> None:
        fresh: dict[str, dict[Attributes, float]] = {
            name: {} for rows in _WINDOW_ROWS.values() for name, _, _ in rows}
        for (kind, attributes), window in list(self._windows.items()):
            window.advance(now_ns)
            stats = window.stats()
            if not stats.count:
                del self._windows[kind, attributes]
            for name, field, scale in _WINDOW_ROWS[kind]:
                value = getattr(stats, field)
                if value is not None:
                    fresh[name][attributes] = value / scale
        for name, points in fresh.items():
            self._replace(name, points)

    def _replace(self, name: str, points: Mapping[Attributes, float]) -> None:
        self._points[name] = {}
        for attributes, value in points.items():
            self._put(name, attributes, value)

    def _put(self, name: str, attributes: Attributes, value: float) -> None:
        """Set a gauge's point; one that folds into 'other' joins it as the row aggregates across ranks."""
        points = self._points[name]
        key = self._admit(name, attributes)
        before = points.get(key)
        if key == attributes or before is None or isinstance(before, Histogram):
            points[key] = value
        else:
            points[key] = _COMBINE[BY_NAME[name].across_ranks](before, value)


_COMBINE: dict[str, Callable[[float, float], float]] = {"sum": operator.add, "max": max, "min": min}

_WINDOW_ROWS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "step": (("kvobs.window.step.mean", "mean", _SECOND), ("kvobs.window.step.variance", "variance", _SECOND**2)),
    "allocation": (("kvobs.window.allocation.variance", "variance", _SECOND**2),),
    "unused": (("kvobs.window.fragmentation", "maximum", _PPB),),
    "free": (("kvobs.window.largest_free", "minimum", 1),),
}

_FOLDERS: dict[type, Callable[[Metrics, Any], None]] = {
    model.Step: Metrics._fold_step,
    model.Migration: Metrics._fold_migration,
    model.Rewrite: Metrics._fold_rewrite,
    model.Resized: Metrics._fold_sizes,
    model.CacheGone: Metrics._fold_gone,
    model.Blocks: Metrics._fold_blocks,
    model.Turn: Metrics._fold_turn,
    model.Allocation: Metrics._fold_allocation,
    model.AllocatorState: Metrics._fold_allocator,
    model.OutOfMemory: Metrics._fold_oom,
    model.HookFailed: Metrics._fold_failure,
    model.Availability: Metrics._fold_availability,
}
