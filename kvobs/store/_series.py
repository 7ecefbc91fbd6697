"""Metrics over time for views: all wanted series of all stores, thinned inside SQLite.

A process writes all its series at one instant per second. So thinning seeks the last such instant of each interval
and reads only those rows: the cost goes with what is shown and not with what is stored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from kvobs.store._reader import AttentionSecond, Stored, StoreReader, fetch_there, process_of, remembered, version_of
from kvobs.store._schema import TABLES


class Series(msgspec.Struct, frozen=True, gc=False):
    """One series of one process: Unix nanoseconds and values, oldest first; of a histogram its sums."""

    process: str
    metric: str
    attributes: dict[str, str]
    wall_ns: list[int]
    values: list[float]


class SessionFact(msgspec.Struct, frozen=True, gc=False):
    """A session of one process: how many turns it has and when the last one ended (Unix nanoseconds)."""

    process: str
    session: str
    turns: int
    last_wall_ns: int


_THIN = """
WITH RECURSIVE step(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM step WHERE i + 1 < ?),
instant(t) AS (SELECT (SELECT max(wall_ns) FROM points WHERE wall_ns >= ? + i * ? AND wall_ns < min(? + (i + 1) * ?, ?))
               FROM step)
SELECT wall_ns, series, value FROM instant CROSS JOIN points ON points.wall_ns = instant.t
WHERE series IN ({numbers}) ORDER BY wall_ns
"""


def spans(reader: StoreReader) -> dict[str, tuple[int, int]]:
    """Per process the first and the last instant (Unix nanoseconds) of its points; without points it is left out."""
    found: dict[str, tuple[int, int]] = {}
    for store in reader.stores():
        for first, last in remembered(store, "SELECT min(wall_ns), max(wall_ns) FROM points"):
            if first is not None:
                process = process_of(store)
                known = found.get(process, (first, last))
                found[process] = (min(first, known[0]), max(last, known[1]))
    return found


def series(reader: StoreReader, metrics: Sequence[str], since_wall_ns: int, until_wall_ns: int, *,
           processes: Sequence[str] | None = None, most: int = 400) -> list[Series]:
    """The series of ``metrics`` in [since, until), each thinned to the last point of at most ``most`` intervals.

    Raises:
        StoreError: a store became unreadable.
    """
    width = max(-(-(until_wall_ns - since_wall_ns) // most), 1)
    steps = -(-(until_wall_ns - since_wall_ns) // width)
    found: dict[tuple[str, str, str], Series] = {}
    for store in reader.stores():
        process = process_of(store)
        if processes is not None and process not in processes:
            continue
        names = {number: (metric, attributes) for number, metric, attributes in fetch_there(
            store.path, f"SELECT id, metric, attributes FROM series WHERE metric IN ({', '.join('?' * len(metrics))})",
            metrics)}
        sql = _THIN.format(numbers=", ".join(map(str, names)))
        for wall_ns, number, value in fetch_there(
                store.path, sql, (steps, since_wall_ns, width, since_wall_ns, width, until_wall_ns)) if names else ():
            metric, attributes = names[number]
            key = (process, metric, attributes)
            one = found.get(key)
            if one is None:
                one = found[key] = Series(process, metric, json.loads(attributes), [], [])
            one.wall_ns.append(wall_ns)
            one.values.append(value)
    return list(found.values())


def session_facts(reader: StoreReader) -> list[SessionFact]:
    """Every session of every process, the one that was heard of last first."""
    found: dict[tuple[str, str], SessionFact] = {}
    for store in reader.stores():
        process = process_of(store)
        for session, turns, last in fetch_there(
                store.path, "SELECT session, count(*), max(wall_ns) FROM turns GROUP BY session", ()):
            before = found.get((process, session))
            if before is not None:
                turns, last = turns + before.turns, max(last, before.last_wall_ns)
            found[process, session] = SessionFact(process, session, turns, last)
    return sorted(found.values(), key=lambda fact: -fact.last_wall_ns)


def latest_attention(reader: StoreReader) -> list[tuple[Stored[AttentionSecond], int | None]]:
    """Sampled attention of the cache that was sampled last, oldest first.

    Beside each second the KV bytes that the whole cache held after its last step; None where no step was recorded.
    """
    columns = TABLES["attention"].names
    stores = [store for store in reader.stores() if version_of(store) >= TABLES["attention"].since]
    latest = "SELECT wall_ns, cache_id FROM attention ORDER BY wall_ns DESC LIMIT 1"
    ends = [(*row, process_of(store)) for store in stores for row in fetch_there(store.path, latest)]
    if not ends:
        return []
    _, cache, process = max(ends)
    sql = (f"SELECT {', '.join(columns)}, (SELECT kv_bytes FROM steps WHERE steps.wall_ns = attention.wall_ns AND "
           "steps.cache_id = attention.cache_id) FROM attention WHERE cache_id = ? ORDER BY wall_ns, layers")
    return [(Stored(process, row[0], AttentionSecond(*row[:-1])), row[-1])
            for store in stores if process_of(store) == process for row in fetch_there(store.path, sql, (cache,))]


