"""Reading stores, also while they are written: one file, or all of a directory merged by time.

Every call looks at the directory anew. In a directory an unreadable file does not hide the readable ones: it
is named in ``problems``.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from kvobs import model
from kvobs.store import _rows, _space
from kvobs.store._connect import fetch, reading
from kvobs.store._schema import TABLES, StoreError, Table

NAMED = ("metric", "attributes", "bounds")  # columns that points have through their series
_PAGE_ROWS = 20_000  # held in memory at once, over all files
T = TypeVar("T")


class Stored(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """A record, the process it comes from, and its Unix time by that process's anchor."""

    process: str
    wall_ns: int
    record: T


class Process(msgspec.Struct, frozen=True, gc=False):
    """A process that wrote stores. ``alive`` is asked of the kernel, the heartbeat is the last one written.

    ``argv`` holds the command line without its values. Everything but the id is absent where a process was
    killed before its first commit was complete.
    """

    process: str
    alive: bool
    pid: int | None
    host: str | None
    python: str | None
    argv: tuple[str, ...] | None
    started_wall_ns: int | None
    started_ns: int | None
    endpoint: str | None
    heartbeat_wall_ns: int | None
    ended_wall_ns: int | None
    dropped: int | None


class StepSecond(msgspec.Struct, frozen=True, gc=False):
    """The steps of one cache within one second: sums, and the sizes after the last of them.

    The sums also hold what was rewritten between steps; sizes are absent in a second that saw no step.
    """

    wall_ns: int
    cache_id: int
    t_ns: int
    source: str
    model: str
    cache: str
    device: str
    dtype: str
    steps: int
    prefill_steps: int
    tokens: int
    prefill_tokens: int
    duration_ns: int
    hook_ns: int
    kv_bytes: int | None
    kv_reserved_bytes: int | None
    kv_largest_bytes: int | None
    reallocations: int
    bytes_written: int
    bytes_copied: int


class AttentionSecond(msgspec.Struct, frozen=True, gc=False):
    """Sampled decode steps of one cache and kind of layers within one second.

    ``steps`` counts them; ``queries``, ``local_sum``, ``chance_sum``, ``entries``, ``alive`` and the transitions are
    sums over them, the rest is the last one's. The fields are those of ``kvobs.model.Attention``.
    """

    wall_ns: int
    cache_id: int
    layers: str
    t_ns: int
    source: str
    model: str
    cache: str
    device: str
    dtype: str
    session: str
    turn: int
    every: int
    steps: int
    hook_ns: int
    tokens: int
    queries: int
    local_sum: float
    chance_sum: float
    entries: int
    alive: int
    blocks: int
    pending: int
    to_pending: int
    to_active: int
    reclaimable_bytes: int


class Point(msgspec.Struct, frozen=True, gc=False):
    """A sample of one series; for a histogram ``value`` is the sum and the rest is present."""

    process: str
    wall_ns: int
    attributes: dict[str, str]
    value: float
    count: int | None
    buckets: tuple[int, ...] | None
    bounds: tuple[float, ...] | None


class StoreReader:
    """The stores at a path."""

    def __init__(self, path: Path | str, processes: Collection[str] | None = None) -> None:
        """Look once.

        Args:
            processes: read the stores of these alone; None means all.
        Raises:
            StoreError: nothing readable is there.
        """
        self.path = Path(path)
        self._only = None if processes is None else frozenset(processes)
        self.problems: list[StoreError] = []
        self.stores()

    def stores(self) -> list[_space.Store]:
        """The readable stores, oldest first; ``problems`` names the others.

        Raises:
            StoreError: there is none.
        """
        if not self.path.is_dir():
            with reading(self.path):
                return [_space.Store(self.path, self.path.stem, 0, alive=_space.is_alive(self.path))]
        try:
            found = [store for store in _space.survey(self.path) if store.path.exists()]
        except OSError as error:
            raise StoreError(f"The directory {self.path} cannot be read: {error}.") from None
        if not found:
            raise StoreError(f"There is no kvobs store in {self.path}; name a store or a directory of stores.")
        self.problems, readable = [], []
        for store in found:
            try:
                row = _process_row(store)
                if self._only is None or (row[0] if row else store.process) in self._only:
                    readable.append(store)
            except StoreError as problem:
                if store.path.exists():
                    self.problems.append(problem)
        if not readable and self.problems and self._only is None:
            raise self.problems[0]
        return readable

    def refuse_problems(self) -> None:
        """For whoever must not leave anything out.

        Raises:
            StoreError: a store of the directory was unreadable when ``stores`` last looked.
        """
        if self.problems:
            raise self.problems[0]

    def rows(self, table: str, columns: Sequence[str] | None = None, *, since_wall_ns: int | None = None,
             until_wall_ns: int | None = None, session: str | None = None) -> Iterator[tuple[Any, ...]]:
        """Rows of all files as tuples (process, *columns), timed tables in the order of time.

        ``points`` also have the columns metric, attributes and bounds of their series. ``until`` is exclusive.
        Streams in pages; rows that retention deletes meanwhile may be missing.

        Raises:
            StoreError: there is no such table or column, or a store became unreadable.
        """
        spec = TABLES.get(table)
        if spec is None:
            raise StoreError(f"A store has no table {table!r}; it has {', '.join(TABLES)}.")
        allowed = spec.names + (NAMED if table == "points" else ())
        wanted = tuple(columns) if columns is not None else spec.names
        if unknown := [name for name in wanted if name not in allowed]:
            raise StoreError(f"The table {table!r} has no column {unknown[0]!r}; it has {', '.join(allowed)}.")
        where, values = _conditions(spec, since_wall_ns, until_wall_ns, session)
        stores = [store for store in self.stores() if spec.since == 1 or version_of(store) >= spec.since]
        width = 1 + len(wanted)  # behind it in each row stands what orders the rows, the time first
        page = max(_PAGE_ROWS // max(len(stores), 1), 200)
        streams = [_pages(store, process_of(store), spec, wanted, where, values, page) for store in stores]
        if len(streams) == 1:
            merged: Iterable[tuple[Any, ...]] = streams[0]
        else:
            merged = heapq.merge(*streams, key=operator.itemgetter(width)) if spec.timed else itertools.chain(*streams)
        return (row[:width] for row in merged)

    def turns(self, session: str | None = None, since_wall_ns: int | None = None,
              until_wall_ns: int | None = None) -> list[Stored[model.Turn]]:
        """Turns in the order in which they ended."""
        return [Stored(row[0], row[1], _rows.turn_of(row[1:])) for row in self.rows(
            "turns", session=session, since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]

    def migrations(self, since_wall_ns: int | None = None,
                   until_wall_ns: int | None = None) -> list[Stored[model.Migration]]:
        """Migrations in the order of time."""
        return [Stored(row[0], row[1], _rows.migration_of(row[1:])) for row in self.rows(
            "migrations", since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]

    def events(self, since_wall_ns: int | None = None, until_wall_ns: int | None = None,
               ) -> list[Stored[model.OutOfMemory | model.HookFailed | model.CacheGone]]:
        """Out-of-memory errors, failed hooks and freed caches in the order of time."""
        return [Stored(row[0], row[1], _rows.event_of(row[1:])) for row in self.rows(
            "events", since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]

    def blocks(self, since_wall_ns: int | None = None, until_wall_ns: int | None = None) -> list[Stored[model.Blocks]]:
        """The last state of each paged pool in each second; ``wall_ns`` is the second's beginning."""
        return [Stored(row[0], row[1], _rows.blocks_of(row[1:])) for row in self.rows(
            "blocks", since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]

    def steps(self, since_wall_ns: int | None = None, until_wall_ns: int | None = None) -> list[Stored[StepSecond]]:
        """Steps summed per second and cache; ``wall_ns`` is the second's beginning."""
        return [Stored(row[0], row[1], StepSecond(*row[1:])) for row in self.rows(
            "steps", since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]

    def attention(self, since_wall_ns: int | None = None,
                  until_wall_ns: int | None = None) -> list[Stored[AttentionSecond]]:
        """Sampled attention per second, cache and kind of layers; ``wall_ns`` is the second's beginning."""
        return [Stored(row[0], row[1], AttentionSecond(*row[1:])) for row in self.rows(
            "attention", since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]

    def flights(self, since_wall_ns: int | None = None,
                until_wall_ns: int | None = None) -> list[Stored[model.FlightRecord]]:
        """Flight records in the order of time."""
        return [Stored(row[0], row[1], _rows.flight_of(row[1:])) for row in self.rows(
            "flights", since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]

    def maps(self) -> list[Stored[model.MemoryMap]]:
        """The newest memory map per process and device."""
        latest: dict[tuple[str, str], Stored[model.MemoryMap]] = {}
        for process, *row in self.rows("maps"):
            known = latest.get((process, row[0]))
            if known is None or known.wall_ns <= row[1]:
                latest[process, row[0]] = Stored(process, row[1], _rows.map_of(row))
        return [latest[key] for key in sorted(latest)]

    def availability(self) -> list[Stored[model.Availability]]:
        """The latest fact per process and subject; ``wall_ns`` is when it began to hold."""
        latest: dict[tuple[str, str], Stored[model.Availability]] = {}
        for process, subject, wall_ns, available, reason in self.rows("availability"):
            known = latest.get((process, subject))
            if known is None or known.wall_ns <= wall_ns:
                latest[process, subject] = Stored(process, wall_ns,
                                                  model.Availability(subject, bool(available), reason))
        return list(latest.values())

    def processes(self) -> list[Process]:
        """Every process with a store here, by start."""
        alive: dict[str, bool] = {}
        facts: dict[str, tuple[Any, ...]] = {}
        for store in self.stores():
            process = process_of(store)
            alive[process] = alive.get(process, False) or store.alive
            row = _process_row(store)
            if row is not None and (process not in facts or row[1] >= facts[process][1]):
                facts[process] = row
        return sorted((_process(name, lives, facts.get(name)) for name, lives in alive.items()),
                      key=lambda found: found.started_wall_ns or 0)

    def points(self, metric: str, since_wall_ns: int | None = None, until_wall_ns: int | None = None,
               every_ns: int | None = None) -> list[Point]:
        """Samples of a metric in the order of time; with ``every_ns`` the last one of each such interval."""
        found: list[Point] = []
        for store in self.stores():
            found += samples(store, process_of(store), metric, since_wall_ns, until_wall_ns, every_ns)
        return sorted(found, key=lambda point: point.wall_ns)


def process_of(store: _space.Store) -> str:
    """The process that wrote a store, also one that was renamed."""
    row = _process_row(store)
    return str(row[0]) if row else store.process


def _process_row(store: _space.Store) -> tuple[Any, ...] | None:
    """What a store says of its process.

    Raises:
        StoreError: the store cannot be read.
    """
    return next(iter(remembered(store, f"SELECT {', '.join(TABLES['process'].names)} FROM process")), None)


def remembered(store: _space.Store, sql: str) -> list[tuple[Any, ...]]:
    """The few rows of a statement. A finished store is asked once, until its files change: a view looks every second.

    Raises:
        StoreError: the store cannot be read.
    """
    if store.alive or not store.modified_ns:
        return fetch_there(store.path, sql)
    return _finished(store.path, sql, store.modified_ns, store.db_bytes, store.wal_bytes)


@functools.lru_cache(maxsize=8 * _space.MAX_FILES)
def _finished(path: Path, sql: str, *_state: int) -> list[tuple[Any, ...]]:
    return fetch_there(path, sql)


def version_of(store: _space.Store) -> int:
    """The version of the schema that a store was written with."""
    return int(next(iter(remembered(store, "PRAGMA user_version")), (0,))[0])


def fetch_there(path: Path, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
    """As ``fetch``; a store that retention deleted meanwhile has no rows."""
    try:
        return fetch(path, sql, values)
    except StoreError:
        if path.exists():
            raise
        return []


def _conditions(table: Table, since: int | None, until: int | None, session: str | None) -> tuple[str, list[object]]:
    parts = [("wall_ns >= ?", since), ("wall_ns < ?", until), ("session = ?", session)]
    used = [(sql, value) for sql, value in parts if value is not None]
    for sql, _ in used:
        if sql.split()[0] not in table.names:
            raise StoreError(f"The table {table.name!r} cannot be selected by {sql.split()[0]}.")
    return "".join(f" AND {sql}" for sql, _ in used), [value for _, value in used]


def _pages(store: _space.Store, process: str, table: Table, columns: tuple[str, ...], where: str,
           values: list[object], page: int) -> Iterator[tuple[Any, ...]]:
    """Rows as (process, *columns, *the key that orders them), each page in its own short transaction."""
    if table.key:
        order = table.key
    else:
        order = ("wall_ns", "rowid") if table.timed else ("rowid",)
    # CROSS JOIN keeps the points, which are in the order of time, as the outer loop.
    named = " CROSS JOIN series ON series.id = points.series" if set(NAMED) & set(columns) else ""
    base = f"SELECT {', '.join(('?', *columns, *order))} FROM {table.name}{named} WHERE 1{where}"
    tail = f" ORDER BY {', '.join(order)} LIMIT {page}"
    after = f" AND ({', '.join(order)}) > ({', '.join('?' * len(order))})"
    rows = fetch_there(store.path, base + tail, [process, *values])
    while rows:
        yield from rows
        if len(rows) < page:
            return
        rows = fetch_there(store.path, base + after + tail, [process, *values, *rows[-1][-len(order):]])


def _process(process: str, alive: bool, row: tuple[Any, ...] | None) -> Process:
    if row is None:
        return Process(process, alive, *(None,) * 10)
    pid, host, python, argv, *rest = row[2:]
    return Process(process, alive, pid, host, python, tuple(json.loads(argv)), *rest)


def samples(store: _space.Store, process: str, metric: str, since: int | None, until: int | None = None,
            every_ns: int | None = None) -> list[Point]:
    """The points of one store, in no order; as ``StoreReader.points``."""
    path = store.path
    series = {number: (json.loads(attributes), tuple(json.loads(bounds)) if bounds else None)
              for number, attributes, bounds in fetch_there(
                  path, "SELECT id, attributes, bounds FROM series WHERE metric = ?", (metric,))}
    if not series:
        return []
    where, values = _conditions(TABLES["points"], since, until, None)
    where = f"series IN ({', '.join(map(str, series))}){where}"
    if every_ns is None:
        sql = f"SELECT wall_ns, series, value, count, buckets FROM points WHERE {where}"
    else:  # SQLite takes the other columns from the row that has the maximum
        sql = (f"SELECT max(wall_ns), series, value, count, buckets FROM points WHERE {where} "
               f"GROUP BY wall_ns / {int(every_ns)}, series")
    return [Point(process, wall_ns, series[number][0], value, count, tuple(json.loads(buckets)) if buckets else None,
                  series[number][1])
            for wall_ns, number, value, count, buckets in fetch_there(path, sql, values)]
