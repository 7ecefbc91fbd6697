"""What the stores of a path got since the last look, by each store's own order: no clock is compared with another."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvobs import model
from kvobs.store import _rows, _space
from kvobs.store._reader import Point, Stored, StoreReader, process_of, remembered, samples, version_of
from kvobs.store._schema import TABLES, StoreError

_FOLLOWED = ("decisions", "events")


class News(msgspec.Struct, frozen=True):
    """What came, each kind in the order of time."""

    decisions: list[Stored[model.Decided]]
    events: list[Stored[model.OutOfMemory | model.HookFailed | model.CacheGone]]
    points: list[Point]


class _Place(NamedTuple):
    """How far a table was read. A number is given again only where retention emptied the table: the time is newer."""

    rowid: int = -1
    wall_ns: int = -1


class Tail:
    """Tells each decision, event and sample of one metric once, however late it is committed.

    What the stores hold that are there when it is made is not told; of a store that comes later everything is. A store
    that cannot be read then is followed from its end of the moment in which it can.
    """

    def __init__(self, path: Path, metric: str) -> None:
        self._path, self._metric = path, metric
        self._old = _listed(path)
        self._read: dict[Path, dict[str, _Place]] = {}
        with contextlib.suppress(StoreError):
            for store in StoreReader(path).stores():
                if store.path in self._old:
                    self._read[store.path] = _end(store)

    def look(self) -> News:
        """What came since the last look.

        Raises:
            StoreError: there is no store, or one became unreadable; nothing of this look counts as told.
        """
        news, read = News([], [], []), {path: places for path, places in self._read.items() if path.exists()}
        for store in StoreReader(self._path).stores():
            places = read.get(store.path)
            if places is None:
                places = _end(store) if store.path in self._old else {}
            read[store.path] = self._new(store, places, news)
        self._read = read
        for found in (news.decisions, news.events):
            found.sort(key=lambda one: one.wall_ns)
        news.points.sort(key=lambda one: one.wall_ns)
        return news

    def _new(self, store: _space.Store, places: dict[str, _Place], news: News) -> dict[str, _Place]:
        process, after = process_of(store), dict(places)
        for table in _FOLLOWED:
            for number, *row in _rows_after(store, table, places.get(table, _Place())):
                place = after.get(table, _Place())
                after[table] = _Place(max(place.rowid, number), max(place.wall_ns, row[0]))
                if table == "decisions":
                    news.decisions.append(Stored(process, row[0], _rows.decision_of(row)))
                else:
                    news.events.append(Stored(process, row[0], _rows.event_of(row)))
        points = samples(store, process, self._metric, places.get("points", _Place()).wall_ns + 1)
        news.points.extend(points)
        if points:  # a process samples in the order of its own time
            after["points"] = _Place(-1, max(point.wall_ns for point in points))
        return after


def _rows_after(store: _space.Store, table: str, place: _Place) -> list[tuple[Any, ...]]:
    if version_of(store) < TABLES[table].since:
        return []
    return remembered(store, f"SELECT rowid, {', '.join(TABLES[table].names)} FROM {table} "
                             f"WHERE rowid > {place.rowid} OR wall_ns > {place.wall_ns} ORDER BY rowid")


def _end(store: _space.Store) -> dict[str, _Place]:
    found = {}
    for table in (*_FOLLOWED, "points"):
        if version_of(store) >= TABLES[table].since:
            number = "rowid" if table in _FOLLOWED else "wall_ns"
            (newest, wall_ns), = remembered(store, f"SELECT max({number}), max(wall_ns) FROM {table}") or [(None, None)]
            if newest is not None:
                found[table] = _Place(newest, wall_ns)
    return found


def _listed(path: Path) -> frozenset[Path]:
    try:
        if path.is_dir():
            return frozenset(store.path for store in _space.survey(path))
        return frozenset({path} if path.exists() else ())
    except OSError:
        return frozenset()
