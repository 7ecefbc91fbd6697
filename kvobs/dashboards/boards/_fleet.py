"""The fleet: which processes stand out, and how the rest is spread."""

from __future__ import annotations

from kvobs.dashboards._model import Board, Query, Section
from kvobs.dashboards._panels import GOOD_TO_BAD, lines, query, stat, table, unreachable
from kvobs.dashboards._promql import SCRAPE, UP, Expr, bottom, quantile, rate, spread, state, top, worst
from kvobs.dashboards.boards._shared import (
    ACCELERATORS,
    NO_ALLOCATOR,
    NO_BREAKER,
    NO_CACHE,
    NO_NVML,
    NO_PROBE,
    NO_STEPS,
    NO_TURNS,
    NO_WINDOW,
    UNJUDGED,
    unused_share,
)

LATENCY = quantile(0.95, "kvobs.alloc.latency", "instance")
FIRST = quantile(0.95, "gen_ai.server.time_to_first_token", "instance")
OVERHEAD = state("kvobs.self.overhead", "instance")
RESIDENT = state("process.memory.usage", "instance")
UNUSED = worst(unused_share(), "instance")
BUDGET = worst(state("kvobs.slo.budget", "instance", "objective"), "instance", how="min")


def spreads(of: Expr) -> tuple[Query, ...]:
    """The median, the 90th percentile and the worst of the processes."""
    return tuple(query(spread(q, of), name) for q, name in ((0.5, "median"), (0.9, "p90"), (1.0, "worst")))


STRIP = (
    unreachable(4),
    stat("Reachable", "How many of the chosen processes does Prometheus reach?",
         Expr(f"sum ({state(UP.name, 'job', 'instance').text})", (UP,), (), "{target}", "count of targets with up = 1"),
         absent="no targets", width=4, decimals=0),
    stat("Worst latency, p95", "How slow are allocations at the slowest process?", worst(LATENCY), absent=NO_PROBE,
         width=4),
    stat("Worst unused", "How much does the most fragmented process hold for nobody?", worst(UNUSED),
         absent=NO_ALLOCATOR, width=4),
    stat("Least budget left", "How much of its error budget has the worst process?", worst(BUDGET, how="min"),
         absent=UNJUDGED, width=4, steps=((None, "red"), (0.0, "orange"), (0.25, "green"))),
    stat("Worst breaker", "How far has the breaker gone anywhere?", state("kvobs.breaker.level"), absent=NO_BREAKER,
         width=4, mappings=GOOD_TO_BAD),
)

SYMPTOM = Section("Symptom: who is slow", (
    table("Processes", "Which process stands out, and in what?",
          query(state(UP.name, "instance"), "Up"), query(FIRST, "First token p95"), query(LATENCY, "Allocation p95"),
          query(BUDGET, "Budget left"), query(UNUSED, "Unused share"), query(RESIDENT, "Resident"),
          query(rate("kvobs.kv.preemptions", "instance"), "Preemptions"),
          query(state("kvobs.breaker.level", "instance"), "Breaker", words=GOOD_TO_BAD), query(OVERHEAD, "Overhead"),
          absent="no targets", width=24, height=10, note="A dash means: not reported by that process."),
    lines("Time to first token p95, worst ten", "Whose users wait longest?", top(10, FIRST), absent=NO_TURNS),
    lines("Allocation latency p95, worst ten", "Whose allocator is slowest?", top(10, LATENCY), absent=NO_PROBE),
    lines("Allocation latency p95, spread", "Is it one process, or all?", *spreads(LATENCY), absent=NO_PROBE),
))

PRESSURE = Section("Pressure and fragmentation: who holds too much", (
    lines("Unused share, worst ten", "Who reserves much more than it uses?", top(10, UNUSED), high=1,
          absent=NO_ALLOCATOR),
    lines("Unused share, spread", "Is it one process, or all?", *spreads(UNUSED), high=1, absent=NO_ALLOCATOR),
    lines("Largest free block, smallest ten", "Who can serve only small requests?",
          bottom(10, state("kvobs.window.largest_free", "instance", "device", device=ACCELERATORS)), absent=NO_WINDOW),
    lines("Free device memory, least ten", "Whose device is about to be full?",
          bottom(10, state("kvobs.device.memory", "instance", "device", part="free")), absent=NO_NVML),
    lines("Unexplained device memory, most ten", "Where does nobody own what fills the device?",
          top(10, state("kvobs.device.memory", "instance", "device", part="unexplained")), absent=NO_NVML),
    lines("KV held, most ten", "Who holds most KV?", top(10, state("kvobs.kv.usage", "instance", state="held")),
          absent=NO_CACHE),
))

HEALTH = Section("Health: who tells, and at what cost", (
    lines("Overhead, spread", "Does watching cost too much anywhere?", *spreads(OVERHEAD), absent=NO_STEPS),
    lines("Scrape duration, worst ten", "Which process answers slowly?", top(10, state(SCRAPE.name, "instance")),
          absent="no targets"),
    table("Roles of processes", "What is each process of an engine of several processes?",
          query(state("kvobs.process.role", "instance", "engine", "role", "ranks"), "Here"), absent="no serving engine",
          width=8, height=7),
))

BOARD = Board(slug="fleet", title="Fleet",
              description="Which processes stand out, and how all others are spread: worst ten and quantiles, no sums.",
              strip=STRIP, sections=(SYMPTOM, PRESSURE, HEALTH), points=90)
