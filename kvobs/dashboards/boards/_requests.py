"""Requests and turns: how long users wait, where requests stand, and what steps cost."""

from __future__ import annotations

from kvobs.dashboards._model import Board, Section
from kvobs.dashboards._panels import lines, query, stat, unreachable
from kvobs.dashboards._promql import deviation, each, observed, quantile, rate, ratio, state
from kvobs.dashboards.boards._shared import NO_BRIDGE, NO_STEPS, NO_TURNS, NO_WINDOW, NONE_COUNTED

NO_ENGINE = "no serving engine"
NO_MIDDLEWARE = "no middleware for errors"
TOOK = "gen_ai.server.request.duration"
FIRST = "gen_ai.server.time_to_first_token"
EACH = "gen_ai.server.time_per_output_token"

STRIP = (
    unreachable(),
    stat("First token p95", "How long do users wait for the first token?", quantile(0.95, FIRST),
         absent=NO_TURNS),
    stat("Per token p95", "How fast do tokens come?", quantile(0.95, EACH), absent=NO_TURNS),
    stat("Calls", "How many calls end per second?", observed(TOOK), absent=NO_TURNS, unit="reqps"),
    stat("Turns not ok", "Which share of turns ended badly?",
         ratio(rate("kvobs.turns", outcome="~error|out_of_memory|cancelled"), rate("kvobs.turns"), "bad / all"),
         absent="no bad turn counted", steps=((None, "green"), (1e-9, "orange"), (0.05, "red"))),
    stat("Running", "How many requests run?", state("kvobs.requests", state="running"), absent=NO_ENGINE, decimals=0),
    stat("Waiting", "How many requests wait?", state("kvobs.requests", state="waiting"), absent=NO_ENGINE, decimals=0),
    stat("Slots", "How many requests may run at once?", state("kvobs.request.slots"), absent=NO_ENGINE, decimals=0),
)

SYMPTOM = Section("Symptom: what users feel", (
    lines("Time to first token", "How long do users wait for the first token?",
          *(query(quantile(q, FIRST), f"p{q * 100:g}", exemplars=q == 0.95) for q in (0.5, 0.95, 0.99)),
          absent=NO_TURNS),
    lines("Time per output token", "How fast do tokens come?",
          *(query(quantile(q, EACH), f"p{q * 100:g}", exemplars=q == 0.95) for q in (0.5, 0.95, 0.99)),
          absent=NO_TURNS),
    lines("Duration of calls", "How long do whole calls take?",
          *(query(quantile(q, TOOK), f"p{q * 100:g}", exemplars=q == 0.95) for q in (0.5, 0.95, 0.99)),
          absent=NO_TURNS),
    lines("Turns by outcome", "How do turns end?", rate("kvobs.turns", "model", "outcome"), absent=NO_TURNS),
    lines("HTTP requests by outcome", "How do requests at the middleware for errors end?",
          rate("kvobs.http.requests", "server", "outcome"), absent=NO_MIDDLEWARE),
    lines("HTTP failures by class", "What do requests fail of?",
          rate("kvobs.http.failures", "error_type", "phase"), absent=NO_MIDDLEWARE),
    lines("Calls that ran out of memory", "Which model's calls ran out of memory?",
          rate("kvobs.out_of_memory", "model"),
          absent=NONE_COUNTED),
    lines("Tokens per call, p50 and p95", "How long are prompts and replies?",
          *(query(quantile(q, "gen_ai.client.token.usage", "gen_ai_token_type"), f"p{q * 100:g}") for q in (0.5, 0.95)),
          absent=NO_TURNS),
))

PRESSURE = Section("Pressure: where requests stand", (
    lines("Requests by state", "How many requests run, wait or were preempted?",
          state("kvobs.requests", "model", "state"), stacked=True, absent=NO_ENGINE),
    lines("Why requests wait", "What do waiting requests wait for?",
          state("kvobs.requests", "model", "reason", state="waiting"), stacked=True, absent=NO_ENGINE),
    lines("Slots and running", "Is the limit on running requests reached?",
          query(state("kvobs.request.slots", "model"), "slots of"),
          query(state("kvobs.requests", "model", state="running"), "running of"), absent=NO_ENGINE),
    lines("Phases, p95", "Where do requests spend their time?", quantile(0.95, "kvobs.request.phase.duration", "phase"),
          absent=NO_ENGINE),
    lines("Blocks for the next request", "Would the next waiting request fit?",
          state("kvobs.request.next", "model", "verdict"), absent="nobody waits"),
    lines("Requests through each phase", "How many requests leave each phase per second?",
          observed("kvobs.request.phase.duration", "phase"), absent=NO_ENGINE),
))

STEPS = Section("Steps: what the engine's passes cost", (
    lines("Step duration by phase, p95", "How long do forward passes take?",
          quantile(0.95, "kvobs.step.duration", "phase"), absent=NO_STEPS),
    lines("Tokens computed", "How much does the engine get done?", rate("kvobs.step.tokens", "model", "phase"),
          absent=NO_STEPS),
    lines("Steps", "How many passes are there?", query(observed("kvobs.step.duration", "model", "phase")),
          absent=NO_STEPS),
    lines("Mean step in the window, slowest process", "How long do steps take right now?",
          state("kvobs.window.step.mean", "model", "device"), absent=NO_WINDOW, width=12),
    lines("Spread of steps in the window", "Are steps steady?",
          deviation(state("kvobs.window.step.variance", "model", "device")), absent=NO_WINDOW, width=12),
))

ENGINES = Section("kvobs bridge: requests of engines that are scraped", (
    lines("Requests by state, as the engine says", "How many requests run or wait?",
          state("kvobs.engine.requests", "target", "state"), stacked=True, absent=NO_BRIDGE),
    lines("Why requests wait, as the engine says", "What do they wait for?",
          state("kvobs.engine.waiting", "target", "reason"), stacked=True, absent=NO_BRIDGE),
    lines("Ended and rejected", "How do requests end?",
          query(rate("kvobs.engine.finished", "target", "outcome"), "ended:"),
          query(rate("kvobs.engine.rejected", "target", "reason"), "rejected:"), absent=NO_BRIDGE),
    lines("Mean latency by phase", "Where do requests spend their time?",
          each(rate("kvobs.engine.phase.duration", "target", "phase"),
               rate("kvobs.engine.phase.observations", "target", "phase"), "s", "sum of latencies / observations"),
          absent=NO_BRIDGE),
    lines("Tokens, as the engine says", "How much does the engine get done?",
          rate("kvobs.engine.tokens", "target", "kind"), absent=NO_BRIDGE),
    lines("Preemptions, as the engine says", "Do requests lose their blocks?",
          rate("kvobs.engine.preemptions", "target", "model"), absent=NO_BRIDGE),
), collapsed=True)

BOARD = Board(slug="requests", title="Requests & turns",
              description="How long users wait, where requests stand, and what the engine's steps cost.",
              strip=STRIP, sections=(SYMPTOM, PRESSURE, STEPS, ENGINES))
