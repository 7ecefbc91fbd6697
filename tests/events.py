"""Events for tests: one plain example of each type, and builders with the fields that a test does not care about."""

from __future__ import annotations

from typing import Any

from kvobs import model
from kvobs.allocator.memory_map import pack
from kvobs.allocator.state import Block, Segment

MAPPED = (Segment(1 << 40, 4 << 20, 0, 0, False, False, (
    Block(1 << 40, 3 << 20, (3 << 20) - 100, 2, 0), Block((1 << 40) + (3 << 20), 1 << 20, 0, 0))),)
ORIGIN = model.Origin("transformers", "tiny", "DynamicCache", "cpu", "float32")


def origin(model_name: str = "tiny", device: str = "cpu", cache: str = "DynamicCache") -> model.Origin:
    return model.Origin("transformers", model_name, cache, device, "float32")


def step(**fields: Any) -> model.Step:
    values: dict[str, Any] = {
        "t_ns": 1_000, "duration_ns": 60_000_000, "hook_ns": 50_000, "origin": ORIGIN, "cache_id": 1, "prefill": False,
        "tokens": 1, "kv_bytes": 1_000, "kv_reserved_bytes": 1_200, "kv_largest_bytes": 100, "reallocations": 4,
        "bytes_written": 100, "bytes_copied": 900}
    return model.Step(**values | fields)


def turn(**fields: Any) -> model.Turn:
    values: dict[str, Any] = {
        "t_ns": 3_000_000_000, "start_ns": 1_000_000_000, "wall_start_ns": 1_700_000_000_000_000_000, "origin": ORIGIN,
        "cache_id": 1, "session": "anna", "priority": "normal", "turn": 2, "outcome": "ok", "steps": 5,
        "prompt_tokens": 11, "cached_tokens": 4, "new_tokens": 5, "kv_bytes": 1_000, "kv_reserved_bytes": 1_600,
        "kv_largest_bytes": 400, "reallocations": 20, "bytes_written": 500, "bytes_copied": 1_500,
        "migrations": (("cpu", "meta", 2, 64),), "ttft_ns": 500_000_000, "tpot_ns": 375_000_000,
        "prefill_ns": 400_000_000, "hook_ns": 9_000, "trace_id": "", "span_id": "", "sampled": False}
    return model.Turn(**values | fields)


def blocks(**fields: Any) -> model.Blocks:
    values: dict[str, Any] = {
        "t_ns": 1_000, "origin": origin(cache="PagedAttentionCache"), "cache_id": 7, "block_bytes": 4_096, "used": 3,
        "cached": 2, "free": 11, "allocations": 5, "failures": 1, "preemptions": 1}
    return model.Blocks(**values | fields)


def attention(**fields: Any) -> model.Attention:
    values: dict[str, Any] = {
        "t_ns": 1_000, "hook_ns": 4_000_000, "origin": ORIGIN, "cache_id": 1, "session": "anna", "turn": 2,
        "layers": "full", "every": 3, "tokens": 100, "queries": 12, "local_sum": 9.5, "chance_sum": 7.25,
        "entries": 600, "alive": 450, "blocks": 21, "pending": 6, "to_pending": 2, "to_active": 1,
        "reclaimable_bytes": 12_288}
    return model.Attention(**values | fields)


EXAMPLES: tuple[model.Event, ...] = (
    step(by_device=(("cpu", 600, 700, 100), ("meta", 400, 500, 100))),
    model.Migration(5, ORIGIN, 1, "cpu", "meta", 2, 64, 1_500),
    model.Rewrite(5, ORIGIN, 1, 4, 4_000),
    model.Resized(5, ORIGIN, 1, 900, 1_200, 100),
    model.CacheGone(6, 1),
    blocks(),
    turn(),
    model.Allocation(7, "cuda:0", 512, 300_000),
    model.AllocationLatencies(7, "cpu", (0, 3, 1, *13 * (0,), 1), 2_600_041_000),
    model.AllocatorState(8, "cuda:0", 2_000_000, 1_500_000, 400_000),
    model.OutOfMemory(9, ORIGIN, "anna", "out of memory"),
    model.HookFailed(10, "transformers", "Cache.update", "ValueError: no"),
    attention(),
    model.CacheUpdates(11, ORIGIN, 1, "full", (20_000, 30_000)),
    model.Poll(12, "host", 900_000, (("process.memory.usage", (), 4096.0), ("process.paging.faults", ("minor",), 7.0))),
    model.FlightRecord(13, "out_of_memory", "cuda:0", 512, "CUDA out of memory", "[]", "{}"),
    model.MemoryMap(14, "cuda:0", 2_000_000, 1_000_000_000, True, 4 << 20, 3 << 20, 3 << 20, None, 2, "",
                    (("kv", "anna", 1), ("weights", "tiny", None)), pack(MAPPED)),
    model.PoolWork(15, ORIGIN, 2, 1, 40, 1_280, 0, 5, 1, 6, 900, 320, 200, 64, 128, 32, 2),
    model.Evictions(16, ORIGIN, 2, (0, 2, *14 * (0,)), 120_000_000, (1, 1, *14 * (0,)), 60_000_000),
    model.Preemption(17, ORIGIN, 2, "request-1", "anna", "blocks", "request-2", 96, 3, (("request-2", 5),)),
    model.RequestPhase(18, 10, ORIGIN, 2, "request-1", "anna", "prefill", "", 3),
    model.RequestStates(
        19, ORIGIN, 2, 4_096, 8, (("running", "", 1), ("waiting", "blocks", 1)),
        (model.RequestRow("request-1", "anna", "normal", "waiting", "blocks", "queued", 5, 6, 40, 0, 0, 0, 0, 0),), 0,
        "request-1", 2, "WAIT", "It waits for two blocks."),
    model.ProcessRole(20, "vllm", "engine_core", (("dp", 0), ("tp", 1))),
    model.Decided(21, "cuda:0", "default", "act", 1, "closed", "open", "Level 1 (reorganise) is open: it holds.",
                  (("headroom", 0.05), ("verdict", "RECLAIM")), ("level 2 does not follow before 2 s of level 1",), 3),
    model.ActionTaken(22, "torch", 1, "empty_cache", False, 3, True, 2 << 20, 1_500_000, False, ""),
    model.Availability("cuda", False, "There is no CUDA device."),
)
