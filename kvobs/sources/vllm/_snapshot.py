"""Who is in a scheduler and why they wait, as its own queues say."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvobs.allocator.paged import PagedState, paged_verdict
from kvobs.model import Origin, RequestRow, RequestStates
from kvobs.sources.vllm._arrivals import Arrival
from kvobs.sources.vllm._layout import Layout
from kvobs.sources.vllm._pool import PoolLedger, is_cached
from kvobs.sources.vllm._requests import OpenRequest

MOST_ROWS = 64
AUDIT_SHARE = 1_000  # counting the pool block by block takes at most one in so many nanoseconds of the engine's
_QUEUES = ("kv_holding_waiting", "waiting", "skipped_waiting")
_BLOCKED = {"WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "grammar", "WAITING_FOR_FSM": "grammar",
            "WAITING_FOR_REMOTE_KVS": "remote_kv", "WAITING_FOR_STREAMING_REQ": "stream"}


def waiting(scheduler: Any) -> Iterator[Any]:
    """Requests that wait, in the order in which they are admitted (as far as the queues tell it)."""
    return itertools.chain.from_iterable(getattr(scheduler, name, ()) for name in _QUEUES)


class Snapshot:
    """What ``RequestStates`` says, and the states of a pool that are too expensive to count at every step."""

    def __init__(self, layout: Layout, origin: Origin, cache_id: int, block_bytes: int) -> None:
        self._layout = layout
        self._origin = origin
        self._cache_id = cache_id
        self._block_bytes = block_bytes
        self._head_reason = ""
        self._head = ""
        # Of the request that the pool refused last: blocks found in the prefix cache, and those that nobody holds.
        self.hits: tuple[str, int, int] = ("", 0, 0)
        self._audit_ns = 0
        self.unexplained = 0

    def look(self, scheduler: Any, refused: tuple[str, bool] | None, output: Any) -> None:
        """A step was planned: why is the first one in the queue not in it?"""
        head = next(waiting(scheduler), None)
        if head is None:
            self._head = self._head_reason = ""
            return
        self._head = head.request_id
        running, most = len(scheduler.running), slots(scheduler)
        if str(getattr(getattr(scheduler, "_pause_state", None), "name", "UNPAUSED")) != "UNPAUSED":
            self._head_reason = "paused"
        elif refused is not None:
            self._head_reason = "blocks"
        elif running >= most:
            self._head_reason = "slots"
        elif output.total_num_scheduled_tokens >= scheduler.max_num_scheduled_tokens:
            self._head_reason = "tokens"
        else:
            self._head_reason = ""

    def audit(self, scheduler: Any, ledger: PoolLedger) -> None:
        """Count every block of the pool."""
        layout = self._layout
        began = time.monotonic_ns()
        if began < self._audit_ns:
            return
        held = layout.held(scheduler)
        cached = free = 0
        for block in ledger.pool.blocks:
            if is_cached(block):
                cached += 1
            elif block.ref_cnt == 0 and not block.is_null:
                free += 1
        self.unexplained = ledger.size - len(held) - cached - free - layout.pinned(scheduler)
        if cached != ledger.cached:  # something changed a block that no hook saw
            ledger.drift += abs(cached - ledger.cached)
            ledger.cached = cached
        ended = time.monotonic_ns()
        self._audit_ns = ended + AUDIT_SHARE * (ended - began)

    def states(self, scheduler: Any, known: Mapping[str, OpenRequest], ledger: PoolLedger, arrivals: Sequence[Arrival],
               now_ns: int, pinned: int, used: int) -> RequestStates:
        """Who is in the engine now."""
        queue = list(waiting(scheduler))
        reasons = [self._reason(request, index) for index, request in enumerate(queue)]
        counts = Counter((_state(request), reason) for request, reason in zip(queue, reasons, strict=True))
        counts["running", ""] += len(scheduler.running)
        holding = sorted(scheduler.running, key=lambda request: -self._layout.blocks_of(request.request_id))
        first = min(len(queue), max(MOST_ROWS // 2, MOST_ROWS - len(holding)))
        shown = [(request, "") for request in holding[:MOST_ROWS - first]]
        shown += list(zip(queue[:first], reasons, strict=False))
        rows = [self._row(request, reason, known.get(request.request_id)) for request, reason in shown]
        if arrivals:
            counts["waiting", "step"] += len(arrivals)
            rows += map(_arrived, arrivals[:MOST_ROWS - len(rows)])
        found = RequestStates(now_ns, self._origin, self._cache_id, self._block_bytes, slots(scheduler),
                              tuple((state, reason, number) for (state, reason), number in counts.items() if number),
                              tuple(rows), len(queue) + len(holding) + len(arrivals) - len(rows))
        head = next((request for request in queue if _state(request) != "running"), None)
        if head is None or self._reason(head, 0) in ("grammar", "remote_kv", "stream"):
            return found
        known_as, hits, idle = self.hits
        if known_as != head.request_id:
            hits = idle = 0
        needs = self._layout.needs(head, scheduler.max_model_len, hits)
        kept = int(getattr(scheduler.kv_cache_manager, "watermark_blocks", 0) or 0)
        state = PagedState(ledger.size, used, ledger.cached - idle, ledger.free, pinned)
        verdict, sentence = paged_verdict(needs, state, kept=kept if scheduler.running else 0, found=hits)
        fields = {name: getattr(found, name) for name in found.__struct_fields__}
        return RequestStates(**fields | {"next_request": head.request_id, "next_needs": needs, "next_verdict": verdict,
                                         "next_sentence": sentence})

    def _reason(self, request: Any, index: int) -> str:
        blocked = _BLOCKED.get(request.status.name)
        if blocked is not None:
            return blocked
        if index == 0 or request.request_id == self._head:
            return self._head_reason
        return "turn" if self._head_reason in ("blocks", "tokens") else self._head_reason

    def _row(self, request: Any, reason: str, found: OpenRequest | None) -> RequestRow:
        return RequestRow(
            request=request.request_id, session=found.session if found else "",
            priority=found.priority if found else "normal", state=_state(request), reason=reason,
            phase=found.phase if found else "", arrived_ns=found.arrived_ns if found else None,
            since_ns=found.since_ns if found else None, prompt_tokens=request.num_prompt_tokens,
            new_tokens=request.num_output_tokens, computed_tokens=request.num_computed_tokens,
            cached_tokens=found.cached_tokens if found else None, blocks=self._layout.blocks_of(request.request_id),
            preemptions=request.num_preemptions)


def _arrived(one: Arrival) -> RequestRow:
    return RequestRow(one.request, one.session, "normal", "waiting", "step", "queued", one.received_ns, one.received_ns,
                      one.prompt_tokens, 0, 0, 0, 0, 0)


def slots(scheduler: Any) -> int:
    """How many requests may run at once."""
    return int(getattr(scheduler, "max_num_active_reqs", None) or scheduler.max_num_running_reqs)


def _state(request: Any) -> str:
    name = request.status.name
    return {"RUNNING": "running", "PREEMPTED": "preempted"}.get(name, "waiting")
