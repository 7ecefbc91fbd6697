"""What the page Breaker shows of one process: levels over time, objectives, decisions, and what became of orders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvobs import store
from kvobs.breaker import Policy
from kvobs.breaker.simulator import WANTED, WouldHave, hindsight, replayed
from kvobs.model import ActionTaken, Availability, Decided
from kvobs.store import Point, Process, Stored, StoreReader
from streamlit_app import data
from streamlit_app import processes as named

LEVEL = "kvobs.breaker.level"
NOTHING = ("No process of this store has a breaker. In mode observe it decides and tells, and does nothing. "
           "For example:")
COMMAND = "KVOBS_BREAKER=observe kvobs run -- python serve.py"
MOST = 500  # decisions and actions, the newest
HORIZON_S = 60.0
GAP_NS = 10 * data.SECOND_NS  # without a word for so long, a level is not known
REPLAYED_NS = 6 * 3600 * data.SECOND_NS  # of the past


@dataclass(frozen=True)
class Span:
    """A scope was at a level, from and to (Unix nanoseconds)."""

    scope: str
    level: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Standing:
    """How an objective stands: its newest figures, each absent where nothing told it."""

    name: str
    target: float | None
    events: float | None
    good: float | None
    budget: float | None
    burn: dict[str, float]
    alerts: list[str]


@dataclass(frozen=True)
class Breaker:
    """The page at one moment. ``age_s`` is that of the process's last sample."""

    process: Process
    mode: str
    policy: str
    levels: dict[str, int]
    spans: list[Span]
    begin_ns: int
    end_ns: int
    decisions: list[Stored[Decided]]
    actions: list[Stored[ActionTaken]]
    standings: list[Standing]
    untold: list[str]
    facts: list[Stored[Availability]]
    age_s: float | None
    chosen: int = 1
    told: int = 1
    stale: list[str] = field(default_factory=list)

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self.process.alive


def with_breaker(path: str) -> dict[str, str]:
    """The processes that have, or had, a breaker, and what each is called.

    Raises:
        NothingYet, StoreError: as ``data.open_store``; no process has one.
    """
    reader = data.open_store(path)
    found = {point.process for point in reader.points(LEVEL)}
    if not found:
        raise data.NothingYet(NOTHING, COMMAND)
    every = reader.processes()
    names = named.names(every, named.known(path, reader))
    return {process: name for process, name in names.items() if process in found}


def breaker(path: str, process: str, range_s: float, now_ns: int | None = None) -> Breaker:
    """The page.

    Raises:
        NothingYet, StoreError: as ``data.open_store``.
    """
    reader = data.open_store(path, process)
    one, = reader.processes()
    now = time.time_ns() if now_ns is None else now_ns
    points = reader.points(LEVEL)
    newest = max((point.wall_ns for point in points), default=None)
    until = now if one.alive or newest is None else min(now, newest)
    since = until - int(range_s * data.SECOND_NS)
    decided = store.decisions(reader, since)[-MOST:]
    facts = [fact for fact in reader.availability() if fact.record.subject.startswith("breaker")]
    latest = {point.attributes["scope"]: point for point in points if newest is not None
              and point.wall_ns > newest - GAP_NS}
    return Breaker(
        process=one, mode=next((point.attributes["mode"] for point in reversed(points)), ""),
        policy=next((fact.record.reason for fact in facts if fact.record.subject == "breaker policy"), ""),
        levels={scope: int(point.value) for scope, point in sorted(latest.items())},
        spans=spans(points, since, until), begin_ns=since, end_ns=until, decisions=decided,
        actions=store.actions(reader, since)[-MOST:], standings=_standings(reader, until),
        untold=sorted(fact.record.subject.removeprefix("breaker signal ") for fact in facts
                      if fact.record.subject.startswith("breaker signal ") and not fact.record.available),
        facts=facts, age_s=None if newest is None else (now - newest) / data.SECOND_NS)


def spans(points: Sequence[Point], since_ns: int, until_ns: int) -> list[Span]:
    """Samples of levels as spans of one level each; where nothing was told for a while there is none."""
    made: list[Span] = []
    last: dict[str, Span] = {}
    for point in sorted(points, key=lambda one: one.wall_ns):
        if not since_ns <= point.wall_ns <= until_ns:
            continue
        scope, level = point.attributes["scope"], int(point.value)
        before = last.get(scope)
        if before is not None and point.wall_ns - before.end_ns <= GAP_NS:
            made.remove(before)
            before = Span(scope, before.level, before.begin_ns, point.wall_ns)
            made.append(before)
            last[scope] = before
            if before.level == level:
                continue
        last[scope] = Span(scope, level, point.wall_ns, point.wall_ns)
        made.append(last[scope])
    return made


def became(decision: Stored[Decided], decisions: Sequence[Stored[Decided]],
           actions: Sequence[Stored[ActionTaken]]) -> list[ActionTaken]:
    """What became of the orders that a decision gave: answers of its level and direction until the level's next one."""
    later = [one.wall_ns for one in decisions if one.record.level == decision.record.level
             and one.wall_ns > decision.wall_ns]
    end = min(later, default=decision.wall_ns + 60 * data.SECOND_NS)
    undo = decision.record.after != "open"
    return [one.record for one in actions if one.record.level == decision.record.level and one.record.undo == undo
            and decision.wall_ns <= one.wall_ns < end]


def _standings(reader: StoreReader, until_ns: int) -> list[Standing]:
    newest: dict[str, dict[tuple[tuple[str, str], ...], Point]] = {}
    for metric in ("target", "events", "good", "budget", "burn", "alert"):
        name = f"kvobs.slo.{metric}"
        for point in reader.points(name, until_ns - GAP_NS):
            newest.setdefault(metric, {})[tuple(sorted(point.attributes.items()))] = point

    def value(metric: str, objective: str) -> float | None:
        return next((point.value for point in newest.get(metric, {}).values()
                     if point.attributes["objective"] == objective), None)

    objectives = sorted({point.attributes["objective"] for found in newest.values() for point in found.values()})
    return [Standing(
        one, value("target", one), value("events", one), value("good", one), value("budget", one),
        {point.attributes["window"]: point.value for point in newest.get("burn", {}).values()
         if point.attributes["objective"] == one},
        [f"{point.attributes['severity']} ({point.attributes['windows']})" for point in newest.get("alert", {}).values()
         if point.attributes["objective"] == one and point.value]) for one in objectives]


def _samples(reader: StoreReader) -> dict[str, list[Point]]:
    end = max((point.wall_ns for point in reader.points(LEVEL)), default=0)
    return {metric: reader.points(metric, end - REPLAYED_NS) for metric in WANTED}


def replay(path: str, process: str, policy: Policy) -> WouldHave:
    """What another policy would have decided on what the process recorded in the last six hours of it.

    Raises:
        NothingYet, StoreError: as ``data.open_store``.
    """
    found, = replayed(process, _samples(data.open_store(path, process)), [policy], HORIZON_S)
    return found


def judged(path: str, process: str) -> WouldHave:
    """What was decided in the last six hours, judged by the trouble that came.

    Raises:
        NothingYet, StoreError: as ``data.open_store``.
    """
    reader = data.open_store(path, process)
    samples = _samples(reader)
    end = max((point.wall_ns for point in reader.points(LEVEL)), default=0)
    made = store.decisions(reader, end - REPLAYED_NS)
    return hindsight(process, [one.record for one in made], [one.wall_ns for one in made], samples, HORIZON_S)
