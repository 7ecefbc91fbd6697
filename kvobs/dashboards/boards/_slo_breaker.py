"""Objectives and the breaker: what was promised, how it stands, what was done about it and with what effect."""

from __future__ import annotations

from kvobs.dashboards._model import Board, Section
from kvobs.dashboards._panels import GOOD_TO_BAD, lines, query, stat, states, table, unreachable
from kvobs.dashboards._promql import Expr, either, highest, line, quantile, rate, ratio, state, worst
from kvobs.dashboards.boards._shared import NO_BREAKER, NONE_COUNTED, UNJUDGED
from kvobs.slo import ALERTS, window_text

NO_GATE = "no request was judged"
FIRST = ALERTS[0]
ALERT = {0: ("quiet", "green"), 1: ("firing", "red")}

ENFORCED = "!observe"  # in mode observe nobody is refused, whatever is counted


def admitted_share() -> Expr:
    """The share of requests with a verdict that were admitted; 0 where there were some and none was admitted."""
    judged = rate("kvobs.admission.requests", "priority", mode=ENFORCED, outcome="~admitted|refused|full|late|gone")
    admitted = rate("kvobs.admission.requests", "priority", mode=ENFORCED, outcome="admitted")
    return ratio(either(admitted, line(0, judged, judged.unit)), judged,
                 "admitted / (admitted + refused + full + late + gone)")


STRIP = (
    unreachable(),
    stat("Least budget left", "Which share of the error budget is left where it is smallest?",
         worst(state("kvobs.slo.budget", "objective"), how="min"), absent=UNJUDGED,
         steps=((None, "red"), (0.0, "orange"), (0.25, "green"))),
    stat("Fastest burn, 1 h", "How many times as fast as allowed is a budget spent, at most?",
         worst(state("kvobs.slo.burn", "objective", window=window_text(FIRST.long_s))), absent=UNJUDGED, unit="none",
         steps=((None, "green"), (1.0, "orange"), (FIRST.factor, "red"))),
    stat("Burn alert", "Does an alert of an objective fire in any process?", state("kvobs.slo.alert"), absent=UNJUDGED,
         mappings=ALERT),
    stat("Breaker", "How far has the breaker gone?", state("kvobs.breaker.level"), absent=NO_BREAKER,
         mappings=GOOD_TO_BAD),
    stat("Changes of mind", "Does the breaker change its mind often?", rate("kvobs.breaker.transitions"),
         absent=NONE_COUNTED),
    stat("Refused", "Are requests turned away?",
         rate("kvobs.admission.requests", mode=ENFORCED, outcome="~refused|full|late"), absent=NONE_COUNTED,
         steps=((None, "green"), (1e-9, "orange"))),
    stat("Late", "Do actions miss their time limit?", rate("kvobs.breaker.late"), absent=NONE_COUNTED,
         steps=((None, "green"), (1e-9, "red"))),
)

SYMPTOM = Section("Symptom: how the objectives stand", (
    lines("Burn rate", "How many times as fast as allowed is the budget spent?",
          state("kvobs.slo.burn", "objective", "window"), unit="none", limit=1.0, absent=UNJUDGED,
          note="The worst process; at 1 the budget lasts exactly as long as the target means it to."),
    lines("Budget left", "How much of the error budget is left, at the worst process?",
          state("kvobs.slo.budget", "objective"), low=None, high=1, absent=UNJUDGED),
    lines("Good events", "Which share of events is good, against the target?",
          query(ratio(rate("kvobs.slo.good", "objective"), rate("kvobs.slo.events", "objective"), "good / events"),
                "good:"),
          query(state("kvobs.slo.target", "objective"), "target:"), low=None, high=1, absent=UNJUDGED),
    states("Burn alerts", "Which alert fired when?", highest("kvobs.slo.alert", "objective", "severity", "windows"),
           mappings=ALERT, absent=UNJUDGED, width=16, height=9),
    lines("Events judged", "Is there enough to judge?", rate("kvobs.slo.events", "objective"), absent=UNJUDGED,
          height=9),
))

BREAKER = Section("Breaker: what it decided and did", (
    states("Breaker's level", "When did which scope of the breaker open, and how far?",
           highest("kvobs.breaker.level", "instance", "scope", "mode"), mappings=GOOD_TO_BAD, absent=NO_BREAKER,
           width=24, note="In mode observe nothing is done about it."),
    lines("Transitions", "Which levels open and close?", rate("kvobs.breaker.transitions", "mode", "level", "phase"),
          absent=NONE_COUNTED),
    lines("Actions", "What was ordered, and was it done?", rate("kvobs.breaker.actions", "actuator", "kind", "outcome"),
          absent=NONE_COUNTED),
    lines("Late actions", "Which actions miss their time limit?", rate("kvobs.breaker.late", "actuator", "kind"),
          absent=NONE_COUNTED),
    lines("Duration of actions, p95", "How long does an action hold the engine?",
          quantile(0.95, "kvobs.breaker.action.duration", "actuator", "kind"), absent=NONE_COUNTED),
    lines("Memory regained", "What did the actions give back?", rate("kvobs.breaker.regained", "actuator", "kind"),
          absent=NONE_COUNTED),
    table("Levels now", "Which scope is open where?",
          query(state("kvobs.breaker.level", "instance", "scope", "mode"), "Level"), absent=NO_BREAKER, width=8,
          height=7),
))

ADMISSION = Section("Admission: whom it kept out", (
    lines("Requests by outcome", "Who was admitted, queued, clamped or refused?",
          rate("kvobs.admission.requests", "mode", "outcome"), absent=NO_GATE,
          note="In mode observe: what would have become of them."),
    lines("Admitted share by priority", "Do critical requests come through?",
          admitted_share(), high=1, absent=NO_GATE, note="Mode observe is left out: nobody is kept out in it."),
    lines("Flight records", "Was the last minute before something kept?", rate("kvobs.flight.records", "reason"),
          absent=NONE_COUNTED),
))

BOARD = Board(slug="slo-breaker", title="SLO & breaker",
              description="What was promised, how fast the error budget is spent, and what the breaker did about it.",
              strip=STRIP, sections=(SYMPTOM, BREAKER, ADMISSION))
