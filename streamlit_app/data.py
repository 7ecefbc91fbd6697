"""What the pages show, read from a store and worked out without a widget.

Rates are differences of cumulative counters between two samples of one process; a process begins its counters
anew, so no difference spans two of them. Everything carries its age: what is older than ``STALE_S`` is not now.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvobs.catalog import BY_NAME
from kvobs.model import Availability, FlightRecord
from kvobs.store import (
    AttentionSecond,
    Process,
    Series,
    SessionFact,
    Stored,
    StoreError,
    StoreReader,
    latest_attention,
    series,
    session_facts,
    spans,
)
from streamlit_app import processes as named
from streamlit_app import units

STALE_S = 6.0
RECENT_S = 10  # of which the strip is worked out, whatever range the charts have
CHARTED = 6  # processes with lines of their own
INTERVALS = 400
SESSIONS = 500  # in the picker
SECOND_NS = 1_000_000_000
LIVE_METRICS = (
    "kvobs.kv.usage", "kvobs.kv.caches", "kvobs.kv.fragmentation.article", "kvobs.kv.reallocations",
    "kvobs.kv.written", "kvobs.kv.copied", "kvobs.step.tokens", "kvobs.window.step.mean", "kvobs.window.step.variance",
    "kvobs.window.fragmentation", "kvobs.self.events.dropped", "kvobs.self.overhead", "kvobs.self.throttle",
    "kvobs.allocator.usage", "kvobs.heap.usage", "kvobs.device.memory", "process.memory.usage")
GUARD = {0: "observing", 1: "not deep", 2: "passing"}
Samples = list[tuple[int, float]]
Row = TypeVar("Row")
_COMBINE: dict[str, Callable[[list[float]], float]] = {"sum": math.fsum, "max": max, "min": min}
_RUN = "kvobs run -- python serve.py"


class NothingYet(Exception):
    """There is nothing to show; ``str()`` says why, in whole sentences, ``command`` what to type, if anything."""

    def __init__(self, sentences: str, command: str = "") -> None:
        super().__init__(sentences)
        self.command = command


@dataclass(frozen=True)
class Figure:
    """One number of the strip: what it is, what it says, the very number, and how old it is in seconds."""

    key: str
    label: str
    text: str
    raw: str
    age_s: float | None
    help: str


@dataclass(frozen=True)
class Judged:
    """A verdict of a flight record: what it is about, the verdict in one word, and the sentence to it."""

    about: str
    verdict: str
    sentence: str


@dataclass(frozen=True)
class Live:
    """The Live page at one moment.

    ``figures`` and ``age_s`` are of the ``told`` of the chosen processes: of the running ones, or, where none runs,
    of those that ended last. ``stale`` names running ones that have not written for more than ``STALE_S``;
    ``series`` are of the first ``CHARTED`` chosen ones, a point being the last one of ``every_s`` seconds.
    """

    figures: list[Figure]
    series: list[Series]
    processes: list[Process]
    chosen: int
    told: int
    stale: list[str]
    every_s: float
    age_s: float | None
    running: bool
    availability: list[Stored[Availability]]
    flights: list[Stored[FlightRecord]]
    problems: list[str] = field(default_factory=list)


def open_store(path: str, chosen: str | None = None) -> StoreReader:
    """The reader of what is at ``path``, of the chosen process or of all.

    Raises:
        NothingYet: nothing was written there.
        StoreError: it cannot be read.
    """
    place = Path(path)
    if not place.exists():
        raise NothingYet(f"Nothing has been written in {place} yet. Start a process with:", _RUN)
    try:
        return StoreReader(place, None if chosen is None else [chosen])
    except StoreError:
        if place.is_dir() and not any(place.glob("kvobs-*.sqlite")):
            raise NothingYet(f"There is no store in {place} yet. Start a process with:", _RUN) from None
        raise


def newest_first(processes: Iterable[Process]) -> list[Process]:
    """Running processes first, then by the last sign of life."""
    return sorted(processes, key=lambda found: (not found.alive, -(found.heartbeat_wall_ns or 0)))


def live(path: str, chosen: str | None, range_s: float | None, now_ns: int | None = None) -> Live:
    """Everything of the Live page.

    Args:
        chosen: a process id, or None for all of them.
        range_s: how far back, or None for everything.
    Raises:
        NothingYet, StoreError: as ``open_store``.
    """
    everything = open_store(path)
    processes = newest_first(everything.processes())
    picked = [found for found in processes if chosen in (None, found.process)]
    reader = everything if chosen is None else open_store(path, chosen)
    now = time.time_ns() if now_ns is None else now_ns
    written = spans(reader)
    told = told_of(picked, {process: last for process, (_, last) in written.items()})
    running = any(found.alive for found in picked)
    newest_ns = max((written[process][1] for process in told if process in written), default=None)
    # A range that ends with the data: of a process that ended an hour ago one wants its last minutes.
    until = (now if running or newest_ns is None else min(now, newest_ns)) + 1
    first = min((first for first, _ in written.values()), default=until - SECOND_NS)
    since = until - int(range_s * SECOND_NS) if range_s is not None else min(first, until - SECOND_NS)
    names = named.names(processes, named.known(path, everything))
    recent = recent_of(reader, {process: written[process][1] for process in told if process in written})
    return Live(
        figures=figures(recent, now), processes=processes, chosen=len(picked), told=len(told),
        series=series(reader, LIVE_METRICS, since, until, most=INTERVALS,
                      processes=[found.process for found in picked[:CHARTED]]),
        stale=[names[found.process] for found in picked if found.alive and found.process in written
               and now - written[found.process][1] > STALE_S * SECOND_NS],
        every_s=(until - since) / INTERVALS / SECOND_NS,
        age_s=None if newest_ns is None else (now - newest_ns) / SECOND_NS, running=running,
        availability=reader.availability(), flights=reader.flights()[-5:],
        problems=[str(problem) for problem in everything.problems])


def recent_of(reader: StoreReader, last_ns: Mapping[str, int]) -> list[Series]:
    """The last ``RECENT_S`` of each process before its last instant, every instant of it."""
    end = max(last_ns.values(), default=0)
    together = [process for process, last in last_ns.items() if last > end - STALE_S * SECOND_NS]
    groups = [together, *([process] for process in last_ns if process not in together)]
    return [one for group in groups if group for one in series(
        reader, LIVE_METRICS, min(last_ns[process] for process in group) - RECENT_S * SECOND_NS,
        max(last_ns[process] for process in group) + 1, processes=group, most=INTERVALS)]


def told_of(picked: Sequence[Process], last_ns: Mapping[str, int]) -> list[str]:
    """The processes whose numbers may be added up now: the running ones, else those that ended with the last one.

    What a process held that ended earlier is held no more.
    """
    running = [found.process for found in picked if found.alive]
    ends = {found.process: last_ns[found.process] for found in picked if found.process in last_ns}
    end = max(ends.values(), default=0)
    return running or [process for process, last in ends.items() if last > end - STALE_S * SECOND_NS]


def of(found: Iterable[Series], metric: str, **attributes: str) -> list[Series]:
    """The series of a metric that have these attribute values."""
    return [one for one in found if one.metric == metric and attributes.items() <= one.attributes.items()]


def over_time(found: Sequence[Series]) -> Samples:
    """Series of one process as one, aggregated at each instant as the catalog says; sums for counters."""
    at: dict[int, list[float]] = {}
    for one in found:
        for wall_ns, value in zip(one.wall_ns, one.values, strict=True):
            at.setdefault(wall_ns, []).append(value)
    if not found:
        return []
    row = BY_NAME[found[0].metric]
    combine = _COMBINE[row.across_ranks]
    return [(wall_ns, combine(values)) for wall_ns, values in sorted(at.items())]


def rate(samples: Samples) -> Samples:
    """Growth per second between samples; a fall is a new beginning and gives none."""
    return [(later, (high - low) * SECOND_NS / (later - earlier))
            for (earlier, low), (later, high) in itertools.pairwise(samples)
            if later > earlier and high >= low]


def by_process(found: Iterable[Series]) -> dict[str, list[Series]]:
    """Series by the process that they are of."""
    groups: dict[str, list[Series]] = {}
    for one in found:
        groups.setdefault(one.process, []).append(one)
    return groups


def newest(found: Sequence[Series]) -> tuple[float, int] | None:
    """The latest value over the series of each process together, and when; gauges of the latest instant only."""
    values, when = [], 0
    for one in by_process(found).values():
        samples = over_time(one)
        if samples:
            values.append(samples[-1][1])
            when = max(when, samples[-1][0])
    if not values:
        return None
    return _COMBINE[BY_NAME[found[0].metric].across_ranks](values), when


def newest_rate(found: Sequence[Series]) -> tuple[float, int] | None:
    """The latest rate of a counter, summed over processes, and when."""
    latest = [samples[-1] for one in by_process(found).values() if (samples := rate(over_time(one)))]
    return (math.fsum(value for _, value in latest), max(when for when, _ in latest)) if latest else None


def current(found: Sequence[Series]) -> list[Series]:
    """Series that have a point at the last instant of their process: others have ended, and are no value now."""
    ends: dict[str, int] = {}
    for one in found:
        ends[one.process] = max(ends.get(one.process, 0), one.wall_ns[-1])
    return [one for one in found if one.wall_ns[-1] == ends[one.process]]


def figures(found: Sequence[Series], now_ns: int) -> list[Figure]:
    """The strip of numbers; what has no value is told as absent."""
    alive = current(found)

    def figure(key: str, label: str, value: tuple[float, int] | None, text: Callable[[float], str], unit: str,
               metric: str) -> Figure:
        row = BY_NAME[metric]
        told = f"{row.meaning} Metric {metric}, {row.nature}. Formula: {row.formula}."
        if value is None:
            return Figure(key, label, "absent", "no value", None, told)
        return Figure(key, label, text(value[0]), units.raw(value[0], unit), (now_ns - value[1]) / SECOND_NS, told)

    usage, metric = "kvobs.kv.usage", "kvobs.window.step.variance"
    jitter = newest(of(alive, metric))
    throttle = newest(of(alive, "kvobs.self.throttle"))
    return [
        figure("kv-held", "KV held", newest(of(alive, usage, state="held")), units.size, "B", usage),
        figure("kv-slack", "KV slack", newest(of(alive, usage, state="slack")), units.size, "B", usage),
        figure("caches", "Caches", newest(of(alive, "kvobs.kv.caches")), units.count, "", "kvobs.kv.caches"),
        figure("reallocations", "Re-allocations /s", newest_rate(of(found, "kvobs.kv.reallocations")), units.count,
               "/s", "kvobs.kv.reallocations"),
        figure("copied", "KV copied /s", newest_rate(of(found, "kvobs.kv.copied")), units.size, "B/s",
               "kvobs.kv.copied"),
        figure("tokens", "Tokens /s", newest_rate(of(found, "kvobs.step.tokens")), units.count, "/s",
               "kvobs.step.tokens"),
        figure("fragmentation-article", "Fragm. (article)", newest(of(alive, "kvobs.kv.fragmentation.article")),
               units.share, "", "kvobs.kv.fragmentation.article"),
        figure("fragmentation-window", "Unused in window", newest(of(alive, "kvobs.window.fragmentation")), units.share,
               "", "kvobs.window.fragmentation"),
        figure("step", "Window step mean", newest(of(alive, "kvobs.window.step.mean")), units.seconds, "s",
               "kvobs.window.step.mean"),
        figure("jitter", "Window step jitter", None if jitter is None else (math.sqrt(jitter[0]), jitter[1]),
               units.seconds, "s", metric),
        figure("dropped", "Events dropped", newest(of(alive, "kvobs.self.events.dropped")), units.count, "",
               "kvobs.self.events.dropped"),
        figure("overhead", "Own overhead", newest(of(alive, "kvobs.self.overhead")), units.share, "",
               "kvobs.self.overhead"),
        figure("guard", "Overhead guard", throttle, lambda level: GUARD[int(level)], "", "kvobs.self.throttle"),
    ]


def verdicts(record: FlightRecord) -> list[Judged]:
    """What a flight record says of the request that failed and of the next step; nothing where it says neither."""
    try:
        found = json.loads(record.snapshot) if record.snapshot else None
    except ValueError:
        found = None
    judged = []
    for key, about in (("verdict", "The request that failed"), ("next_step", "The next step, estimated")):
        one = found.get(key) if isinstance(found, dict) else None
        if isinstance(one, dict):
            between = one.get("between")
            verdict = one.get("verdict") or (" or ".join(map(str, between)) if isinstance(between, list) else None)
            sentence = one.get("sentence") or one.get("reason") or ""
            judged.append(Judged(about, "no verdict" if verdict is None else str(verdict), str(sentence)))
    return judged


def processes_seen(path: str) -> object:
    """What the picker of processes depends on; never raises."""
    try:
        reader = open_store(path)
        return list(named.names(reader.processes(), named.known(path, reader)).items())
    except (NothingYet, StoreError) as why:
        return str(why)


def sessions_seen(path: str) -> object:
    """What the picker of sessions depends on; never raises."""
    try:
        found, processes = sessions(path)
        return (sorted((fact.process, fact.session) for fact in found),
                sorted((process.process, process.alive) for process in processes.values()))
    except (NothingYet, StoreError) as why:
        return str(why)


def sessions(path: str) -> tuple[list[SessionFact], dict[str, Process]]:
    """The newest sessions of a store, newest first, and its processes by id.

    Raises:
        NothingYet, StoreError: as ``open_store``; there are no turns.
    """
    reader = open_store(path)
    found = session_facts(reader)[:SESSIONS]
    if not found:
        raise NothingYet("No turn has ended yet. A turn is told when its generate call returns.")
    return found, {process.process: process for process in reader.processes()}


def attention(path: str, chosen: str | None) -> list[tuple[Stored[AttentionSecond], int | None]]:
    """Sampled attention of the cache that a process (or any) sampled last, oldest first, beside the bytes it held.

    Raises:
        NothingYet, StoreError: as ``open_store``; nothing was sampled.
    """
    reader = open_store(path, chosen)
    found = latest_attention(reader)
    if not found:
        reasons = sorted({fact.record.reason for fact in reader.availability()
                          if fact.record.subject == "attention" and fact.record.reason})
        raise NothingYet(" ".join(["No attention was sampled.", *reasons, "For example:"]),
                         "kvobs run --deep -- python serve.py")
    return found


def thinned(rows: Sequence[Row], most: int = INTERVALS) -> list[Row]:
    """At most ``most`` rows, evenly, the last one always among them."""
    if len(rows) <= most:
        return list(rows)
    step = math.ceil(len(rows) / most)
    return list(rows[::-1][::step][::-1])
