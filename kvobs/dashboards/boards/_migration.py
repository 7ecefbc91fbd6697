"""Migration: which KV moves between devices, how fast, and what engines move on their own."""

from __future__ import annotations

from kvobs.dashboards._model import Board, Section
from kvobs.dashboards._panels import lines, query, stat, table, unreachable
from kvobs.dashboards._promql import each, mean, quantile, rate, worst
from kvobs.dashboards.boards._shared import NO_BRIDGE

PAIR = ("src", "dst")
NOTHING = "nothing moved"
UNTIMED = "no move was timed"
PATH = ("target", "path", "direction")

STRIP = (
    unreachable(4),
    stat("KV moved now", "How much KV changes device?", rate("kvobs.migration.io"), absent=NOTHING, width=4),
    stat("Moves now", "How many buffers change device?", rate("kvobs.migration.operations"), absent=NOTHING, width=4),
    stat("Mean size", "Are moves large enough to be worth it?",
         each(rate("kvobs.migration.io"), rate("kvobs.migration.operations"), "By", "bytes / moves"), absent=NOTHING,
         width=4),
    stat("Duration, p95", "How long does a call that moves KV take?", quantile(0.95, "kvobs.migration.duration"),
         absent=UNTIMED, width=4),
    stat("Busiest pair", "How much does the busiest pair of devices move?", worst(rate("kvobs.migration.io", *PAIR)),
         absent=NOTHING, width=4),
)

SYMPTOM = Section("Symptom: what moving costs", (
    lines("Duration of moves", "How long do calls that move KV take?",
          *(query(quantile(q, "kvobs.migration.duration"), f"p{q * 100:g}") for q in (0.5, 0.95)),
          absent=UNTIMED,
          note="Host time of the call: copies that go on behind it are not in it."),
    lines("Mean duration by pair", "Which pair is slow?", mean("kvobs.migration.duration", *PAIR), absent=UNTIMED),
    lines("Mean size by pair", "Are moves large enough to be worth it?",
          each(rate("kvobs.migration.io", *PAIR), rate("kvobs.migration.operations", *PAIR), "By", "bytes / moves"),
          absent=NOTHING),
))

MOVES = Section("Migration: which way KV moves", (
    table("From where to where", "Between which devices does KV move now?",
          query(rate("kvobs.migration.io", *PAIR), "Bytes"), query(rate("kvobs.migration.operations", *PAIR), "Moves"),
          query(mean("kvobs.migration.duration", *PAIR), "Mean duration"),
          query(quantile(0.95, "kvobs.migration.duration", *PAIR), "p95 duration"), absent=NOTHING, width=24,
          note="One row per pair of devices; beyond the bound of series the rest is 'other' and counted on Telemetry "
               "health. A duration is absent for moves that were only seen afterwards."),
    lines("KV moved", "How much KV changes device, and which way?", rate("kvobs.migration.io", *PAIR), absent=NOTHING,
          width=12),
    lines("Moves", "How many buffers change device, and which way?", rate("kvobs.migration.operations", *PAIR),
          absent=NOTHING, width=12),
))

VIRTUAL = Section("Virtual GPU: all copies of tensors between devices", (
    lines("Copied between devices", "How much do all tensors move, KV or not?", rate("kvobs.device.copy.io", *PAIR),
          absent="no virtual GPU", width=12),
    lines("Copies", "How many copies are there?", rate("kvobs.device.copy.operations", *PAIR), absent="no virtual GPU",
          width=12),
), collapsed=True)

ENGINES = Section("kvobs bridge: KV moved by engines that are scraped", (
    lines("KV moved by engines", "What do offload, NIXL, Mooncake or LMCache move?",
          rate("kvobs.engine.migration.io", *PATH), absent=NO_BRIDGE),
    lines("Mean duration by phase", "How long do the engines' moves take?",
          each(rate("kvobs.engine.migration.duration", *PATH, "phase"),
               rate("kvobs.engine.migration.operations", *PATH, "phase"), "s", "sum of durations / moves"),
          absent=NO_BRIDGE),
    lines("Moves that failed", "Do moves fail?", rate("kvobs.engine.migration.failures", *PATH), absent=NO_BRIDGE),
), collapsed=True)

BOARD = Board(slug="migration", title="Migration",
              description="Which KV moves between devices, what that costs, and what engines move on their own.",
              strip=STRIP, sections=(SYMPTOM, MOVES, VIRTUAL, ENGINES))
