"""One SGLang scheduler's pools without a GPU: the real tree, allocators, checker, requests and batch methods.

Stand-ins: the scheduler itself (its loop needs CUDA; here an iteration is a call of ``get_next_batch_to_run``), the
published configuration, and the forward pass (nobody computes). All else is SGLang's own code.
"""

from __future__ import annotations

import sys
import types
from array import array
from types import SimpleNamespace
from typing import Any

import torch

WINDOW = 8
LAYERS, HEADS, HEAD_DIM, ITEM = 3, 2, 8, 2  # float16
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * ITEM


def standing_in() -> type:
    """Publish a configuration, and put a scheduler in the place of SGLang's, which cannot be imported."""
    from sglang.srt import runtime_context

    bags = {"spec": {"speculative_algorithm": None}, "serving": {"strip_thinking_cache": False},
            "schedule": {"retraction_policy": "length", "schedule_low_priority_values_first": False},
            "disagg": {"disaggregation_mode": "null", "disaggregation_decode_retraction_backup": "none"},
            "parallel": {"pp_size": 1, "dcp_enabled": False}, "memory": {}, "observability": {},
            "exec": {}}
    kept = {name: SimpleNamespace(**values) for name, values in bags.items()}
    type(runtime_context._CONTEXT).config_bag = lambda _, name: kept[name]
    runtime_context.get_parallel = lambda: kept["parallel"]

    class Scheduler:
        """The attributes that kvobs reads, and the two methods that it hooks."""

        def get_next_batch_to_run(self) -> None:
            """An iteration begins."""

        def on_idle(self) -> None:
            """Nothing is to run."""

        def is_fully_idle(self) -> bool:
            """As SGLang's: no request is in a batch."""
            return not self.world.live

    module = types.ModuleType("sglang.srt.managers.scheduler")
    Scheduler.__module__, Scheduler.__qualname__ = module.__name__, "Scheduler"
    module.Scheduler = Scheduler
    sys.modules[module.__name__] = module
    return Scheduler


def _plain(size: int, page: int) -> tuple[Any, Any]:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    kv = MHATokenToKVPool(size, page, torch.float16, HEADS, HEAD_DIM, LAYERS, "cpu", False)
    if page == 1:
        return kv, TokenToKVPoolAllocator(size, torch.float16, "cpu", kv, False)
    allocator = PagedTokenToKVPoolAllocator(size, page, torch.float16, "cpu", kv, False)
    allocator.use_triton_kernels = False
    return kv, allocator


def _sliding(size: int, page: int) -> tuple[Any, Any]:
    """One layer in three has full attention; the sliding pool has half as many tokens."""
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    kv = SWAKVPool(size, size // 2, page, torch.float16, HEADS, HEAD_DIM, [0, 2], [1], "cpu")
    allocator = SWATokenToKVPoolAllocator(size, size // 2, page, torch.float16, "cpu", kv, False)
    for part in (allocator.full_attn_allocator, allocator.swa_attn_allocator):
        part.use_triton_kernels = False
    return kv, allocator


class World:
    """A pool of ``pages`` pages with a tree; ``live`` maps request ids to real requests."""

    def __init__(self, scheduler_class: type, tree: str, page: int, pages: int = 24) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
        from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        size = page * pages
        self.page, self.size = page, size
        sliding = tree == "sliding"
        self.kv, self.allocator = _sliding(size, page) if sliding else _plain(size, page)
        self.rows = ReqToTokenPool(16, 4 * size, "cpu", False)
        components = (ComponentType.FULL, ComponentType.SWA) if sliding else (ComponentType.FULL,)
        params = CacheInitParams(False, self.rows, self.allocator, page, tree_components=components,
                                 sliding_window_size=WINDOW if sliding else None, tree_core_backend="python")
        self.tree = (RadixCache if tree == "radix" else UnifiedRadixCache)(params)
        self.live: dict[str, Any] = {}
        self.allocated = 0
        batch = SimpleNamespace(reqs=[])
        self.running = batch
        observer = SchedulerPoolStatsObserver(
            tree_cache=self.tree, token_to_kv_pool_allocator=self.allocator, req_to_token_pool=self.rows,
            session_controller=SimpleNamespace(sessions={}), hisparse_coordinator=None, is_hybrid_swa=sliding,
            is_hybrid_ssm=False, enable_hisparse=False, full_tokens_per_layer=size, swa_tokens_per_layer=size // 2,
            max_total_num_tokens=size)
        self.checker = SchedulerInvariantChecker(
            is_hybrid_swa=sliding, is_hybrid_ssm=False, disaggregation_mode=DisaggregationMode.NULL, page_size=page,
            full_tokens_per_layer=size, swa_tokens_per_layer=size // 2, max_total_num_tokens=size, tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator, req_to_token_pool=self.rows, pool_stats_observer=observer,
            get_last_batch=lambda: batch, get_running_batch=lambda: batch, scheduler_stage_metrics=None)
        made = self.scheduler = scheduler_class()
        made.world, made.tree_cache, made.token_to_kv_pool_allocator = self, self.tree, self.allocator
        made.req_to_token_pool, made.pool_stats_observer, made.invariant_checker = self.rows, observer, self.checker
        made.server_args, made.dllm_config = SimpleNamespace(model_path="stand-in"), None

    # -- what a scheduler does ---------------------------------------------------------------------------

    def step(self) -> None:
        """One iteration of the scheduler's loop begins; a tenth of a second has passed since the last."""
        self.scheduler.get_next_batch_to_run()

    def admit(self, name: str, tokens: list[int]) -> bool:
        """Match, lock, make room, allocate; False where the pool had too little."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.common import evict_from_tree_cache, match_kv_cache
        from sglang.srt.sampling.sampling_params import SamplingParams

        req = Req(name, "", array("q", tokens), SamplingParams(max_new_tokens=64))
        req.refresh_fill_ids()
        match_kv_cache(req, self.tree, max_prefix_len=len(tokens) - 1)
        req.lock = self.tree.lock(req.last_node)
        prefix = self.tree.prefix_device_indices(req).to(torch.int64)
        extra = len(tokens) - req.prefix_len
        evict_from_tree_cache(self.tree, extra + self.page)
        slots = self._extend(req.prefix_len, len(tokens), prefix)
        if slots is None:
            self.tree.unlock(req.lock)
            return False
        self.rows.alloc([req])
        self.rows.write((req.kv.req_pool_idx, slice(0, len(tokens))), torch.cat([prefix, slots]).to(torch.int32))
        req.kv.cache_protected_len = req.prefix_len
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = len(tokens)
        self.live[name] = req
        self.running.reqs = list(self.live.values())
        return True

    def _extend(self, start: int, end: int, prefix: torch.Tensor) -> torch.Tensor | None:
        pages = -(-end // self.page) - -(-start // self.page)
        if self.page == 1:
            slots = self.allocator.alloc(end - start)
        else:
            last = prefix[-1:] if start else torch.tensor([-1])
            starts, ends = torch.tensor([start]), torch.tensor([end])
            slots = self.allocator.alloc_extend(starts, starts, ends, ends, last, end - start)
        self.allocated += pages if slots is not None else 0
        return slots

    def fits(self) -> bool:
        """Whether one more page fits, as SGLang's scheduler asks before each decode step."""
        return bool(self.allocator.check_decode_capacity(num_tokens=self.page, tree_cache=self.tree))

    def decode(self, name: str) -> bool:
        """One more token; False where the pool had none."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        req = self.live[name]
        length = req.kv.kv_allocated_len
        if self.tree.supports_swa():
            self.tree.evict_sliding_windows(req, length)
        evict_from_tree_cache(self.tree, self.page if length % self.page == 0 else 0)
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        if self.page == 1:
            slots = self.allocator.alloc(1)
        else:
            now = torch.tensor([length + 1])
            slots = self.allocator.alloc_decode(now, now, row[length - 1:length].to(torch.int64))
        if slots is None:
            return False
        self.allocated += length % self.page == 0
        self.rows.write((req.kv.req_pool_idx, slice(length, length + 1)), slots.to(torch.int32))
        req.output_ids.append(1_000 + length)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = length + 1
        return True

    def checkpoint(self, name: str) -> None:
        """Publish what the request has computed so far; it stays locked."""
        req = self.live[name]
        req.refresh_fill_ids()
        self.tree.checkpoint(req, up_to=req.kv.kv_committed_len)

    def finish(self, name: str) -> None:
        """The request ends and leaves what the tree can keep."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        req = self.live.pop(name)
        self.running.reqs = list(self.live.values())
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        release_kv_cache(req, self.tree, checkpoint=True)

    def retract(self) -> tuple[list[str], list[str]]:
        """SGLang's own retraction of the decode batch, as when the next step does not fit."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        class Batch(ScheduleBatch):
            def filter_batch(self, *_: Any, keep_indices: list[int] | None = None, **__: Any) -> None:
                self.reqs = [self.reqs[index] for index in keep_indices or []]

        batch = object.__new__(Batch)
        batch.reqs, batch.tree_cache, batch.hisparse_coordinator = list(self.live.values()), self.tree, None
        batch.token_to_kv_pool_allocator, batch.req_to_token_pool = self.allocator, self.rows
        batch.spec_algorithm = SpeculativeAlgorithm.NONE
        if batch.check_decode_mem():
            return [], []
        retracted, _, aborted = batch.retract_decode()
        for req in (*retracted, *aborted):
            del self.live[req.rid]
        self.running.reqs = list(self.live.values())
        return [req.rid for req in retracted], [req.rid for req in aborted]

    # -- an account of its own -----------------------------------------------------------------------------

    def census(self, *, sliding: bool = False) -> dict[str, int]:
        """Where each page is, by the slots themselves and no counter of the engine; a page in two places fails."""
        part = "swa_attn_allocator" if sliding else "full_attn_allocator"
        allocator = getattr(self.allocator, part, self.allocator)
        where: dict[int, str] = dict.fromkeys(allocator.get_all_free_pages().tolist(), "free")
        for slots, locked in self._nodes(int(sliding)):
            for page in {slot // self.page for slot in slots}:
                assert page not in where, f"page {page} is {where[page]} and in the tree"
                where[page] = "locked" if locked else "cached"
        for req in self.live.values():
            row = self.rows.req_to_token[req.kv.req_pool_idx, :req.kv.kv_allocated_len].to(torch.int64)
            if sliding:  # what has slid out of the window maps to the padding slot
                row = self.allocator.full_to_swa_index_mapping[row]
            for page in {slot // self.page for slot in row.tolist() if slot or not sliding}:
                assert where.get(page) != "free", f"page {page} of {req.rid} is free"
                where.setdefault(page, "own")
        states = list(where.values())
        counted = {state: states.count(state) for state in ("free", "cached", "locked", "own")}
        counted["nowhere"] = allocator.size // self.page - len(where)
        return counted

    def _nodes(self, component: int) -> list[tuple[list[int], bool]]:
        found, stack = [], [self.tree.root_node]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node is self.tree.root_node:
                continue
            data = node.component_data[component] if hasattr(node, "component_data") else node
            if data.value is not None:
                found.append((data.value.tolist(), data.lock_ref > 0))
        return found
