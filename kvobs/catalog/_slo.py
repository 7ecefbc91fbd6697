"""Service level objectives: what the process promised, and how it stands."""

from __future__ import annotations

from kvobs.catalog._row import Row, counter, gauge

WHO = ("objective",)

ROWS: tuple[Row, ...] = (
    counter("kvobs.slo.events", "{event}", WHO,
            "Events that an objective judged: turns, or windows (per device for allocation latencies) in which there "
            "was something to judge; a window counts once it is over.", "count"),
    counter("kvobs.slo.good", "{event}", WHO, "Of these, the good ones.", "count"),
    gauge("kvobs.slo.target", "1", WHO, "Share of events that must be good.", "the configuration's target",
          across_ranks="max"),
    gauge("kvobs.slo.burn", "1", (*WHO, "window"),
          "Burn rate of the error budget over a window, or since the process began where that is shorter: 1 spends "
          "exactly what the target allows; absent without events.",
          "(1 - good / events) / (1 - target)", across_ranks="max"),
    gauge("kvobs.slo.budget", "1", WHO,
          "Share of the error budget that is left, of the events of the last 3 days or since the process began; "
          "negative where it is overspent.", "1 - (events - good) / (events x (1 - target))", across_ranks="min"),
    gauge("kvobs.slo.alert", "{alert}", (*WHO, "severity", "windows"),
          "1 while the burn rates over both windows are above the alert's factor (14.4, 6, 3, 1), else 0.", "1 or 0",
          across_ranks="max"),
)
