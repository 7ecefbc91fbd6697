"""The board to open first: one strip, and one row of panels per link of the causal chain."""

from __future__ import annotations

from kvobs.catalog import SLOW_ALLOCATION
from kvobs.config import ARTICLE
from kvobs.dashboards._model import Board, Section
from kvobs.dashboards._panels import GOOD_TO_BAD, lines, query, share, stat, states, unreachable
from kvobs.dashboards._promql import highest, mean, quantile, rate, ratio, state, within, worst
from kvobs.dashboards.boards._shared import (
    NO_ALLOCATOR,
    NO_BREAKER,
    NO_CACHE,
    NO_NVML,
    NO_POOL,
    NO_PROBE,
    NO_STEPS,
    NO_TURNS,
    NO_WINDOW,
    NONE_COUNTED,
    UNJUDGED,
    pool_in_use,
    unused_share,
)

STRIP = (
    unreachable(),
    stat("Allocation p95", "Do 95 % of allocations stay within the objective's 12 ms?",
         quantile(0.95, "kvobs.alloc.latency"), absent=NO_PROBE,
         steps=((None, "green"), (SLOW_ALLOCATION, "red"))),
    stat("First token p95", "How long do users wait for the first token?",
         quantile(0.95, "gen_ai.server.time_to_first_token"), absent=NO_TURNS),
    stat("Error budget left", "Which share of the error budget is left where it is smallest?",
         worst(state("kvobs.slo.budget", "objective"), how="min"), absent=UNJUDGED,
         steps=((None, "red"), (0.0, "orange"), (0.25, "green"))),
    stat("Fullest KV pool", "How full is the fullest pool of KV blocks?", worst(pool_in_use()), absent=NO_POOL,
         steps=((None, "green"), (0.85, "orange"), (0.95, "red")),
         note="Blocks that only hold a reusable prefix are not in use: they can be given away."),
    stat("Preemptions", "Do requests lose their blocks to others?", rate("kvobs.kv.preemptions"), absent=NONE_COUNTED,
         steps=((None, "green"), (1e-9, "orange"))),
    stat("Breaker", "How far has the breaker gone?", worst(state("kvobs.breaker.level", "scope", "mode")),
         absent=NO_BREAKER, mappings=GOOD_TO_BAD),
    stat("Telemetry lost", "Is anything that is shown here incomplete?", rate("kvobs.self.events.dropped"),
         absent=NONE_COUNTED, steps=((None, "green"), (1e-9, "red"))),
)

SYMPTOM = Section("Symptom: what users feel", (
    lines("Time to first token", "How long do users wait for the first token?",
          query(quantile(0.95, "gen_ai.server.time_to_first_token"), "p95", exemplars=True), absent=NO_TURNS),
    lines("Allocations by latency",
          "Which share of allocations is fast enough, and are 95 % within the objective's 12 ms?",
          *(query(within(bound, "kvobs.alloc.latency"), f"within {bound * 1e3:g} ms")
            for bound in (0.001, SLOW_ALLOCATION, 0.1)), absent=NO_PROBE, low=None, high=1, limit=ARTICLE.quantile,
          note="The dashed line is the share that the objective wants within 12 ms."),
    lines("Turns by outcome", "How do turns end?", rate("kvobs.turns", "outcome"), absent=NO_TURNS),
    lines("Time per output token", "How fast do tokens come?",
          query(quantile(0.95, "gen_ai.server.time_per_output_token"), "p95"), absent=NO_TURNS),
    lines("Out of memory", "Did memory run out, and for whom?",
          query(rate("kvobs.out_of_memory", "model", how="increase"), "calls of"),
          query(rate("kvobs.allocator.out_of_memory", "device", how="increase"), "allocations on"),
          unit="short", absent=NONE_COUNTED),
    lines("Requests by state", "How many requests run, wait or were preempted?", state("kvobs.requests", "state"),
          stacked=True, absent="no serving engine"),
))

PRESSURE = Section("Pressure: what memory is asked for", (
    lines("KV cache", "How much memory do the caches take, and how much of it holds tokens?",
          state("kvobs.kv.usage", "state"), stacked=True, absent=NO_CACHE),
    lines("KV blocks by state", "What are the pools' blocks used for?", state("kvobs.kv.blocks", "state"),
          stacked=True, absent=NO_POOL),
    lines("Device memory: least free, most unexplained",
          "Is a device about to be full, or does nobody own what fills it?",
          query(worst(state("kvobs.device.memory", "instance", "device", part="free"), "device", how="min"), "free on"),
          query(worst(state("kvobs.device.memory", "instance", "device", part="unexplained"), "device"),
                "unexplained on"), absent=NO_NVML),
))

FRAGMENTATION = Section("Fragmentation: what is held and serves nobody", (
    lines("Reserved but unused", "Which share of reserved memory serves nobody, at the worst process?",
          query(worst(unused_share(), "device"), "now, on"),
          query(state("kvobs.window.fragmentation", "device"), "worst in the window, on"), high=1,
          absent=NO_ALLOCATOR),
    lines("Smallest largest free block", "How large a request can still be served from what is reserved?",
          state("kvobs.window.largest_free", "device"), absent=NO_WINDOW),
    lines("Slack of the caches", "Which share of the caches' memory holds no tokens?",
          worst(share(state("kvobs.kv.usage", "instance", "cache", state="slack"),
                      state("kvobs.kv.usage", "instance", "cache", state="held")), "cache"), high=1,
          absent=NO_CACHE),
))

REALLOCATION = Section("Re-allocation: what growing costs", (
    lines("KV buffers replaced", "Do caches grow by replacing their buffers?", rate("kvobs.kv.reallocations", "phase"),
          absent=NONE_COUNTED),
    lines("Bytes copied again per byte written", "How often is the same KV copied?",
          ratio(rate("kvobs.kv.copied", "cache"), rate("kvobs.kv.written", "cache"), "copied / written"), unit="none",
          absent="nothing was written"),
    lines("Allocations within 12 ms", "Which share of allocations is fast enough?",
          within(SLOW_ALLOCATION, "kvobs.alloc.latency", "device"), low=None, high=1, absent=NO_PROBE),
))

MIGRATION = Section("Migration: what moves between devices", (
    lines("KV moved", "How much KV changes device, and which way?", rate("kvobs.migration.io", "src", "dst"),
          absent="nothing moved", width=12),
    lines("Mean duration of a move", "How long does a call that moves KV take?",
          mean("kvobs.migration.duration", "src", "dst"), absent="no move was timed", width=12),
))

BREAKER = Section("Breaker: what was done about it", (
    states("Breaker's level", "When did which scope of the breaker open, and how far?",
           highest("kvobs.breaker.level", "instance", "scope", "mode"), mappings=GOOD_TO_BAD, absent=NO_BREAKER),
    lines("Actions", "What was ordered, and was it done?", rate("kvobs.breaker.actions", "kind", "outcome"),
          absent=NONE_COUNTED, width=6, height=6),
    lines("Admission", "Who was let in, queued or refused?", rate("kvobs.admission.requests", "mode", "outcome"),
          absent="no request was judged", width=6, height=6),
))

HEALTH = Section("Health of the telemetry itself", (
    lines("Highest overhead", "Does watching cost too much?", query(state("kvobs.self.overhead"), "highest"),
          absent=NO_STEPS, width=8),
    lines("Lost by stage", "Where was telemetry lost?", rate("kvobs.self.events.dropped", "stage"),
          absent=NONE_COUNTED),
    lines("Observation reduced", "Is less observed than usual?", query(state("kvobs.self.throttle"), "throttle"),
          width=8, note="0: nothing is left out; 1: no deep sampling; 2: everything passes through unobserved."),
))

BOARD = Board(
    slug="overview", title="Overview",
    description="One row per link of the chain: symptom, pressure, fragmentation, re-allocation, migration, breaker, "
                "health. The other boards go deeper.",
    strip=STRIP, sections=(SYMPTOM, PRESSURE, FRAGMENTATION, REALLOCATION, MIGRATION, BREAKER, HEALTH), points=90)

