"""Telemetry health: whether what the other boards show is complete, fresh and cheap, and what cannot be observed."""

from __future__ import annotations

from kvobs.dashboards._model import Board, Section
from kvobs.dashboards._panels import lines, query, stat, states, table, text, unreachable
from kvobs.dashboards._promql import SAMPLES, SCRAPE, highest, rate, state, top
from kvobs.dashboards.boards._shared import NO_BRIDGE, NO_STEPS, NONE_COUNTED

THROTTLE = {0: ("all", "green"), 1: ("no deep sampling", "yellow"), 2: ("passing through", "red")}
UP = {0: ("down", "red"), 1: ("up", "green")}
HERE = {0: ("no", "orange"), 1: ("yes", "green")}

STRIP = (
    unreachable(),
    stat("Telemetry lost", "Is anything that is shown incomplete?", rate("kvobs.self.events.dropped"),
         absent=NONE_COUNTED, steps=((None, "green"), (1e-9, "red"))),
    stat("Highest overhead", "Does watching cost too much anywhere?", state("kvobs.self.overhead"), absent=NO_STEPS),
    stat("Observation", "Is less observed than usual anywhere?", state("kvobs.self.throttle"), mappings=THROTTLE),
    stat("Failed hooks", "Was a hook detached?", rate("kvobs.self.hook.failures"), absent=NONE_COUNTED,
         steps=((None, "green"), (1e-9, "red"))),
    stat("Folded series", "Do metrics have too many label sets?", rate("kvobs.self.series.overflow"),
         absent=NONE_COUNTED, steps=((None, "green"), (1e-9, "orange"))),
    stat("Events", "How much is told?", rate("kvobs.self.events")),
    stat("Disk", "How much disk do the stores take?", state("kvobs.self.store.size"), absent="no store"),
)

SYMPTOM = Section("Symptom: telemetry is lost, late or folded", (
    lines("Lost by stage", "Where was telemetry lost: the queue, the store or OTLP?",
          rate("kvobs.self.events.dropped", "instance", "stage"), absent=NONE_COUNTED),
    lines("Hooks that failed", "Which source's hooks were detached?", rate("kvobs.self.hook.failures", "source"),
          absent=NONE_COUNTED),
    lines("Series folded into 'other'", "Which metric has too many label sets?",
          rate("kvobs.self.series.overflow", "metric"), absent=NONE_COUNTED),
    lines("Events interpreted", "Does each process still tell something?", rate("kvobs.self.events", "instance")),
    lines("Scrapes: slowest ten", "Which process answers slowly?", top(10, state(SCRAPE.name, "instance")),
          absent="no targets"),
    lines("Scrapes: largest ten", "Which process tells most?", top(10, state(SAMPLES.name, "instance")),
          absent="no targets"),
))

COST = Section("Cost: what watching takes", (
    lines("Share of the engine's time", "Does watching cost too much?", state("kvobs.self.overhead", "instance"),
          absent=NO_STEPS),
    states("What the overhead guard does", "When was less observed?", highest("kvobs.self.throttle", "instance"),
           mappings=THROTTLE, absent="not reported", width=16, height=7),
    lines("On the engine's threads", "Which source's hooks take time?", rate("kvobs.self.hook.duration", "source"),
          note="By kvobs's own clock, which misses about an eighth. 1 is one thread, fully used."),
    lines("On kvobs's own thread", "What does interpreting cost?",
          query(rate("kvobs.self.drain.duration"), "all CPU time"), query(rate("kvobs.self.fold.duration"), "folding"),
          query(rate("kvobs.self.window.duration"), "windows")),
    lines("Polled sources", "Which source is slow to read?", rate("kvobs.self.poll.duration", "source")),
    lines("Passing through", "Which share of the time was nothing observed?", rate("kvobs.self.paused", "instance"),
          high=1, absent=NONE_COUNTED),
    lines("Turns cut", "How many turns are not told because observation paused?",
          rate("kvobs.self.turns.cut", "instance"), absent=NONE_COUNTED),
    lines("Stores", "How much disk does each store take?", state("kvobs.self.store.size", "instance"),
          absent="no store"),
    lines("Pruned by age", "What was deleted because it was older than the retention?",
          rate("kvobs.self.store.pruned", "what"), absent=NONE_COUNTED),
))

LIMITS = Section("What can be observed here, and what not", (
    table("Subjects", "What cannot be observed, and why?",
          query(state("kvobs.availability", "instance", "subject", "reason"), "Here"), mappings=HERE, width=16,
          height=10),
    text("How to read absence", "A panel that says *not reported*, *no paged pool* or the like has no data, which is "
         "not 0: the table beside it gives the reason per process. A process that Prometheus does not reach is counted "
         "under *Unreachable*; its values end at its last scrape.", width=8, height=10),
))

BRIDGE = Section("kvobs bridge: engines that are scraped", (
    states("Engines reached", "When did which engine not answer?", state("kvobs.engine.up", "target"), mappings=UP,
           absent=NO_BRIDGE),
    lines("Age of what engines said", "How old is the engines' word?", state("kvobs.engine.age", "target"),
          absent=NO_BRIDGE, width=6, height=6),
    lines("Duration of engines' scrapes", "Which engine answers slowly?",
          state("kvobs.engine.scrape.duration", "target"), absent=NO_BRIDGE, width=6, height=6),
    lines("Samples", "How much of what engines say is understood?",
          state("kvobs.engine.scrape.series", "target", "outcome"), absent=NO_BRIDGE),
    lines("Scrapes", "Do scrapes of engines fail?", rate("kvobs.engine.scrapes", "target", "outcome"),
          absent=NO_BRIDGE),
    lines("Samples not believed", "What was refused, and why?",
          rate("kvobs.engine.scrape.dropped", "target", "reason"), absent=NO_BRIDGE),
), collapsed=True)

BOARD = Board(slug="telemetry", title="Telemetry health",
              description="Whether the other boards are complete, fresh and cheap, and what cannot be observed.",
              strip=STRIP, sections=(SYMPTOM, COST, LIMITS, BRIDGE))
