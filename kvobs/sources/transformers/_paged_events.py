"""What the hooks of continuous batching saw, turned into events.

Every method runs on the engine's thread, inside a hook, but ``opening``, ``named`` and ``closing_down``. Methods
return the manager whose account the time they took goes to (None where it is not known).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from kvobs.model import CacheGone, Emit, Migration, OutOfMemory, Step
from kvobs.sources._identity import ByIdentity
from kvobs.sources.transformers._paged_pool import Flight, PoolRecord
from kvobs.sources.transformers._paged_requests import (
    Desk,
    OpenRequest,
    Requests,
    is_out_of_memory,
    origin_of,
    token_counts,
)

_DECODING_STATUS = 2  # RequestStatus.DECODING: below it a token read for the request is one the engine throws away


def _batch(ios: Any) -> list[Any]:
    """The batch of the step that was just launched (asynchronous batching has swapped its two buffers by then)."""
    pairs = getattr(ios, "io_pairs", None)
    found: list[Any] = (ios if pairs is None else pairs[1 - ios.current_pair].host_io).requests_in_batch
    return found


class PagedEvents:
    """The pools and managers of the process and what is open in them."""

    def __init__(self, desk: Desk, emit: Emit) -> None:
        self._desk = desk
        self._emit = emit
        self._pools: ByIdentity[PoolRecord] = ByIdentity()
        self._inner: dict[int, PoolRecord] = {}
        self._managers: ByIdentity[Requests] = ByIdentity()
        self._adding = threading.local()

    def closing_down(self) -> None:
        """Forget everything and end the spans of requests that are open."""
        self._pools.clear()
        self._inner.clear()
        for requests in self._managers.clear():
            requests.drop_all()

    def cut(self) -> int:
        """Observation was interrupted: steps in flight and open requests are dropped; returns how many requests."""
        for pool in self._pools.records():
            pool.flights.clear()
        return sum(requests.drop_all() for requests in self._managers.records())

    # -- who -------------------------------------------------------------------------------------------

    def _pool(self, cache: Any) -> PoolRecord:
        found = self._pools.get(cache)
        if found is None:
            found = self._pools.add(cache, PoolRecord(cache), self._pool_gone)
            self._inner[found.inner_id] = found
        return found

    def _pool_gone(self, pool: PoolRecord) -> None:
        # Runs inside the garbage collector, possibly anywhere: nothing here may take a lock.
        self._inner.pop(pool.inner_id, None)
        if pool.origin is not None:
            self._emit(CacheGone(time.monotonic_ns(), pool.cache_id))

    def _requests(self, router: Any) -> Requests:
        found = self._managers.get(router)
        # The spans of a vanished manager's requests are dropped: ending them could lock inside the collector.
        return found if found is not None else self._managers.add(router, Requests(self._desk), lambda gone: None)

    def _of(self, processor: Any) -> PoolRecord:
        pool = self._pool(processor.cache)
        if pool.requests is None:
            pool.requests = self._requests(processor.output_router)
        return pool

    def _tell(self, pool: PoolRecord, *, only_changes: bool) -> None:
        blocks = pool.blocks(only_changes=only_changes)
        if blocks is not None:
            self._emit(blocks)

    # -- requests come ---------------------------------------------------------------------------------

    def opening(self, manager: Any) -> tuple[Requests, OpenRequest]:
        """A caller hands in a request; the engine names it while it makes its state."""
        pair = self._requests(manager.output_router), self._desk.open(origin_of(manager.model))
        self._adding.pair = pair
        return pair

    def opened(self) -> None:
        """The caller's call is over."""
        self._adding.pair = None

    def named(self, state: Any) -> Requests | None:
        """A request's state was made: on a thread that hands one in, before the engine can see it."""
        pair = getattr(self._adding, "pair", None)
        if pair is not None:
            self._adding.pair = None
            requests, request = pair
            requests.name(request, state.request_id)
        return None

    # -- steps -----------------------------------------------------------------------------------------

    def preparing(self, processor: Any) -> Requests | None:
        """A batch is about to be scheduled."""
        return self._of(processor).requests

    def prepared(self, processor: Any, runs: bool) -> Requests | None:
        """Scheduling is over; without a step to follow, blocks may have been given back (cancelled requests)."""
        pool = self._of(processor)
        if not runs:
            self._tell(pool, only_changes=True)
        return pool.requests

    def stepped(self, processor: Any, model: Any, began_ns: int, ended_ns: int) -> Requests | None:
        """A step was computed (or, with asynchronous batching, launched)."""
        pool = self._of(processor)
        if pool.origin is None:
            pool.origin = origin_of(model)
        tokens, most = 0, 0
        for future in _batch(processor.inputs_and_outputs):
            query = future.query_length
            tokens += query
            if query > most:
                most = query
        used, _, _ = pool.counts()
        pool.flights.append(Flight(began_ns, ended_ns, tokens, most > 1, used * pool.block_bytes))
        return pool.requests

    def read(self, ios: Any, batch: Iterable[Any]) -> Requests | None:
        """The tokens of a step are on the host."""
        pool = self._pool(ios.cache)
        now = time.monotonic_ns()
        pool.read_before_ns, pool.read_ns = pool.read_ns, now
        requests = pool.requests
        if requests is None:
            return None
        for future in batch:
            state = future.state
            request = requests.get(state.request_id)
            if request is None:
                continue
            request.steps += 1
            request.tokens += future.query_length
            if request.pool is None:
                request.pool = pool
                request.admitted_ns = pool.flights[0].began_ns if pool.flights else now
            if future.has_new_token:
                if request.first_ns is None and state.status >= _DECODING_STATUS:
                    request.first_ns = now
                request.last_ns = now
        return requests

    def updated(self, processor: Any) -> Requests | None:
        """A batch's results were handed out: its step is complete."""
        pool = self._of(processor)
        requests, origin = pool.requests, pool.origin
        if pool.flights and origin is not None and requests is not None:
            flight = pool.flights.popleft()
            began, ended = flight.began_ns, flight.ended_ns
            if processor.use_async_batching:
                began, ended = max(began, pool.read_before_ns), pool.read_ns
            self._emit(Step(
                t_ns=ended, duration_ns=ended - began, hook_ns=requests.take_hook_ns(), origin=origin,
                cache_id=pool.cache_id, prefill=flight.prefill, tokens=flight.tokens, kv_bytes=flight.held_bytes,
                kv_reserved_bytes=pool.reserved_bytes, kv_largest_bytes=pool.reserved_bytes, reallocations=0,
                bytes_written=flight.tokens * pool.bytes_per_token, bytes_copied=pool.take_copied()))
        self._tell(pool, only_changes=False)
        return requests

    # -- requests go -----------------------------------------------------------------------------------

    def delivering(self, router: Any, outputs: Iterable[Any]) -> Requests | None:
        """Results are about to reach their readers; some are final."""
        requests = self._requests(router)
        for output in outputs:
            if output.is_finished():
                requests.end(output.request_id, "ok", (len(output.prompt_ids), len(output.generated_tokens)))
        return requests

    def failing(self, router: Any, state: Any, error: BaseException) -> Requests | None:
        """A request is about to be failed."""
        requests = self._requests(router)
        outcome = "out_of_memory" if is_out_of_memory(error) else "error"
        requests.end(state.request_id, outcome, token_counts(state), error)
        return requests

    def cancelled(self, scheduler: Any, states: Iterable[Any]) -> Requests | None:
        """Requests were taken out of the scheduler."""
        requests = self._pool(scheduler.cache).requests
        if requests is not None:
            for state in states:
                requests.end(state.request_id, "cancelled", token_counts(state))
        return requests

    def all_failed(self, processor: Any) -> Requests | None:
        """The engine gave up on everything: no step in flight will be read."""
        pool = self._of(processor)
        pool.flights.clear()
        self._tell(pool, only_changes=True)
        return pool.requests

    def critical(self, manager: Any, error: BaseException) -> Requests | None:
        """The generation loop ends with an error."""
        if is_out_of_memory(error):
            self._emit(OutOfMemory(time.monotonic_ns(), origin_of(manager.model), "", str(error)[:200]))
        return None

    # -- the pool --------------------------------------------------------------------------------------

    def cache_made(self, cache: Any) -> Requests | None:
        """A paged cache exists."""
        self._pool(cache)
        return None

    def handed_out(self, inner: Any, index: int, blocks: int) -> None:
        """The pool gave blocks to an attention group (a CPU swap pool is none of ours)."""
        pool = self._inner.get(id(inner))
        if pool is not None:
            pool.allocations += blocks * pool.weights[index]

    def refused(self, cache: Any) -> None:
        """The pool had no room for a request's tokens."""
        self._pool(cache).failures += 1

    def matched(self, cache: Any, request_id: str, tokens: int) -> Requests | None:
        """A request found the start of its prompt in the pool. Only its first admission counts."""
        requests = self._pool(cache).requests
        request = requests.get(request_id) if requests is not None else None
        if tokens and request is not None and not request.steps and not request.preemptions:
            request.cached_tokens = tokens
        return requests

    def forked(self, cache: Any, source: Any, wanted: list[str], fitted: list[str],
               copies: dict[str, int]) -> Requests | None:
        """A prompt was shared with further answers; those that did not fit start from scratch."""
        pool = self._pool(cache)
        if len(fitted) < len(wanted):
            pool.failures += 1
        requests = pool.requests
        parent = requests.get(source.request_id) if requests is not None else None
        if requests is None or parent is None:
            return requests
        each = pool.bytes_of(copies) // len(fitted) if fitted else 0  # every answer copies the same blocks
        for child in requests.fork(parent, wanted):
            if child.id in fitted:
                child.cached_tokens = source.current_len()
                child.bytes_copied = each
            else:
                child.pool = child.admitted_ns = None
        return requests

    def copied(self, cache: Any, blocks: dict[str, int]) -> Requests | None:
        """Blocks were copied inside the pool."""
        pool = self._pool(cache)
        pool.copied += pool.bytes_of(blocks)
        return pool.requests

    def freeing(self, cache: Any, request_id: str) -> Requests | None:
        """A request is about to give its blocks back."""
        pool = self._pool(cache)
        request = pool.requests.get(request_id) if pool.requests is not None else None
        if request is not None:
            request.kv_bytes = pool.held_by(request_id)
        return pool.requests

    def preempted(self, offloading: Any, before: list[str]) -> Requests | None:
        """The engine made room: active requests that are active no more lost their blocks."""
        pool = self._pool(offloading.cache)
        now = time.monotonic_ns()
        for request_id in before:
            if request_id not in offloading.scheduler.active_requests:
                pool.preemptions += 1
                request = pool.requests.get(request_id) if pool.requests is not None else None
                if request is not None:
                    request.preemptions += 1
                    request.mark("kvobs.preempted", now, {})
        return pool.requests

    def moved(self, cache: Any, src: str, dst: str, moves: dict[str, dict[str, int]], began_ns: int) -> Requests | None:
        """Blocks of requests changed device: ``moves`` is request -> attention group -> blocks."""
        pool = self._pool(cache)
        now = time.monotonic_ns()
        buffers = total = 0
        for request_id, blocks in moves.items():
            number, size = sum(blocks.values()), pool.bytes_of(blocks)
            buffers, total = buffers + number, total + size
            request = pool.requests.get(request_id) if pool.requests is not None else None
            if request is not None and number:
                request.moved(src, dst, number, size)
                request.mark("kvobs.migration", now, {"kvobs.src": src, "kvobs.dst": dst, "kvobs.bytes": size})
        if buffers and pool.origin is not None:
            self._emit(Migration(now, pool.origin, pool.cache_id, src, dst, buffers, total, now - began_ns))
        return pool.requests
