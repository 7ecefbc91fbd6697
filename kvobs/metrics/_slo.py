"""How the objectives stand, as points."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvobs import model
from kvobs.config import Objective
from kvobs.metrics._state import Metrics
from kvobs.slo import ALERTS, Ledger, Standing, refusal, refusals, window_text

BURN = "kvobs.slo.burn"


class Objectives:
    """Folds events into the objectives and keeps their points; one thread uses it."""

    def __init__(self, objectives: Sequence[Objective], metrics: Metrics, now_ns: int) -> None:
        self._ledger = Ledger(objectives, now_ns)
        self._metrics = metrics
        self._told = {objective.name: (0, 0) for objective in objectives}
        self._windows = {objective.name: {seconds for alert in ALERTS if not refusal(objective, alert)
                                          for seconds in (alert.short_s, alert.long_s)} for objective in objectives}
        for objective in objectives:
            metrics.begin("kvobs.slo.events", (objective.name,))
            metrics.begin("kvobs.slo.good", (objective.name,))
            metrics.set("kvobs.slo.target", (objective.name,), objective.target)
        self.facts = list(refusals(objectives))
        self.standings: list[Standing] = []

    def fold(self, events: Iterable[model.Event]) -> None:
        """Take events into account."""
        self._ledger.fold(events)

    def refresh(self, now_ns: int) -> None:
        """Judge what is over and set the points as of ``now_ns``."""
        self.standings = self._ledger.standings(now_ns)
        for standing in self.standings:
            name, set_ = standing.objective.name, self._metrics.set
            good, events = self._told[name]
            self._told[name] = standing.good, standing.events
            self._metrics.count("kvobs.slo.good", (name,), standing.good - good)
            self._metrics.count("kvobs.slo.events", (name,), standing.events - events)
            set_("kvobs.slo.budget", (name,), standing.budget_left)
            for seconds in self._windows[name]:
                set_(BURN, (name, window_text(seconds)), standing.burn_rates.get(seconds))
            for alert, fires in standing.alerts.items():
                set_("kvobs.slo.alert", (name, alert.severity, alert.windows), int(fires))
