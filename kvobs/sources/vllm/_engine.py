"""One scheduler of vLLM and its pool: what its calls mean, and what is told of them.

Everything but ``seen`` runs on the engine's thread, at its calls. States are told at most every 50 ms while it works,
and when it falls idle; who is in the engine about once a second, also while a step takes longer.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

from kvobs.model import Blocks, CacheGone, Emit, Event, Origin, PoolWork, Preemption, Step
from kvobs.sources._identity import next_cache_id
from kvobs.sources.vllm._arrivals import Arrivals
from kvobs.sources.vllm._layout import Layout, block_bytes_of, largest_buffer_of, origin_of
from kvobs.sources.vllm._pool import PoolLedger, is_cached
from kvobs.sources.vllm._requests import Desk, OpenRequest, Sizes
from kvobs.sources.vllm._snapshot import Snapshot

TELL_NS = 50_000_000
SHOW_NS = 1_000_000_000
MOST_HOLDERS = 8
MOST_FLIGHTS = 64


class Spent:
    """Time that the hooks took on the engine's thread since it was last told."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns = 0

    def take(self) -> int:
        """That time; it begins anew."""
        spent, self.ns = self.ns, 0
        return spent


class EngineRecord:
    """What is known of one ``Scheduler``; the hooks call it."""

    def __init__(self, scheduler: Any, ledger: PoolLedger, desk: Desk, arrivals: Arrivals, spent: Spent,
                 emit: Emit) -> None:
        self._scheduler = weakref.ref(scheduler)
        self.ledger = ledger
        self._desk = desk
        self._arrivals = arrivals
        self._spent = spent
        self._emit = emit
        # For who looks from another thread: whether the scheduler rests (its step runs, or it is idle), and how often
        # it was called.
        self._resting, self._moves = False, 0
        observability = getattr(scheduler.vllm_config, "observability_config", None)
        self._traced = bool(getattr(observability, "otlp_traces_endpoint", None))
        self.origin: Origin = origin_of(scheduler)
        self.cache_id = next_cache_id()
        self.layout = Layout(scheduler)
        self.block_bytes = block_bytes_of(scheduler.kv_cache_config)
        self.pool_bytes = self.block_bytes * ledger.size
        self.buffer_bytes = largest_buffer_of(scheduler.kv_cache_config, self.pool_bytes)
        self.token_bytes = self.layout.token_bytes(self.block_bytes)
        self._snapshot = Snapshot(self.layout, self.origin, self.cache_id, self.block_bytes)
        self._open: dict[str, OpenRequest] = {}
        self._prefilling: dict[str, OpenRequest] = {}
        self._replaying: dict[str, OpenRequest] = {}
        self._unanswered: dict[str, OpenRequest] = {}  # preempted while their first tokens may be under way
        # Steps that were scheduled: when, and whether somebody's prefill is in them.
        self._flights: dict[int, tuple[int, bool]] = {}
        self._stepped_ns = self._told_ns = self._shown_ns = 0
        self.failures = self.failures_waiting = self.preemptions = 0
        self.queried = [0, 0]  # first admissions, resumed ones
        self.hit = [0, 0]
        self.recomputed_preempted = self.recomputed_evicted = 0
        self.refused: tuple[str, bool] | None = None  # whom the pool refused last in this step, and whether it waited
        self.resetting = False
        self.epoch = ledger.epoch

    # -- requests --------------------------------------------------------------------------------------

    def added(self, scheduler: Any, request: Any) -> None:
        """The scheduler took a request in."""
        received_ns = self._arrivals.taken(request.request_id)
        if request.request_id not in self._open and scheduler.requests.get(request.request_id) is request:
            self._open[request.request_id] = self._desk.open(request, self.origin, received_ns)
            if not self._traced:  # vLLM itself carries nothing then; with what kvobs added it would with every token
                request.trace_headers = None
        self.leaving()

    def ended(self, scheduler: Any) -> None:
        """Requests were ended from outside, or the scheduler has just been made."""
        self.tell(force=not scheduler.has_unfinished_requests())
        self.leaving()

    def refuses(self, request: Any, waiting: bool, hits: Sequence[Any]) -> None:
        """The pool has too few blocks for a request, although it found these in the prefix cache."""
        self.failures += 1
        self.failures_waiting += waiting
        self.refused = (request.request_id, waiting)
        self._snapshot.hits = (request.request_id, len(hits), sum(map(is_cached, hits)))
        found = self._open.get(request.request_id)
        if found is not None and not found.refused:
            found.refused = True  # each step tries again: one event says it
            found.mark("kvobs.allocation_failed", time.monotonic_ns(), {
                "kvobs.kv.free_blocks": self.ledger.free, "kvobs.kv.cached_blocks": self.ledger.cached})

    def admitted(self, request: Any, hit_tokens: int) -> None:
        """A waiting or preempted request got its blocks: it runs from now on."""
        resumed = request.num_preemptions > 0
        if self._looked_up(request):
            self.queried[resumed] += request.num_tokens
            self.hit[resumed] += hit_tokens
        found = self._open.get(request.request_id)
        if found is None:
            return
        now = time.monotonic_ns()
        evicted = self._find_evicted(request, hit_tokens)
        if not found.preemptions:
            found.cached_tokens = hit_tokens
            found.recomputed += evicted
            self.recomputed_evicted += evicted
        elif found.high:
            self._replaying[found.id] = found
        found.refused = False
        found.outputs = request.num_output_tokens
        found.mark("kvobs.scheduled", now, {"kvobs.prefix.hit_tokens": hit_tokens})
        self._desk.enter(found, "prefill", now, self.origin, self.cache_id, self.layout.blocks_of(found.id))
        self._prefilling[found.id] = found

    def _looked_up(self, request: Any) -> bool:
        """Whether the prefix cache was asked: it may be off, or not wanted, or the tokens came otherwise."""
        return (self._scheduler_now().kv_cache_manager.enable_caching and not request.num_computed_tokens
                and not getattr(request, "skip_reading_prefix_cache", False))

    def _find_evicted(self, request: Any, hit_tokens: int) -> int:
        """Tokens that are computed although the prefix cache had them, because their blocks were evicted."""
        size = self.layout.hash_block_size
        evicted = self.ledger.evicted_hashes
        if not size or not evicted:
            return 0
        keys = map(self.layout.key_of, request.block_hashes[hit_tokens // size:])
        return size * sum(evicted.pop(key, self) is not self for key in keys)  # the cache has them again from now on

    def evicted_for(self, request: Any, blocks: int) -> None:
        """Cached blocks lost their content so that this request could have them."""
        found = self._open.get(request.request_id)
        if found is not None:
            found.evicted += blocks

    def preempting(self, request: Any) -> tuple[int, int, tuple[tuple[str, int], ...]]:
        """A running request is about to lose its blocks: its computed tokens, its blocks, and who holds most."""
        running = [one.request_id for one in self._scheduler_now().running]
        holders = [(one, self.layout.blocks_of(one)) for one in dict.fromkeys([*running, request.request_id])]
        holders.sort(key=lambda holder: -holder[1])
        return request.num_computed_tokens, self.layout.blocks_of(request.request_id), tuple(holders[:MOST_HOLDERS])

    def preempted(self, request: Any, before: tuple[int, int, tuple[tuple[str, int], ...]]) -> None:
        """A running request lost its blocks."""
        tokens, blocks, holders = before
        now = time.monotonic_ns()
        self.preemptions += 1
        cause = "reset" if self.resetting else "blocks"
        wanted_by = self.refused[0] if self.refused is not None and not self.resetting else ""
        found = self._open.get(request.request_id)
        session = ""
        if found is not None:
            session = found.session
            found.preemptions += 1
            found.high = max(found.high, tokens)
            found.mark("kvobs.preempted", now, {"kvobs.cause": cause, "kvobs.wanted_by": wanted_by,
                                                "kvobs.tokens_lost": tokens, "kvobs.blocks": blocks})
            self._desk.enter(found, "preempted", now, self.origin, self.cache_id, blocks)
            self._prefilling.pop(found.id, None)
            self._replaying.pop(found.id, None)
            if found.first_ns is None:
                self._unanswered[found.id] = found
        self._emit(Preemption(now, self.origin, self.cache_id, request.request_id, session, cause, wanted_by, tokens,
                              blocks, holders))

    def ending(self, request: Any) -> None:
        """A request ended; it still has its blocks."""
        found = self._open.pop(request.request_id, None)
        self._prefilling.pop(request.request_id, None)
        self._replaying.pop(request.request_id, None)
        self._unanswered.pop(request.request_id, None)
        if found is not None:
            blocks = self.layout.blocks_of(found.id)
            self._desk.close(found, self.origin, self.cache_id, blocks, Sizes(
                blocks * self.block_bytes, self.pool_bytes, self.buffer_bytes, found.tokens * self.token_bytes))

    # -- steps -----------------------------------------------------------------------------------------

    def scheduling(self) -> None:
        """A step is about to be planned."""
        self.entering()
        self.refused = None

    def scheduled(self, scheduler: Any, output: Any, began_ns: int) -> None:
        """A step was planned: who computes how many tokens in it."""
        shares = output.num_scheduled_tokens
        prefill = any(found.request.num_computed_tokens - shares[name] < found.request.num_tokens
                      for name, found in self._prefilling.items() if name in shares)
        for request_id, tokens in shares.items():
            found = self._open.get(request_id)
            if found is not None:
                found.steps += 1
                found.tokens += tokens
        if self._replaying:
            self._count_replayed(shares)
        if shares:
            if len(self._flights) >= MOST_FLIGHTS:
                self._flights.clear()
            self._flights[id(output)] = began_ns, prefill
        self._snapshot.look(scheduler, self.refused, output)
        self.tell(force=False)
        self.leaving()

    def _count_replayed(self, shares: dict[str, int]) -> None:
        for request_id, found in list(self._replaying.items()):
            after = found.request.num_computed_tokens
            start = after - shares.get(request_id, 0)
            again = max(0, min(after, found.high) - start)
            found.recomputed += again
            self.recomputed_preempted += again
            if after >= found.high:
                del self._replaying[request_id]

    def stepped(self, scheduler: Any, output: Any) -> None:
        """A step's tokens are known."""
        now = time.monotonic_ns()
        began, prefill = self._flights.pop(id(output), (None, False))
        for found in list(self._unanswered.values()):
            if found.request.num_output_tokens:
                found.first_ns = now
                del self._unanswered[found.id]
        for found in list(self._prefilling.values()):
            request = found.request
            if request.num_output_tokens > found.outputs and request.num_computed_tokens >= request.num_tokens - 1:
                if found.first_ns is None:
                    found.first_ns = now
                self._desk.enter(found, "decode", now, self.origin, self.cache_id, self.layout.blocks_of(found.id))
                del self._prefilling[found.id]
        if began is not None:
            held = self.used(self.layout.pinned(scheduler)) * self.block_bytes
            tokens = output.total_num_scheduled_tokens
            self._emit(Step(now, now - max(began, self._stepped_ns), self._spent.take(), self.origin, self.cache_id,
                            prefill, tokens, held, self.pool_bytes, self.buffer_bytes, 0, tokens * self.token_bytes, 0))
        self._stepped_ns = now
        self.tell(force=not scheduler.has_unfinished_requests())  # nothing would tell the end of it later
        self.leaving()

    # -- states ----------------------------------------------------------------------------------------

    def used(self, pinned: int) -> int:
        """Blocks that live requests hold, of those that are not in the pool's queue."""
        return self.ledger.size - int(self.ledger.pool.free_block_queue.num_free_blocks) - pinned

    def gone(self) -> None:
        """The scheduler is gone, and its pool with it."""
        self._emit(CacheGone(time.monotonic_ns(), self.cache_id))

    def entering(self) -> None:
        """The scheduler is called, and will change."""
        self._moves += 1
        self._resting = False

    def leaving(self) -> None:
        """The call is over."""
        self._resting = True

    def tell(self, *, force: bool) -> None:
        """Tell the pool's state, unless that was done a moment ago, and now and then who is in the engine."""
        now = time.monotonic_ns()
        scheduler = self._scheduler()
        if scheduler is None or (not force and now - self._told_ns < TELL_NS):
            return
        self._told_ns = now
        show = force or now - self._shown_ns >= SHOW_NS
        if show:
            self._shown_ns = now
            self._snapshot.audit(scheduler, self.ledger)
        for event in self._states(scheduler, now, show):
            self._emit(event)
        evicted = self.ledger.times.take(now, self.origin, self.cache_id)
        if evicted is not None:
            self._emit(evicted)

    def seen(self, now_ns: int) -> list[Event]:
        """The same from another thread, while a step runs or the engine is idle; nothing where that is not certain."""
        scheduler, moves = self._scheduler(), self._moves
        if scheduler is None or not self._resting or now_ns - self._shown_ns < SHOW_NS:
            return []
        try:
            found = self._states(scheduler, now_ns, True)
        except RuntimeError:  # the engine's thread has just gone on
            return []
        return found if self._resting and self._moves == moves else []

    def _states(self, scheduler: Any, now: int, show: bool) -> list[Event]:
        ledger, layout = self.ledger, self.layout
        pinned = layout.pinned(scheduler)
        used = self.used(pinned)
        tails, tail_bytes = layout.tails(scheduler.running, self.block_bytes)
        found: list[Event] = [
            Blocks(now, self.origin, self.cache_id, self.block_bytes, used, ledger.cached, ledger.free,
                   ledger.allocations, self.failures, self.preemptions),
            PoolWork(now, self.origin, self.cache_id, pinned, tails, tail_bytes, self._snapshot.unexplained,
                     ledger.evictions, ledger.dropped, ledger.touches, self.queried[0], self.hit[0], self.queried[1],
                     self.hit[1], self.recomputed_preempted, self.recomputed_evicted, self.failures_waiting)]
        if show:
            found.append(self._snapshot.states(scheduler, self._open, ledger, self._arrivals.waiting(), now, pinned,
                                               used))
        return found

    def cut(self) -> int:
        """Requests that were open in a pause cannot be told as a whole: forget them; returns how many."""
        cut = list(self._open.values())
        self._open, self._prefilling, self._replaying, self._unanswered = {}, {}, {}, {}
        for found in cut:
            if found.span is not None:
                found.span.span.end()
        return len(cut)

    def _scheduler_now(self) -> Any:
        scheduler = self._scheduler()
        assert scheduler is not None, "Its own hook is running."
        return scheduler

