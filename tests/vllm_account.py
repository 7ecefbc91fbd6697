"""An account of vLLM's scheduler and block pool that shares no code with kvobs.

A subclass of vLLM's own scheduler (``scheduler_cls``) writes down what it did, and classifies every block after each of
its calls by vLLM's public tables: which live requests hold it, whether its content can be found by its hash, whether it
is in the queue of free ones. Runs in the Python that has vLLM.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

LOG: list[tuple[int, Any]] = []  # what kvobs published, and in which step
BOOKS: list[Book] = []


def publish(event: Any) -> None:
    """Kvobs published an event."""
    LOG.append((BOOKS[-1].step if BOOKS else 0, event))


def _queued(pool: Any) -> set[int]:
    return {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}


def _findable(pool: Any) -> set[int]:
    """Blocks whose content a look-up would find, by the pool's own map from hash to block."""
    found: set[int] = set()
    for value in pool.cached_block_hash_to_block._cache.values():
        found |= set(value) if isinstance(value, dict) else {value.block_id}
    return found


class Book:
    """What one scheduler did. ``step`` counts its plans; a request's life is the list of its phases' names."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._sizes = [int(group.kv_cache_spec.block_size) for group in
                       scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups]
        self.step = 0
        self.preemptions: list[dict[str, Any]] = []
        self.evictions: list[tuple[int, int]] = []
        self.failures: list[tuple[int, str, bool]] = []
        self.looks: list[dict[str, Any]] = []
        self.lives: dict[str, list[str]] = {}
        self.count: Counter[str] = Counter()
        self.reported: Counter[str] = Counter()  # by vLLM itself
        self.resetting = False
        self._highest: dict[str, int] = {}  # tokens of a request that were ever computed
        self._content: dict[int, tuple[int, ...]] = {}
        self._evicted: set[tuple[int, ...]] = set()
        self._outputs: dict[str, int] = {}
        self.first: dict[str, tuple[int, int]] = {}  # the first token came between these times
        self._listen()

    def _listen(self) -> None:
        pool, manager = self._pool, self._scheduler.kv_cache_manager

        def get_new_blocks(*args: Any, **kwargs: Any) -> Any:
            before = _findable(pool)
            found = type(pool).get_new_blocks(pool, *args, **kwargs)
            self.count["allocations"] += len(found)
            for block in found:
                if block.block_id in before:
                    self.evictions.append((self.step, block.block_id))
                    if block.block_id in self._content:
                        self._evicted.add(self._content.pop(block.block_id))
            return found

        def touch(blocks: Any) -> Any:
            self.count["touches"] += sum(not block.is_null for block in blocks)
            return type(pool).touch(pool, blocks)

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            waits = request not in self._scheduler.running
            found = type(manager).allocate_slots(manager, request, *args, **kwargs)
            if found is None:
                self.failures.append((self.step, request.request_id, waits))
            return found

        pool.get_new_blocks, pool.touch, manager.allocate_slots = get_new_blocks, touch, allocate_slots

    # -- moments ---------------------------------------------------------------------------------------

    def preempts(self, request: Any) -> None:
        """A running request is about to lose its blocks."""
        wanted = [one[1] for one in self.failures if one[0] == self.step][-1:]
        self.preemptions.append({
            "step": self.step, "request": request.request_id, "tokens": request.num_computed_tokens,
            "blocks": len(set(self.held(request.request_id))), "cause": "reset" if self.resetting else "blocks",
            "wanted_by": "" if self.resetting else "".join(wanted)})
        self.lives[request.request_id].append("preempted")

    def planned(self, output: Any) -> None:
        """A step was planned."""
        cached = output.scheduled_cached_reqs
        resumed = set(getattr(cached, "resumed_req_ids", ()))
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, tokens in output.num_scheduled_tokens.items():
            start, request = starts[name], self._scheduler.requests[name]
            highest = self._highest.get(name, 0)
            self.count["recomputed preempted"] += max(0, min(start + tokens, highest) - start)
            self._highest[name] = max(highest, start + tokens)
            if name in resumed or name not in self._outputs:
                self._admitted(request, start, name in resumed)

    def _admitted(self, request: Any, hit: int, resumed: bool) -> None:
        kind = "resumed" if resumed else "first"
        if self._scheduler.kv_cache_manager.enable_caching:
            self.count[f"queried {kind}"] += request.num_tokens
            self.count[f"hit {kind}"] += hit
        self.lives[request.request_id].append("prefill")
        self._outputs[request.request_id] = request.num_output_tokens
        if not resumed:
            tokens, size = tuple(request.all_token_ids), self._sizes[0]
            for end in range((hit // size + 1) * size, len(tokens) + 1, size):
                self.count["recomputed evicted"] += size * (tokens[:end] in self._evicted)

    def held(self, request_id: str) -> list[int]:
        """Numbers of the blocks in a request's tables, the null block left out."""
        null = self._pool.null_block.block_id
        return [one for group in self._scheduler.kv_cache_manager.get_block_ids(request_id) for one in group
                if one != null]

    def look(self, where: str, mark: int) -> None:
        """Classify every block, beside what kvobs published since ``mark``."""
        scheduler, pool = self._scheduler, self._pool
        null, queued, findable = pool.null_block.block_id, _queued(pool), _findable(pool)
        held = Counter(one for name in scheduler.requests for one in set(self.held(name)))
        states: Counter[str] = Counter()
        for block in pool.blocks:
            number = block.block_id
            state = ("pinned" if number == null or (number not in held and number not in queued) else
                     "used" if number in held else "cached" if number in findable else "free")
            states[state] += 1
        tail = sum(max(0, len(table) * size - request.num_computed_tokens) for request in scheduler.running
                   for table, size in zip(scheduler.kv_cache_manager.get_block_ids(request.request_id), self._sizes,
                                          strict=True) if table)
        told = {type(event).__name__: event for _, event in LOG[mark:]}
        blocks, work = told.get("Blocks"), told.get("PoolWork")
        self.looks.append({
            "step": self.step, "where": where,
            "account": {**{name: states[name] for name in ("used", "cached", "free", "pinned")},
                        **self.sums(), "tail_tokens": tail},
            "kvobs": None if blocks is None or work is None else {
                "used": blocks.used, "cached": blocks.cached, "free": blocks.free, "pinned": work.pinned,
                "allocations": blocks.allocations, "touches": work.touches, "evictions": work.evictions,
                "failures": blocks.failures, "failures_waiting": work.failures_waiting,
                "preemptions": blocks.preemptions, "queried_tokens": work.queried_tokens,
                "hit_tokens": work.hit_tokens, "resumed_queried_tokens": work.resumed_queried_tokens,
                "resumed_hit_tokens": work.resumed_hit_tokens,
                "recomputed_preempted_tokens": work.recomputed_preempted_tokens,
                "recomputed_evicted_tokens": work.recomputed_evicted_tokens, "tail_tokens": work.tail_tokens},
            "unexplained": None if work is None else work.unexplained})
        self._remember()

    def sums(self) -> dict[str, int]:
        """What happened so far, by the names of kvobs's events."""
        count = self.count
        return {"allocations": count["allocations"], "touches": count["touches"], "evictions": len(self.evictions),
                "failures": len(self.failures), "failures_waiting": sum(one[2] for one in self.failures),
                "preemptions": len(self.preemptions), "queried_tokens": count["queried first"],
                "hit_tokens": count["hit first"], "resumed_queried_tokens": count["queried resumed"],
                "resumed_hit_tokens": count["hit resumed"],
                "recomputed_preempted_tokens": count["recomputed preempted"],
                "recomputed_evicted_tokens": count["recomputed evicted"]}

    def _remember(self) -> None:
        """What is in which block: content that was computed again is not lost any more."""
        scheduler, size = self._scheduler, self._sizes[0]
        for name, request in scheduler.requests.items():
            life = self.lives.get(name)
            if life is not None and life[-1] == "prefill" and request.num_output_tokens > self._outputs[name]:
                life.append("decode")
            tokens = tuple(request.all_token_ids)
            known = min(request.num_computed_tokens, len(tokens)) // size
            for number, block in enumerate(scheduler.kv_cache_manager.get_block_ids(name)[0][:known]):
                self._content[block] = tokens[:(number + 1) * size]
                self._evicted.discard(self._content[block])


class _Accounting:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.book = Book(self)
        BOOKS.append(self.book)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.book.step += 1
        mark = len(LOG)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.book.planned(output)
        self.book.look("schedule", mark)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        mark, began = len(LOG), time.monotonic_ns()
        unanswered = [one for one in self.requests.values() if not one.num_output_tokens]  # type: ignore[attr-defined]
        result = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for request in unanswered:
            if request.num_output_tokens:
                self.book.first[request.request_id] = began, time.monotonic_ns()
        self.book.look("update", mark)
        return result

    def add_request(self, request: Any) -> None:
        self.book.lives.setdefault(request.request_id, ["queued"])
        super().add_request(request)  # type: ignore[misc]

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        mark = len(LOG)
        result = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self.book.look("finish", mark)
        return result

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        life = self.book.lives[request.request_id]
        if life[-1] == "prefill" and request.num_output_tokens > self.book._outputs[request.request_id]:
            life.append("decode")
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.book.preempts(request)
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        self.book.resetting = True
        mark = len(LOG)
        try:
            return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.book.resetting = False
            self.book.look("reset", mark)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        found = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        stats = getattr(found, "prefix_cache_stats", None)
        if stats is not None:
            for name in ("queries", "hits", "preempted_queries", "preempted_hits"):
                self.book.reported[name] += getattr(stats, name)
        return found


class Account(_Accounting, AsyncScheduler):
    """The account of a scheduler that plans one step ahead, as vLLM does by default."""


class StepAccount(_Accounting, Scheduler):
    """The account of a scheduler that plans each step after the last."""
