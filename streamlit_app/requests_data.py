"""What the page Requests shows of one pool of KV blocks: who is in its engine, who holds it, what happened lately.

Counts of the last minutes are differences of the pool's own counters, which begin anew with each process and pool.
Pools are told of by the second in the store, so a range begins at a whole one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from kvobs import store
from kvobs.model import Availability, Blocks, Origin, PoolWork, Preemption, RequestStates
from kvobs.store import Process, Stored, StoreReader
from streamlit_app import data
from streamlit_app import processes as named
from streamlit_app.requests_timeline import Phase, Timeline, timeline

Key = tuple[str, int]  # a process and one of its pools
BATCHING = "continuous batching"  # the subject of transformers' own pools
REQUESTS = 60  # in the timeline
PREEMPTIONS = 100  # in the table
LISTED_NS = 900 * data.SECOND_NS  # a pool that tells no requests is known by what it told within this time
SLICE_NS = 15 * data.SECOND_NS
LOST_NS = 10 * data.SECOND_NS  # a store whose first point is this much younger than its process lost older rows
NOTHING = ("No pool of KV blocks has been told of. kvobs sees those of vLLM, SGLang and transformers' continuous "
           "batching. For example:")
COMMAND = "kvobs run -- python -m vllm.entrypoints.openai.api_server --model MODEL"
BLOCKS = ("allocations", "failures", "preemptions")
WORK = ("evictions", "dropped", "touches", "queried_tokens", "hit_tokens", "resumed_queried_tokens",
        "resumed_hit_tokens", "recomputed_preempted_tokens", "recomputed_evicted_tokens", "failures_waiting")
_PHASES = ("cache_id", "request", "session", "phase", "start_wall_ns", "wall_ns", "outcome", "blocks")
Row = TypeVar("Row")
Pooled = TypeVar("Pooled", Blocks, PoolWork)
Read = Callable[[int, int], list[Row]]


@dataclass(frozen=True)
class Growth:
    """How much counters of a pool grew, and since when (Unix nanoseconds).

    ``partial`` where the store lost what was before, so that this is less than the range.
    """

    grown: dict[str, int]
    from_ns: int
    partial: bool


@dataclass(frozen=True)
class Requests:
    """The page at one moment.

    ``states``, ``pool`` and ``work`` are the newest word of each kind, absent where none was told. ``age_s`` is the
    age of the process's last sample, ``told_s`` that of the last word of the pool or its engine: an idle one says
    nothing. The growths are over the range, ``computed`` are the tokens of the steps in it, absent without steps.
    ``gone``: the pool was freed.
    """

    key: Key
    process: Process
    origin: Origin
    states: Stored[RequestStates] | None
    pool: Stored[Blocks] | None
    work: Stored[PoolWork] | None
    gone: bool
    age_s: float | None
    told_s: float
    now_ns: int
    blocks_growth: Growth | None
    work_growth: Growth | None
    computed: int | None
    timeline: Timeline
    preemptions: list[Stored[Preemption]]
    facts: list[Stored[Availability]]
    chosen: int = 1
    told: int = 1

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self.process.alive

    @property
    def stale(self) -> list[str]:
        """There is one process, and its age is told."""
        return []


def engines(path: str, now_ns: int | None = None) -> dict[Key, str]:
    """The pools that were told of and what each is called: of running processes first, as these are ordered.

    Raises:
        NothingYet, StoreError: as ``data.open_store``; there is no pool.
    """
    reader = data.open_store(path)
    processes = {found.process: found for found in reader.processes()}
    told: dict[Key, tuple[int, Origin]] = {(one.process, one.record.cache_id): (one.wall_ns, one.record.origin)
                                           for one in store.requests(reader)}
    now = time.time_ns() if now_ns is None else now_ns
    ends = [now if one.alive else one.ended_wall_ns or one.heartbeat_wall_ns or 0 for one in processes.values()]
    for one in reader.blocks(max(ends, default=now) - LISTED_NS):
        key = (one.process, one.record.cache_id)
        told[key] = (max(one.wall_ns, told[key][0] if key in told else 0), one.record.origin)
    told = {key: word for key, word in told.items() if key[0] in processes}
    if not told:
        reasons = sorted({fact.record.reason for fact in reader.availability() if fact.record.reason
                          and fact.record.subject.startswith(("vllm", "sglang", BATCHING))})
        raise data.NothingYet(" ".join([*reasons, NOTHING]), COMMAND)
    of = named.known(path, reader)
    of.update({process: dataclasses.replace(of.get(process, named.Known()), engine=origin.source, model=origin.model)
               for (process, _), (_, origin) in sorted(told.items(), key=lambda one: one[1][0])})
    order = named.names(processes.values(), of)
    place = {process: number for number, process in enumerate(order)}
    return {key: order[key[0]] for key in sorted(told, key=lambda key: (place[key[0]], -told[key][0], key))}


def engines_seen(path: str) -> object:
    """What the picker of pools depends on; never raises."""
    try:
        return engines(path)
    except (data.NothingYet, store.StoreError) as why:
        return str(why)


def requests(path: str, key: Key, range_s: float, now_ns: int | None = None) -> Requests:
    """Everything of the page for one pool.

    Raises:
        NothingYet, StoreError: as ``data.open_store``; what the pool told was deleted.
    """
    reader = data.open_store(path, key[0])
    now = time.time_ns() if now_ns is None else now_ns
    process = next((found for found in reader.processes() if found.process == key[0]), None)
    states = next((one for one in store.requests(reader) if one.record.cache_id == key[1]), None)
    written = store.spans(reader).get(key[0])
    if process is None or (states is None and written is None and process.started_wall_ns is None):
        raise data.NothingYet("The store of this process was deleted meanwhile.")

    def of_pool(since: int, until: int) -> list[Stored[Blocks]]:
        return [one for one in reader.blocks(since, until) if one.record.cache_id == key[1]]

    def of_work(since: int, until: int) -> list[Stored[PoolWork]]:
        return [one for one in store.pools(reader, since, until) if one.record.cache_id == key[1]]

    began, lost = _beginning(process, written, states)
    pool, work = newest(of_pool, began, now + 1), newest(of_work, began, now + 1)
    words = [(one.record.origin, moment(process, one.record.t_ns, one.wall_ns))
             for one in (states, pool, work) if one is not None]
    if not words:
        raise data.NothingYet("What this pool told was deleted from the store meanwhile.")
    told_ns = max(when for _, when in words)
    last = max(told_ns, written[1] if written else 0)
    until = (now if process.alive else min(now, last)) + 1
    since = (until - round(range_s * data.SECOND_NS)) // data.SECOND_NS * data.SECOND_NS
    phases, phases_from = _phases(reader, key[1], since, until)
    lately, _ = backwards(lambda begin, end: [one for one in store.preemptions(reader, begin, end)
                                              if one.record.cache_id == key[1]],
                          since, until, lambda found: len(found) >= PREEMPTIONS)
    steps = [tokens for _, cache, tokens in reader.rows("steps", ("cache_id", "tokens"), since_wall_ns=since,
                                                        until_wall_ns=until) if cache == key[1]]
    origin = words[0][0]
    return Requests(
        key, process, origin, states, pool, work, _is_gone(reader, key[1], told_ns), (now - last) / data.SECOND_NS,
        max(now - told_ns, 0) / data.SECOND_NS, now, _growth(of_pool, BLOCKS, pool, since, began, lost),
        _growth(of_work, WORK, work, since, began, lost), sum(steps) if steps else None,
        timeline(phases, states, lately, phases_from, until, REQUESTS), lately[::-1][:PREEMPTIONS],
        [fact for fact in reader.availability() if fact.record.subject.startswith(
            BATCHING if origin.source == "transformers" else origin.source)])


def moment(process: Process, t_ns: int, otherwise: int) -> int:
    """When something happened, in Unix nanoseconds, by the process's own clock where its anchor is known."""
    if process.started_wall_ns is None or process.started_ns is None:
        return otherwise
    return process.started_wall_ns + t_ns - process.started_ns


def _beginning(process: Process, written: tuple[int, int] | None, states: Stored[RequestStates] | None,
               ) -> tuple[int, bool]:
    """When the store of a process begins, and whether what it told before was deleted."""
    kept = written[0] if written else None
    began = process.started_wall_ns
    if began is None:
        found = [when for when in (kept, states.wall_ns if states else None) if when is not None]
        return (min(found) if found else 0) // data.SECOND_NS * data.SECOND_NS, True
    return began // data.SECOND_NS * data.SECOND_NS, kept is not None and kept > began + LOST_NS


def backwards(read: Read[Row], since: int, until: int, enough: Callable[[list[Row]], bool]) -> tuple[list[Row], int]:
    """The last rows of [since, until) in order of time, read in slices that double until there are ``enough``.

    Returns them with the beginning of what was read.
    """
    found: list[Row] = []
    begin, width = until, SLICE_NS
    while begin > since and not enough(found):
        end, begin = begin, max(since, begin - width)
        found = read(begin, end) + found
        width *= 2
    return found, begin


def newest(read: Read[Stored[Pooled]], since: int, until: int) -> Stored[Pooled] | None:
    """The last row of [since, until)."""
    found, _ = backwards(read, since, until, bool)
    return found[-1] if found else None


def _growth(read: Read[Stored[Pooled]], fields: Iterable[str], last: Stored[Pooled] | None, since: int, began: int,
            lost: bool) -> Growth | None:
    if last is None:
        return None
    before, begin, partial = newest(read, began, since), max(since, began), False
    if before is None and lost:
        before = read(since, last.wall_ns + 1)[0]
        begin, partial = before.wall_ns, True
    return Growth({name: getattr(last.record, name) - (getattr(before.record, name) if before is not None else 0)
                   for name in fields}, begin, partial)


def _phases(reader: StoreReader, cache_id: int, since: int, until: int) -> tuple[list[Phase], int]:
    """The phases that ended last, of enough requests for the timeline, and from when on they are complete."""
    def read(begin: int, end: int) -> list[Phase]:
        return [Phase(*row[2:]) for row in reader.rows("phases", _PHASES, since_wall_ns=begin, until_wall_ns=end)
                if row[1] == cache_id]

    return backwards(read, since, until, lambda found: len({one.request for one in found}) > REQUESTS)


def _is_gone(reader: StoreReader, cache_id: int, since_wall_ns: int) -> bool:
    return any(kind == "cache_gone" and gone == cache_id for _, kind, gone in reader.rows(
        "events", ("kind", "cache_id"), since_wall_ns=since_wall_ns // data.SECOND_NS * data.SECOND_NS))
