"""The breaker: what it decided, what was done about it, and with what effect."""

from __future__ import annotations

from kvobs.catalog._row import PHASE_BUCKETS, Row, counter, gauge, histogram

ROWS: tuple[Row, ...] = (
    gauge("kvobs.breaker.level", "{level}", ("scope", "mode"),
          "The highest level that is open: 0 normal, 1 reorganise, 2 offload, 3 degrade. In mode observe nothing is "
          "done about it.", "highest open level", across_ranks="max"),
    counter("kvobs.breaker.transitions", "{transition}", ("scope", "mode", "level", "phase"),
            "Changes of a level's phase, by the phase it changed to.", "count"),
    counter("kvobs.breaker.actions", "{action}", ("actuator", "kind", "outcome"),
            "Orders that were answered: done, undone, or refused (nothing was changed).", "count"),
    counter("kvobs.breaker.late", "{action}", ("actuator", "kind"),
            "Of these, the ones that ended after their time limit (0.2 s, 1.2 s and 3 s for levels 1 to 3).", "count"),
    counter("kvobs.breaker.regained", "By", ("actuator", "kind"),
            "Bytes that actions gave back to the allocator or the device.", "before - after, measured at the action",
            nature="measured"),
    counter("kvobs.admission.requests", "{request}", ("mode", "priority", "outcome"),
            "Requests at the breaker's middleware: admitted, refused, full, late or gone; queued, clamped (fewer new "
            "tokens), trimmed (less history) and probed besides. In mode observe that would have become of them.",
            "count"),
    histogram("kvobs.breaker.action.duration", "s", ("actuator", "kind"), PHASE_BUCKETS,
              "How long actions took at the engine's safe point.", "end - start"),
)
