"""What the page Breaker shows of one process: levels over time, objectives, decisions, and what became of orders."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

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
FACT = "breaker"  # how the subjects of its facts begin
BEFORE_END_NS = 60 * data.SECOND_NS  # of a process its last level is sought there first
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
    """The processes that have, or had, a breaker (or were refused one), and what each is called.

    Raises:
        NothingYet, StoreError: as ``data.open_store``; no process has one.
    """
    reader = data.open_store(path)
    found = {fact.process for fact in reader.availability() if fact.record.subject.startswith(FACT)}
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
    last = _last(reader)
    newest = last[-1].wall_ns if last else None
    until = now if one.alive or newest is None else min(now, newest)
    since = until - int(range_s * data.SECOND_NS)
    facts = [fact for fact in reader.availability() if fact.record.subject.startswith(FACT)]
    latest = {point.attributes["scope"]: point for point in last if newest is not None
              and point.wall_ns > newest - GAP_NS}
    return Breaker(
        process=one, mode=next((point.attributes["mode"] for point in reversed(last)), ""),
        policy=next((fact.record.reason for fact in facts if fact.record.subject == "breaker policy"), ""),
        levels={scope: int(point.value) for scope, point in sorted(latest.items())},
        spans=spans(reader.points(LEVEL, since, until + 1), since, until), begin_ns=since, end_ns=until,
        decisions=store.decisions(reader, since), actions=store.actions(reader, since),
        standings=_standings(reader, until),
        untold=sorted(fact.record.subject.removeprefix("breaker signal ") for fact in facts
                      if fact.record.subject.startswith("breaker signal ") and not fact.record.available),
        facts=facts, age_s=None if newest is None else (now - newest) / data.SECOND_NS)


def spans(points: Iterable[Point], since_ns: int, until_ns: int) -> list[Span]:
    """Samples of levels as spans of one level each; where nothing was told for a while there is none."""
    made: list[Span] = []
    at: dict[str, int] = {}  # where in it the latest span of a scope is
    for point in sorted(points, key=lambda one: one.wall_ns):
        if not since_ns <= point.wall_ns <= until_ns:
            continue
        scope, level = point.attributes["scope"], int(point.value)
        if scope in at and point.wall_ns - made[at[scope]].end_ns <= GAP_NS:
            before = made[at[scope]] = replace(made[at[scope]], end_ns=point.wall_ns)
            if before.level == level:
                continue
        at[scope] = len(made)
        made.append(Span(scope, level, point.wall_ns, point.wall_ns))
    return made


def became(decisions: Sequence[Stored[Decided]], actions: Sequence[Stored[ActionTaken]]) -> list[list[ActionTaken]]:
    """What became of the orders that each decision gave: an answer is of the latest decision of its level before it
    that gave such an order. Opening orders, and leaving ``open`` takes back. By time: a store has no other link.
    """
    made: list[list[ActionTaken]] = [[] for _ in decisions]
    gave: dict[tuple[int, bool], int] = {}  # the latest decision that ordered, or took back, at a level
    told = iter(enumerate(decisions))
    number, decision = next(told, (0, None))
    for action in actions:
        while decision is not None and decision.wall_ns <= action.wall_ns:
            level = decision.record.level
            if decision.record.after == "open":
                gave[level, False] = number
                gave.pop((level, True), None)
            elif decision.record.before == "open":
                gave[level, True] = number
            number, decision = next(told, (0, None))
        found = gave.get((action.record.level, action.record.undo))
        if found is not None:
            made[found].append(action.record)
    return made


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


def _last(reader: StoreReader) -> list[Point]:
    """The last levels of the reader's process. A store holds days of samples, and a page looks every second."""
    one, = reader.processes()
    end = one.ended_wall_ns or one.heartbeat_wall_ns or 0
    return reader.points(LEVEL, end - BEFORE_END_NS) or reader.points(LEVEL)


def _since(reader: StoreReader) -> int:
    last = _last(reader)
    return (last[-1].wall_ns if last else 0) - REPLAYED_NS


def _samples(reader: StoreReader) -> dict[str, list[Point]]:
    since = _since(reader)
    return {metric: reader.points(metric, since) for metric in WANTED}


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
    samples, made = _samples(reader), store.decisions(reader, _since(reader))
    return hindsight(process, [one.record for one in made], [one.wall_ns for one in made], samples, HORIZON_S)
