"""kvobs itself, and what cannot be observed."""

from __future__ import annotations

from kvobs.catalog._row import Row, counter, gauge

ROWS: tuple[Row, ...] = (
    counter("kvobs.flight.records", "{record}", ("reason",), "Flight records that were taken.", "count"),
    counter("kvobs.self.events", "{event}", (), "Events the drain thread interpreted.", "count"),
    counter("kvobs.self.events.dropped", "{event}", ("stage",),
            "Telemetry lost: the host was spared, the data was not.", "count by stage: queue, store, otlp"),
    counter("kvobs.self.hook.duration", "s", ("source",),
            "Time kvobs spent on the engine's threads by its own clock, which misses about an eighth.",
            "sum of the hooks' own timing", nature="measured"),
    counter("kvobs.self.hook.failures", "{failure}", ("source",), "Hooks that raised and were detached.", "count"),
    counter("kvobs.self.fold.duration", "s", (), "Time the drain thread spent interpreting events.", "sum",
            nature="measured"),
    counter("kvobs.self.window.duration", "s", (), "Time spent keeping and reading the sliding windows.", "sum",
            nature="measured"),
    counter("kvobs.self.drain.duration", "s", (), "CPU time of the drain thread.", "thread clock", nature="measured"),
    counter("kvobs.self.poll.duration", "s", ("source",), "Time a polled source took to read.", "sum",
            nature="measured"),
    gauge("kvobs.self.overhead", "1", (),
          "Share of the engine's time that the hooks took in the last 3 s; absent while there are no steps.",
          "hooks / (hooks + forward passes)", across_ranks="max", nature="measured"),
    gauge("kvobs.self.throttle", "{level}", (),
          "What the overhead guard does: 0 nothing, 1 no deep sampling, 2 everything passes through unobserved.",
          "0, 1 or 2", across_ranks="max"),
    counter("kvobs.self.paused", "s", (), "Time in which everything passed through unobserved.", "sum",
            nature="measured"),
    counter("kvobs.self.turns.cut", "{turn}", (), "Turns that are not told because observation paused within them.",
            "count"),
    counter("kvobs.self.series.overflow", "{point}", ("metric",),
            "Points folded into 'other' because a metric had too many attribute sets.", "count"),
    gauge("kvobs.self.store.size", "By", (), "Bytes of this process's store, write-ahead log included.",
          "file sizes"),
    counter("kvobs.self.store.pruned", "{item}", ("what",),
            "Stores of ended processes, and rows, that this process deleted as they were older than the retention.",
            "count by what: stores, rows"),
    gauge("kvobs.availability", "{subject}", ("subject", "reason"),
          "1 for what can be observed here, 0 with a reason for what cannot.", "probe", across_ranks="max"),
)
