"""What serving engines say of themselves: read from their own metrics, so as old, sampled and defined as those are.

``target`` is the address that was scraped (``host:port``, with the path where it is not /metrics), or ``in-process``
where the engine told kvobs inside its own process; an engine that is scraped besides is there twice, so a
sum over targets counts it twice: choose one. ``ranks`` are the ranks that the engine names, such as ``dp=0``.
A point of a target that is scraped is there only while it answers; one of ``in-process`` is the engine's latest word,
which came with its last step.
"""

from __future__ import annotations

from kvobs.catalog._row import Row, counter, gauge

WHO = ("engine", "target", "model", "ranks")
TARGET = ("target",)
PATH = (*WHO, "path", "direction")


def _count(name: str, unit: str, attributes: tuple[str, ...], meaning: str, formula: str) -> Row:
    return counter(name, unit, attributes, meaning, formula, "scraped")


def _state(name: str, unit: str, attributes: tuple[str, ...], meaning: str, formula: str) -> Row:
    return gauge(name, unit, attributes, meaning, formula, "max" if unit == "1" else "sum", "scraped")


ROWS: tuple[Row, ...] = (
    gauge("kvobs.engine.up", "{target}", TARGET,
          "1 if the last scrape of this target was good, 0 if it was not; only of targets that are scraped.", "1 or 0"),
    gauge("kvobs.engine.age", "s", TARGET,
          "Time since the last good scrape of this target; until there was one, since the bridge began to try. In "
          "process: since the engine's last word, while that said that requests run or wait; absent while it is idle.",
          "now - end of the last good scrape, or now - the last word", across_ranks="max", nature="measured"),
    gauge("kvobs.engine.scrape.duration", "s", TARGET, "How long the last scrape of this target took, good or not.",
          "end - start, mapping included", across_ranks="max", nature="measured"),
    gauge("kvobs.engine.scrape.series", "{series}", (*TARGET, "outcome"),
          "Samples of the last good scrape: mapped, ignored (no row of the table), or dropped.", "count"),
    counter("kvobs.engine.scrapes", "{scrape}", (*TARGET, "outcome"), "Scrapes of this target: good or failed.",
            "count"),
    counter("kvobs.engine.scrape.dropped", "{sample}", (*TARGET, "reason"),
            "Samples that were not believed: not_finite, negative, malformed, duplicate, ambiguous (several shares "
            "where one is meant), or beyond a bound.",
            "count"),
    _state("kvobs.engine.kv.utilization", "1", (*WHO, "pool"),
           "Share of a KV pool in use, as the engine defines it: vLLM and SGLang count blocks that hold a reusable "
           "prefix but belong to no request as free.", "the engine's own gauge"),
    _state("kvobs.engine.kv.tokens", "{token}", (*WHO, "pool", "state"),
           "Tokens of a KV pool by state: used, evictable (reusable, held by nobody) or free.",
           "the engine's own gauge"),
    _state("kvobs.engine.kv.capacity", "{token}", (*WHO, "pool"), "Tokens that fit into a KV pool.",
           "the engine's own gauge"),
    _state("kvobs.engine.kv.blocks", "{block}", (*WHO, "pool"),
           "Blocks of a KV pool, by the engine's configuration; vLLM never gives one of them away.",
           "the engine's own number"),
    _state("kvobs.engine.kv.usage", "By", (*WHO, "pool"), "Bytes that a KV pool holds.", "the engine's own gauge"),
    _count("kvobs.engine.kv.evicted.tokens", "{token}", (*WHO, "pool"), "Cached tokens that a pool forgot.",
           "the engine's own counter"),
    _count("kvobs.engine.kv.evicted.chunks", "{chunk}", (*WHO, "pool"), "Cached chunks that a pool forgot.",
           "the engine's own counter"),
    _count("kvobs.engine.kv.residency.duration", "s", (*WHO, "kind"),
           "Sum of block times: lifetime (until eviction), idle (unused before eviction) or reuse_gap; the engine "
           "samples blocks, and vLLM also counts some that it did not evict.", "sum of the engine's histogram"),
    _count("kvobs.engine.kv.residency.blocks", "{block}", (*WHO, "kind"),
           "How many block times kvobs.engine.kv.residency.duration adds up.", "count of the engine's histogram"),
    _count("kvobs.engine.kv.failures", "{failure}", (*WHO, "pool"),
           "Allocations that a pool refused; vLLM says it of pools it offloads to, never of the device's.",
           "the engine's own counter"),
    _state("kvobs.engine.requests", "{request}", (*WHO, "state"), "Requests in the engine by state.",
           "the engine's own gauge"),
    _state("kvobs.engine.waiting", "{request}", (*WHO, "reason"),
           "Waiting requests by the engine's reason; part of kvobs.engine.requests.", "the engine's own gauge"),
    _count("kvobs.engine.finished", "{request}", (*WHO, "outcome"), "Requests that ended, by the engine's outcome.",
           "the engine's own counter"),
    _count("kvobs.engine.rejected", "{request}", (*WHO, "reason"), "Requests that the engine did not admit.",
           "the engine's own counter"),
    _count("kvobs.engine.preemptions", "{request}", WHO,
           "Preemptions or retractions; vLLM's is told seconds late, with forced resets in it.",
           "the engine's own counter"),
    _count("kvobs.engine.tokens", "{token}", (*WHO, "kind"), "Tokens processed: prompt or generation.",
           "the engine's own counter"),
    _count("kvobs.engine.prefix.queried", "{token}", (*WHO, "pool"),
           "Tokens looked up in a prefix cache; vLLM leaves look-ups of preempted requests out.",
           "the engine's own counter"),
    _count("kvobs.engine.prefix.hit", "{token}", (*WHO, "pool"), "Tokens that a prefix cache had.",
           "the engine's own counter"),
    _count("kvobs.engine.migration.io", "By", PATH,
           "KV bytes moved, by path (offload, nixl, mooncake, disaggregation, lmcache) and direction.",
           "the engine's own counter, or the sum of its histogram"),
    _count("kvobs.engine.migration.duration", "s", (*PATH, "phase"), "Sum of the durations of KV moves, by phase.",
           "the engine's own counter, or the sum of its histogram"),
    _count("kvobs.engine.migration.operations", "{operation}", (*PATH, "phase"),
           "How many durations kvobs.engine.migration.duration adds up.", "count of the engine's histogram"),
    _count("kvobs.engine.migration.failures", "{failure}", PATH, "KV moves that failed.", "the engine's own counter"),
    _count("kvobs.engine.phase.duration", "s", (*WHO, "phase"),
           "Sum of latencies: request, queue, prefill, decode, first_token or inter_token.",
           "sum of the engine's histogram"),
    _count("kvobs.engine.phase.observations", "{observation}", (*WHO, "phase"),
           "How many latencies kvobs.engine.phase.duration adds up.", "count of the engine's histogram"),
)
