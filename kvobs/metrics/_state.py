"""Fold events into metric state; read the state as points. Pure: time comes in as a value.

One drain thread folds; exporters read copies under a short lock. Gauges are recomputed from what is alive,
so a value that nobody reports any more disappears instead of going stale.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from kvobs import model
from kvobs.catalog import Row
from kvobs.metrics._alive import SECOND, Allocators, Caches, Windows, who_of
from kvobs.metrics._points import Attributes, Histogram, Observation, PointTable, Value
from kvobs.metrics._serving import Serving


class Metrics:
    """All metric state of a process."""

    def __init__(self, *, window_ms: int = 64, max_series: int = 64,
                 wall: Callable[[], float] = time.time, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._table = PointTable(max_series, wall)
        self._caches, self._allocators, self._serving = Caches(), Allocators(), Serving()
        self._windows = Windows(window_ms * 1_000_000, 4 * max_series)
        self._window_ns = 0
        self._caches_hidden = self._attention_hidden = False
        self._last: model.Origin | None = None  # whose step or turn was folded last

    # -- writing (drain thread) ------------------------------------------------------------------------

    def fold(self, events: Iterable[model.Event]) -> int:
        """Take events into the state; returns how many. One that cannot be taken (an unknown record type is a bug)
        raises once all others are.
        """
        count, failed = 0, list[Exception]()
        started = self._clock()
        with self._lock:
            self._window_ns = 0
            for event in events:
                try:
                    FOLDERS[type(event)](self, event)
                    count += 1
                except Exception as error:
                    failed.append(error)
            if count:
                self._table.add("kvobs.self.events", (), count)
                self._table.add("kvobs.self.fold.duration", (), (self._clock() - started) / SECOND)
                self._table.add("kvobs.self.window.duration", (), self._window_ns / SECOND)
        if failed:
            raise failed[0]
        return count

    def refresh(self, now_ns: int) -> None:
        """Recompute gauges as of ``now_ns``; windows that emptied and sources that fell silent lose their points."""
        with self._lock:
            self._caches.refresh(self._table, caches=not self._caches_hidden, attention=not self._attention_hidden,
                                 pinned=self._serving.pinned)
            self._serving.refresh(self._table, shown=not self._caches_hidden)
            self._allocators.refresh(self._table, now_ns)
            started = self._clock()
            self._windows.refresh(self._table, now_ns)
            self._table.add("kvobs.self.window.duration", (), (self._clock() - started) / SECOND)

    def count(self, name: str, attributes: Attributes, amount: float) -> None:
        """Add to a counter from outside the event stream (drops, failures)."""
        if amount:
            with self._lock:
                self._table.add(name, attributes, amount)

    def begin(self, name: str, *attributes: Attributes) -> None:
        """Show counters at 0 whose attribute sets are known beforehand: an alert must see the first count rise."""
        with self._lock:
            for key in attributes:
                self._table.points[name].setdefault(key, 0)

    def set(self, name: str, attributes: Attributes, value: float | None) -> None:
        """Set a gauge from outside the event stream; None removes it."""
        with self._lock:
            if value is None:
                self._table.points[name].pop(attributes, None)
            else:
                self._table.put(name, attributes, value)

    def pause(self, *, caches: bool, attention: bool) -> None:
        """What is not looked at for a while has no gauges: the last values, late ones too, would go stale unseen."""
        with self._lock:
            self._caches.forget(caches=caches or self._caches_hidden, attention=attention or self._attention_hidden)
            self._caches_hidden, self._attention_hidden = caches, attention

    def take_observations(self) -> list[Observation]:
        """Histogram observations since the last call."""
        with self._lock:
            pending, self._table.pending = self._table.pending, []
        return pending

    # -- reading (any thread) --------------------------------------------------------------------------

    def collect(self) -> list[tuple[Row, dict[Attributes, Value]]]:
        """Every row that has points, with copies of its values."""
        with self._lock:
            return self._table.copies()

    def gauge(self, name: str) -> dict[Attributes, float]:
        """The points of one gauge, as copies."""
        with self._lock:
            return {key: value for key, value in self._table.points[name].items() if not isinstance(value, Histogram)}

    def engine_time(self) -> tuple[float, float]:
        """Seconds since the beginning that the hooks took, and that forward passes took without them."""
        with self._lock:
            return self._table.total("kvobs.self.hook.duration"), self._table.total("kvobs.step.duration")

    # -- inside ----------------------------------------------------------------------------------------

    def _window(self, kind: str, attributes: Attributes, t_ns: int, value: int) -> None:
        started = self._clock()
        self._windows.push(kind, attributes, t_ns, value, self._table)
        self._window_ns += self._clock() - started

    def _known(self, origin: model.Origin) -> None:
        """A model that computes can run out of memory, and the hooks that told of it can fail: neither has yet."""
        if origin is self._last:
            return
        self._last = origin
        self._table.add("kvobs.out_of_memory", (origin.model,), 0)
        self._table.add("kvobs.self.hook.failures", (origin.source,), 0)

    def _fold_step(self, step: model.Step) -> None:
        origin, table = step.origin, self._table
        who = who_of(origin)
        self._known(origin)
        phase = "prefill" if step.prefill else "decode"
        self._caches.sizes(step)
        table.add("kvobs.kv.reallocations", (*who, phase), step.reallocations)
        table.add("kvobs.kv.written", who, step.bytes_written)
        table.add("kvobs.kv.copied", who, step.bytes_copied)
        table.add("kvobs.step.tokens", (origin.model, origin.device, phase), step.tokens)
        table.add("kvobs.self.hook.duration", (origin.source,), step.hook_ns / SECOND)
        table.observe("kvobs.step.duration", (origin.model, origin.device, phase), step.duration_ns / SECOND)
        self._window("step", (origin.model, origin.device), step.t_ns, step.duration_ns)

    def _fold_resized(self, sizes: model.Resized) -> None:
        self._caches.sizes(sizes)

    def _fold_rewrite(self, rewrite: model.Rewrite) -> None:
        who = who_of(rewrite.origin)
        self._table.add("kvobs.kv.reallocations", (*who, "rewrite"), rewrite.reallocations)
        self._table.add("kvobs.kv.copied", who, rewrite.bytes_copied)

    def _fold_migration(self, move: model.Migration) -> None:
        pair = (move.src, move.dst)
        self._table.add("kvobs.migration.io", pair, move.bytes)
        self._table.add("kvobs.migration.operations", pair, move.buffers)
        if move.duration_ns is not None:
            self._table.observe("kvobs.migration.duration", pair, move.duration_ns / SECOND)

    def _fold_gone(self, gone: model.CacheGone) -> None:
        self._caches.gone(gone.cache_id)
        self._serving.gone(gone.cache_id)

    def _fold_blocks(self, pool: model.Blocks) -> None:
        before = self._caches.pool(pool)
        who = who_of(pool.origin)
        for name, field in (("kvobs.kv.block.allocations", "allocations"), ("kvobs.kv.block.failures", "failures"),
                            ("kvobs.kv.preemptions", "preemptions")):
            self._table.add(name, who, getattr(pool, field) - (getattr(before, field) if before else 0))

    def _fold_work(self, work: model.PoolWork) -> None:
        self._serving.work(work, self._table)

    def _fold_evictions(self, evictions: model.Evictions) -> None:
        self._serving.evicted(evictions, self._table)

    def _fold_preemption(self, preemption: model.Preemption) -> None:
        self._table.add("kvobs.kv.preemption.tokens", (*who_of(preemption.origin), preemption.cause),
                        preemption.tokens_lost)

    def _fold_phase(self, phase: model.RequestPhase) -> None:
        self._table.observe("kvobs.request.phase.duration", (phase.origin.model, phase.phase),
                            (phase.t_ns - phase.start_ns) / SECOND)

    def _fold_states(self, states: model.RequestStates) -> None:
        self._serving.states(states)

    def _fold_role(self, role: model.ProcessRole) -> None:
        self._serving.role(role)

    def _fold_turn(self, turn: model.Turn) -> None:
        name, table = turn.origin.model, self._table
        self._known(turn.origin)
        table.add("kvobs.turns", (name, turn.outcome), 1)
        table.add("kvobs.self.hook.duration", (turn.origin.source,), turn.hook_ns / SECOND)
        who = ("text_completion", turn.origin.source, name)
        table.observe("gen_ai.server.request.duration", who, (turn.t_ns - turn.start_ns) / SECOND, turn)
        if turn.ttft_ns is not None:
            table.observe("gen_ai.server.time_to_first_token", who, turn.ttft_ns / SECOND, turn)
        if turn.tpot_ns is not None:
            table.observe("gen_ai.server.time_per_output_token", who, turn.tpot_ns / SECOND, turn)
        table.observe("gen_ai.client.token.usage", (*who, "input"), turn.prompt_tokens, turn)
        table.observe("gen_ai.client.token.usage", (*who, "output"), turn.new_tokens, turn)

    def _fold_attention(self, sample: model.Attention) -> None:
        who, table = (sample.origin.model, sample.origin.device, sample.layers), self._table
        self._caches.attended(sample)
        table.add("kvobs.attention.queries", who, sample.queries)
        table.add("kvobs.attention.local", who, sample.local_sum)
        table.add("kvobs.attention.chance", who, sample.chance_sum)
        table.add("kvobs.attention.entries", (*who, "alive"), sample.alive)
        table.add("kvobs.attention.entries", (*who, "dead"), sample.entries - sample.alive)
        table.add("kvobs.attention.transitions", (*who, "pending"), sample.to_pending)
        table.add("kvobs.attention.transitions", (*who, "active"), sample.to_active)

    def _fold_updates(self, updates: model.CacheUpdates) -> None:
        who = (updates.origin.model, updates.origin.device, updates.layers)
        for duration in updates.durations_ns:
            self._table.observe("kvobs.kv.update.duration", who, duration / SECOND)

    def _fold_allocation(self, allocation: model.Allocation) -> None:
        self._table.observe("kvobs.alloc.latency", (allocation.device,), allocation.latency_ns / SECOND)
        self._window("allocation", (allocation.device,), allocation.t_ns, allocation.latency_ns)

    def _fold_latencies(self, latencies: model.AllocationLatencies) -> None:
        self._table.observe_counts("kvobs.alloc.latency", (latencies.device,), latencies.counts,
                                   latencies.sum_ns / SECOND)

    def _fold_allocator(self, state: model.AllocatorState) -> None:
        self._allocators.state(state)
        self._windows.push_state(state, self._table)

    def _fold_poll(self, poll: model.Poll) -> None:
        self._allocators.poll(poll, self._table)
        self._table.add("kvobs.self.poll.duration", (poll.source,), poll.duration_ns / SECOND)

    def _fold_oom(self, oom: model.OutOfMemory) -> None:
        self._table.add("kvobs.out_of_memory", (oom.origin.model if oom.origin else "unknown",), 1)

    def _fold_flight(self, flight: model.FlightRecord) -> None:
        self._table.add("kvobs.flight.records", (flight.reason,), 1)

    def _fold_map(self, _: model.MemoryMap) -> None:
        """Nothing: its figures are those of the poll that it came with."""

    def _fold_decided(self, told: model.Decided) -> None:
        self._table.add("kvobs.breaker.transitions", (told.scope, told.mode, str(told.level), told.after), 1)

    def _fold_action(self, taken: model.ActionTaken) -> None:
        who = (taken.actuator, taken.kind)
        outcome = "refused" if not taken.done else "undone" if taken.undo else "done"
        self._table.add("kvobs.breaker.actions", (*who, outcome), 1)
        if taken.late:
            self._table.add("kvobs.breaker.late", who, 1)
        if taken.done:
            self._table.add("kvobs.breaker.regained", who, max(0, taken.bytes))
            self._table.observe("kvobs.breaker.action.duration", who, taken.duration_ns / SECOND)

    def _fold_failure(self, failure: model.HookFailed) -> None:
        self._table.add("kvobs.self.hook.failures", (failure.source,), 1)

    def _fold_availability(self, fact: model.Availability) -> None:
        points = self._table.points["kvobs.availability"]
        for key in [key for key in points if key[0] == fact.subject]:
            del points[key]
        self._table.put("kvobs.availability", (fact.subject, fact.reason), int(fact.available))


FOLDERS: dict[type, Callable[[Metrics, Any], None]] = {
    model.Step: Metrics._fold_step,
    model.Migration: Metrics._fold_migration,
    model.Rewrite: Metrics._fold_rewrite,
    model.Resized: Metrics._fold_resized,
    model.CacheGone: Metrics._fold_gone,
    model.Blocks: Metrics._fold_blocks,
    model.PoolWork: Metrics._fold_work,
    model.Evictions: Metrics._fold_evictions,
    model.Preemption: Metrics._fold_preemption,
    model.RequestPhase: Metrics._fold_phase,
    model.RequestStates: Metrics._fold_states,
    model.ProcessRole: Metrics._fold_role,
    model.Turn: Metrics._fold_turn,
    model.Attention: Metrics._fold_attention,
    model.CacheUpdates: Metrics._fold_updates,
    model.Allocation: Metrics._fold_allocation,
    model.AllocationLatencies: Metrics._fold_latencies,
    model.AllocatorState: Metrics._fold_allocator,
    model.Poll: Metrics._fold_poll,
    model.OutOfMemory: Metrics._fold_oom,
    model.FlightRecord: Metrics._fold_flight,
    model.MemoryMap: Metrics._fold_map,
    model.Decided: Metrics._fold_decided,
    model.ActionTaken: Metrics._fold_action,
    model.HookFailed: Metrics._fold_failure,
    model.Availability: Metrics._fold_availability,
}
