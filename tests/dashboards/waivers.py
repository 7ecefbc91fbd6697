"""What no scenario can show on a machine without the hardware or the engine for it, with the reason.

A waiver that is not needed any more fails a test: by metric, and so for every query that reads one.
"""

from __future__ import annotations

import fnmatch

NVML = "told by NVML only, and this machine has no NVIDIA device"
OTHERS = "not told by the recorded vLLM that the bridge reads; SGLang, LMCache or a newer vLLM would"
ENGINE = "told by a real vLLM only: KVOBS_TEST_VLLM names none"

# Metrics of the catalog (patterns of their OpenTelemetry names).
HARDWARE = {"hw.*": NVML, "kvobs.device.memory": NVML}
SCRAPED = dict.fromkeys((
    "kvobs.engine.kv.tokens", "kvobs.engine.kv.usage", "kvobs.engine.kv.evicted.tokens",
    "kvobs.engine.kv.evicted.chunks", "kvobs.engine.kv.failures", "kvobs.engine.migration.*", "kvobs.engine.rejected",
    "kvobs.engine.scrape.dropped"), OTHERS)
UNTOLD = {"kvobs.window.allocation.variance":
          "no source tells single allocations, which it is made of; they are counted by bucket instead",
          "kvobs.self.store.pruned": "no scenario lives as long as a retention"}
SERVING = dict.fromkeys((
    "kvobs.kv.block.touches", "kvobs.kv.block.evictions", "kvobs.kv.eviction.*", "kvobs.kv.admission.failures",
    "kvobs.kv.preemption.tokens", "kvobs.kv.recomputed", "kvobs.prefix.*", "kvobs.kv.tail", "kvobs.kv.tail.usage",
    "kvobs.kv.unexplained", "kvobs.requests", "kvobs.request.*"), ENGINE)


def waivers(*, vllm: bool) -> dict[str, str]:
    """Patterns of metrics, with the reason; ``vllm`` says whether a real one was played."""
    return HARDWARE | SCRAPED | UNTOLD | ({} if vllm else SERVING)


def reason(metric: str, given: dict[str, str]) -> str | None:
    """Why a metric need not be seen, if there is a reason."""
    return next((why for pattern, why in given.items() if fnmatch.fnmatchcase(metric, pattern)), None)
