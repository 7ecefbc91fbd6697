"""Reading the accounting of a scheduler between two iterations of its loop, where SGLang's identity holds."""

from __future__ import annotations

import sys
from typing import Any

from kvobs.sources.sglang._balance import Tokens
from kvobs.sources.sglang._pools import FULL, MAMBA, SWA, PoolSet


def unchecked(scheduler: Any, pools: PoolSet, *, idle: bool) -> str:
    """Why the accounting cannot be checked now; empty where it can.

    SGLang itself checks a busy scheduler only in the loops without disaggregation and pipelines, since elsewhere
    requests that own KV wait in queues of their own, and never one whose counters are no tokens of one pool.
    """
    allocator = pools.allocator
    if pools.observer.enable_hisparse:
        return "HiSparse lets the pool's counters diverge while it backs up to the host"
    if hasattr(allocator, "aggregate_free_size") or allocator.page_size != pools.tree.page_size:
        return "its pages are shared out over ranks, and their counters have other units"
    if getattr(allocator, "free_group", None) is not None:
        return "blocks that were given back are held until the end of a group"
    mode = str(getattr(pools.checker.disaggregation_mode, "value", ""))
    if idle:
        queue = getattr(scheduler, "disagg_decode_transfer_queue", None)
        waiting = mode == "decode" and queue is not None and queue.has_pending_deferred_releases()
        return "blocks wait for transfers of disaggregated serving" if waiting else ""
    if mode != "null":
        return "disaggregated serving keeps requests that own KV in queues of its own"
    if _pipeline_stages() > 1:
        return "pipeline parallelism keeps requests that own KV in several batches"
    if getattr(scheduler, "dllm_config", None) is not None:
        return "diffusion decoding keeps requests that own KV in a queue of its own"
    return ""


def _pipeline_stages() -> int:
    context = sys.modules.get("sglang.srt.runtime_context")
    return int(context.get_parallel().pp_size) if context is not None else 1


def read(pools: PoolSet, *, idle: bool, checked: bool) -> dict[str, Tokens]:
    """Every pool's accounting in tokens; ``checked`` says that what requests hold beyond the tree can be told."""
    stats, observer, tree = pools.observer.get_pool_stats(), pools.observer, pools.tree
    full: int | None = None
    swa: int | None = None
    if checked and idle:
        full, swa = 0, 0
    elif checked:
        full, swa = pools.checker._get_total_uncached_sizes()
    found: dict[str, Tokens] = {}
    if FULL in pools.pools:
        several = pools.checker.is_hybrid_swa or pools.checker.is_hybrid_ssm
        found[FULL] = Tokens(
            stats.full_capacity, stats.full_available_size, stats.full_evictable_size,
            tree.full_protected_size() if several else tree.protected_size(), observer.session_held_tokens(), full)
    if SWA in pools.pools:
        found[SWA] = Tokens(stats.swa_capacity, stats.swa_available_size, stats.swa_evictable_size,
                            tree.swa_protected_size(), observer.session_held_swa_tokens(), swa)
    if MAMBA in pools.pools:
        # Cached states may live in a quantised pool of their own; then the tree owns no slot of this one. What running
        # requests hold of Mamba states SGLang does not add up, so that they are checked when nobody runs.
        own = getattr(pools.rows, "mamba_ckpt_pool", None) is None
        found[MAMBA] = Tokens(pools.rows.mamba_pool.size, stats.mamba_available_size, stats.mamba_evictable_size,
                              tree.mamba_protected_size() if own else 0, observer.session_held_mamba_slots(),
                              0 if checked and idle else None)
    return found


def tail_of(pools: PoolSet) -> int:
    """Tokens that fit into the last pages of the requests that own a row."""
    page = pools.page_size
    return sum(-req.kv.kv_allocated_len % page for req in pools.checker._requests_owning_rows()) if page > 1 else 0
