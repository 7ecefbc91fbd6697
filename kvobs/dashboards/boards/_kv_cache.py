"""The KV cache: who holds it, what of it is useless, what is thrown away and computed again."""

from __future__ import annotations

from kvobs.dashboards._model import Board, Section
from kvobs.dashboards._panels import lines, query, share, stat, table, unreachable
from kvobs.dashboards._promql import each, quantile, rate, ratio, state, worst
from kvobs.dashboards.boards._shared import NO_BRIDGE, NO_CACHE, NO_POOL, NONE_COUNTED, pool_in_use

DEEP = "no step was sampled"
POOL = ("target", "model", "ranks", "pool")
NO_ACCOUNT = "not told by the pool"

STRIP = (
    unreachable(),
    stat("Held by tokens", "How much memory do live tokens hold?", state("kvobs.kv.usage", state="held"),
         absent=NO_CACHE),
    stat("Slack now", "How much memory do caches hold without tokens in it?", state("kvobs.kv.usage", state="slack"),
         absent=NO_CACHE),
    stat("Caches", "How many caches hold KV?", state("kvobs.kv.caches"), absent=NO_CACHE, decimals=0),
    stat("Fullest pool", "How full is the fullest pool of blocks?", worst(pool_in_use()), absent=NO_POOL,
         steps=((None, "green"), (0.85, "orange"), (0.95, "red"))),
    stat("Preempted", "Do requests lose their blocks to others?", rate("kvobs.kv.preemptions"), absent=NONE_COUNTED,
         steps=((None, "green"), (1e-9, "orange"))),
    stat("Pressure evictions", "Is cached content given away for new tokens?",
         rate("kvobs.kv.block.evictions", reason="pressure"), absent=NONE_COUNTED),
    stat("Prefix hits", "Which share of looked-up tokens did the prefix cache have?",
         ratio(rate("kvobs.prefix.hit"), rate("kvobs.prefix.queried"), "hit / queried"), absent="nothing looked up"),
)

SYMPTOM = Section("Symptom: who loses KV, and what is computed twice", (
    lines("Preemptions", "Which pool preempts requests?", rate("kvobs.kv.preemptions", "model", "cache"),
          absent=NONE_COUNTED),
    lines("Blocks refused", "Are blocks refused, and to requests that wait or to those that run?",
          query(rate("kvobs.kv.block.failures"), "all"),
          query(rate("kvobs.kv.admission.failures"), "to requests that wait"), absent=NONE_COUNTED,
          note="Who waits is refused anew at each step: the rate is how often it was tried, not how many wait."),
    lines("Tokens lost and computed again", "How much work is done twice, and why?",
          query(rate("kvobs.kv.preemption.tokens", "cause"), "lost by preemption:"),
          query(rate("kvobs.kv.recomputed", "cause"), "computed again:"), absent=NONE_COUNTED),
))

PRESSURE = Section("Pressure: who holds the cache", (
    lines("KV by model and state", "How much memory do the caches take, and how much of it holds tokens?",
          state("kvobs.kv.usage", "model", "device", "state"), stacked=True, absent=NO_CACHE),
    lines("Blocks by state", "What are the pools' blocks used for?", state("kvobs.kv.blocks", "model", "state"),
          stacked=True, absent=NO_POOL),
    lines("What the next request needs", "Would the next waiting request fit?",
          query(state("kvobs.request.next", "model", "verdict"), "blocks:"), absent="nobody waits"),
    lines("Largest buffer", "How large a contiguous piece does a cache need?",
          state("kvobs.kv.buffer.largest", "model", "device", "cache"), absent=NO_CACHE),
    lines("Live caches", "How many caches hold KV?", state("kvobs.kv.caches", "model", "device", "cache"),
          absent=NO_CACHE),
    lines("Blocks that no state explains", "Does the pool's ledger add up?",
          state("kvobs.kv.unexplained", "model", "cache"), absent=NO_ACCOUNT, note="0 in a sound pool."),
))

FRAGMENTATION = Section("Fragmentation: what is held without tokens", (
    lines("Slack", "Which share of the caches' memory holds no tokens, at the worst process?",
          worst(share(state("kvobs.kv.usage", "instance", "cache", state="slack"),
                      state("kvobs.kv.usage", "instance", "cache", state="held")), "cache"), high=1, absent=NO_CACHE),
    lines("Unused tails of last blocks", "How many tokens would fit into blocks that are held already?",
          state("kvobs.kv.tail", "model", "cache"), absent=NO_ACCOUNT, width=4),
    lines("Memory of the tails", "How much memory is that?", state("kvobs.kv.tail.usage", "model", "cache"),
          absent=NO_ACCOUNT, width=4),
    lines("The article's fragmentation rate", "What does the reference article's definition say?",
          state("kvobs.kv.fragmentation.article", "model", "cache"), high=1, absent=NO_CACHE,
          note="It is high for any cache of many buffers, sound ones too: compare it with slack before you act."),
))

REALLOCATION = Section("Re-allocation: what growing costs", (
    lines("Buffers replaced", "Which caches grow by replacing their buffers?",
          rate("kvobs.kv.reallocations", "model", "cache", "phase"), absent=NONE_COUNTED),
    lines("Bytes written and copied again", "How much KV is new, and how much is the same again?",
          query(rate("kvobs.kv.written", "cache"), "written:"),
          query(rate("kvobs.kv.copied", "cache"), "copied again:"),
          absent="nothing was written"),
    lines("Bytes copied again per byte written", "How often is the same KV copied?",
          ratio(rate("kvobs.kv.copied", "cache"), rate("kvobs.kv.written", "cache"), "copied / written"), unit="none",
          absent="nothing was written"),
))

POOLS = Section("Paged pools: vLLM or SGLang in this process", (
    lines("Blocks handed out", "How fast are blocks taken, and how many are found again?",
          query(rate("kvobs.kv.block.allocations", "cache"), "handed out:"),
          query(rate("kvobs.kv.block.touches", "cache"), "found again:"), absent=NONE_COUNTED),
    lines("Evictions", "Why is cached content forgotten?", rate("kvobs.kv.block.evictions", "cache", "reason"),
          absent=NONE_COUNTED),
    lines("Prefix hits by admission", "Which share of looked-up tokens did the prefix cache have?",
          ratio(rate("kvobs.prefix.hit", "admission"), rate("kvobs.prefix.queried", "admission"), "hit / queried"),
          high=1, absent="nothing looked up"),
    lines("Age of evicted blocks", "Are blocks evicted young?",
          *(query(quantile(q, "kvobs.kv.eviction.age"), f"p{q * 100:g}") for q in (0.05, 0.5, 0.95)),
          absent="nothing evicted"),
    lines("Idle time of evicted blocks", "Were evicted blocks still wanted a moment ago?",
          *(query(quantile(q, "kvobs.kv.eviction.idle"), f"p{q * 100:g}") for q in (0.05, 0.5, 0.95)),
          absent="nothing evicted"),
    lines("Tokens looked up", "How much is looked up in the prefix cache?",
          query(rate("kvobs.prefix.queried", "admission"), "looked up:"),
          query(rate("kvobs.prefix.hit", "admission"), "found:"), absent="nothing looked up"),
), collapsed=True)

LAYERS = ("model", "layers")
ATTENTION = Section("KVOBS_DEEP=on: attention and cache updates", (
    lines("Local attention against chance", "Do heads look at what is near?",
          query(each(rate("kvobs.attention.local", *LAYERS), rate("kvobs.attention.queries", *LAYERS), "1",
                     "local / queries"), "within 64 tokens:"),
          query(each(rate("kvobs.attention.chance", *LAYERS), rate("kvobs.attention.queries", *LAYERS), "1",
                     "chance / queries"), "if it were uniform:"), high=1, absent=DEEP),
    lines("Dead entries", "Which share of K/V entries in view does nobody read?",
          ratio(rate("kvobs.attention.entries", *LAYERS, state="dead"), rate("kvobs.attention.entries", *LAYERS),
                "dead / (alive + dead)"), high=1, absent=DEEP),
    lines("Reclaimable by the article's rule", "How much would eviction of Pending Evict blocks free?",
          state("kvobs.attention.reclaimable", *LAYERS), absent=DEEP),
    lines("Blocks by life cycle", "How many blocks are active, how many pending?",
          state("kvobs.attention.blocks", "model", "state"), stacked=True, absent=DEEP),
    lines("Changes of life cycle", "Do blocks come back after they were given up?",
          rate("kvobs.attention.transitions", "model", "to"), absent=DEEP),
    lines("Sampling", "How rarely are decode steps sampled?",
          query(state("kvobs.attention.interval", "model"), "one in:"),
          absent=DEEP, width=4),
    lines("Cache.update p95", "What does one layer's update cost?",
          quantile(0.95, "kvobs.kv.update.duration", "layers"), absent=DEEP, width=4),
), collapsed=True)

ENGINES = Section("kvobs bridge: pools of engines that are scraped", (
    lines("Pools in use, as the engine says", "How full are the engines' pools?",
          state("kvobs.engine.kv.utilization", *POOL), high=1, absent=NO_BRIDGE),
    lines("Tokens by state", "What do the pools hold?", state("kvobs.engine.kv.tokens", *POOL, "state"), stacked=True,
          absent=NO_BRIDGE),
    table("Sizes of pools", "How large are the engines' pools?",
          query(state("kvobs.engine.kv.capacity", *POOL), "Tokens"),
          query(state("kvobs.engine.kv.blocks", *POOL), "Blocks"),
          query(state("kvobs.engine.kv.usage", *POOL), "Bytes"), absent=NO_BRIDGE, width=8, height=7),
    lines("Forgotten", "How fast do pools forget cached content?",
          query(rate("kvobs.engine.kv.evicted.tokens", "target", "pool"), "tokens:"),
          query(rate("kvobs.engine.kv.evicted.chunks", "target", "pool"), "chunks:"), absent=NO_BRIDGE),
    lines("Mean block times", "How long do blocks live, idle, and wait to be used again?",
          each(rate("kvobs.engine.kv.residency.duration", "target", "kind"),
               rate("kvobs.engine.kv.residency.blocks", "target", "kind"), "s", "sum of times / blocks"),
          absent=NO_BRIDGE),
    lines("Refusals and preemptions", "Do the engines run out of KV?",
          query(rate("kvobs.engine.kv.failures", "target", "pool"), "refused:"),
          query(rate("kvobs.engine.preemptions", "target"), "preempted:"), absent=NO_BRIDGE, unit="cps"),
    lines("Prefix hits, as the engine says", "Which share of looked-up tokens did its cache have?",
          ratio(rate("kvobs.engine.prefix.hit", "target", "pool"),
                rate("kvobs.engine.prefix.queried", "target", "pool"),
                "hit / queried"), high=1, absent=NO_BRIDGE),
), collapsed=True)

BOARD = Board(
    slug="kv-cache", title="KV cache",
    description="Who holds the KV cache, what of it holds no tokens, what growing costs, and what is thrown away.",
    strip=STRIP, sections=(SYMPTOM, PRESSURE, FRAGMENTATION, REALLOCATION, POOLS, ATTENTION, ENGINES))


