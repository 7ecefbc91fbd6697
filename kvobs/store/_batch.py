"""What waits for the next commit: rows by table, merged where a table keeps one row per second.

Pure and bounded: records beyond ``room`` are dropped and counted. ``pieces`` cuts the batch so that no
transaction dirties more pages than it is told, which is what lets the size bound hold at every instant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from kvobs import model
from kvobs.catalog import Row as CatalogRow
from kvobs.metrics import Attributes, Histogram, Value
from kvobs.store import _rows
from kvobs.store._rows import Row, WallClock
from kvobs.store._schema import PAGE_BYTES, TABLES, merge_rules

_ROW_BYTES = 12  # header and key of a row, generously
_INDEX_BYTES = 32  # an index entry: a time and a row number
_SPLIT = 2.2  # how much more room rows take than their bytes, at worst


class Piece(msgspec.Struct, frozen=True):
    """Rows of one table for one transaction, and how many records they stand for.

    Rows of ``points`` name their series by (metric, attributes, bounds) until a file gives it a number.
    """

    table: str
    rows: list[Row]
    records: int
    pages: int


class Batch:
    """Rows not yet written. Not thread-safe: the drain thread's own."""

    def __init__(self, wall: WallClock, now: Callable[[], int], limit: int) -> None:
        self._wall = wall
        self._now = now
        self.room = limit
        self._rows: dict[str, list[Row]] = {}
        self._merged: dict[str, dict[tuple[Any, ...], list[Any]]] = {}
        self._weights: dict[str, dict[tuple[Any, ...], int]] = {}
        self._names: dict[tuple[str, Attributes], tuple[str, str, str | None]] = {}
        self.records = 0
        self.dropped = 0
        self.facts: dict[str, Row] = {}

    def add(self, event: model.Event) -> None:
        """Take an event; one that cannot be a row (or one too many) is dropped and counted."""
        try:
            if self.records >= self.room:
                self.dropped += 1
            elif isinstance(event, model.Availability):
                self._fact(event)
            elif isinstance(event, _AS_POINTS):
                pass
            else:
                _ADDERS[type(event)](self, event)
                self.records += 1
        except Exception:  # a record that is not what its type says must not cost the others
            self.dropped += 1

    def add_points(self, wall_ns: int, families: Iterable[tuple[CatalogRow, dict[Attributes, Value]]]) -> None:
        """Take one sample of every metric at one instant; NaN is no value and leaves no point."""
        rows = self._rows.setdefault("points", [])
        for row, values in families:
            for attributes, value in values.items():
                if self.records >= self.room:
                    self.dropped += 1
                    continue
                name = self._name(row, attributes)
                if isinstance(value, Histogram):
                    rows.append((wall_ns, name, value.total, sum(value.counts), json.dumps(value.counts)))
                elif value == value:
                    rows.append((wall_ns, name, value, None, None))
                else:
                    continue
                self.records += 1

    def pieces(self, pages: int) -> Iterator[Piece]:
        """The batch in pieces of at most ``pages`` dirty pages each (one row at least)."""
        for table, merged in self._merged.items():
            weights = self._weights[table]
            yield from _cut(table, [tuple(row) for row in merged.values()], [weights[key] for key in merged], pages)
        for table, rows in self._rows.items():
            yield from _cut(table, rows, None, pages)

    def clear(self) -> None:
        """Forget the rows (they were written, or dropped and counted)."""
        self._rows, self._merged, self._weights, self.records = {}, {}, {}, 0
        if len(self._names) > 10_000:
            self._names = {}

    # -- inside ----------------------------------------------------------------------------------------

    def _fact(self, event: model.Availability) -> None:
        known = self.facts.get(event.subject)
        if known is None and len(self.facts) >= 1_000:
            self.dropped += 1
        elif known is None or known[2:] != (int(event.available), _rows.clip(event.reason)):
            self.facts[event.subject] = (event.subject, self._now(), int(event.available), _rows.clip(event.reason))

    def _append(self, table: str, row: Row) -> None:
        self._rows.setdefault(table, []).append(row)

    def _merge(self, table: str, row: Row) -> None:
        merged = self._merged.setdefault(table, {})
        weights = self._weights.setdefault(table, {})
        key = row[:len(TABLES[table].key)]
        known = merged.get(key)
        if known is None:
            merged[key], weights[key] = list(row), 1
            return
        weights[key] += 1
        for index, rule in _RULES[table]:
            value = row[index]
            if rule == "add":
                known[index] += value
            elif rule == "new" or (value is not None and (rule == "keep" or value > known[index])):
                known[index] = value

    def _name(self, row: CatalogRow, attributes: Attributes) -> tuple[str, str, str | None]:
        name = self._names.get((row.name, attributes))
        if name is None:
            pairs = dict(zip(row.attributes, attributes, strict=True))
            name = self._names[row.name, attributes] = (
                row.name, json.dumps(pairs), json.dumps(row.buckets) if row.kind == "histogram" else None)
        return name


_RULES = {name: tuple((index, rule) for index, rule in enumerate(merge_rules(TABLES[name]))
                      if index >= len(TABLES[name].key))
          for name in ("steps", "blocks", "allocators", "attention", "maps", "pools", "requests")}
# Kept as the points of their metrics only.
_AS_POINTS = (model.AllocationLatencies, model.CacheUpdates, model.Poll, model.Evictions, model.ProcessRole)

_ADDERS: dict[type, Callable[[Batch, Any], None]] = {
    model.Step: lambda batch, event: batch._merge("steps", _rows.step_row(event, batch._wall)),
    model.Rewrite: lambda batch, event: batch._merge("steps", _rows.rewrite_row(event, batch._wall)),
    model.Resized: lambda batch, event: batch._merge("steps", _rows.resized_row(event, batch._wall)),
    model.Blocks: lambda batch, event: batch._merge("blocks", _rows.blocks_row(event, batch._wall)),
    model.Allocation: lambda batch, event: batch._merge("allocators", _rows.allocator_row(event, batch._wall)),
    model.AllocatorState: lambda batch, event: batch._merge("allocators", _rows.allocator_row(event, batch._wall)),
    model.Attention: lambda batch, event: batch._merge("attention", _rows.attention_row(event, batch._wall)),
    model.MemoryMap: lambda batch, event: batch._merge("maps", _rows.map_row(event, batch._wall)),
    model.FlightRecord: lambda batch, event: batch._append("flights", _rows.flight_row(event, batch._wall)),
    model.Turn: lambda batch, event: batch._append("turns", _rows.turn_row(event, batch._wall)),
    model.Migration: lambda batch, event: batch._append("migrations", _rows.migration_row(event, batch._wall)),
    model.OutOfMemory: lambda batch, event: batch._append("events", _rows.event_row(event, batch._wall)),
    model.HookFailed: lambda batch, event: batch._append("events", _rows.event_row(event, batch._wall)),
    model.PoolWork: lambda batch, event: batch._merge("pools", _rows.work_row(event, batch._wall)),
    model.RequestStates: lambda batch, event: batch._merge("requests", _rows.states_row(event, batch._wall)),
    model.Preemption: lambda batch, event: batch._append("preemptions", _rows.preemption_row(event, batch._wall)),
    model.RequestPhase: lambda batch, event: batch._append("phases", _rows.phase_row(event, batch._wall)),
    model.Decided: lambda batch, event: batch._append("decisions", _rows.decision_row(event, batch._wall)),
    model.ActionTaken: lambda batch, event: batch._append("actions", _rows.action_row(event, batch._wall)),
    model.CacheGone: lambda batch, event: batch._append("events", _rows.event_row(event, batch._wall)),
}


def _fixed_pages(table: str) -> int:
    """The pages on the way to where a table's rows go, in each of its B-trees, and the file's own."""
    return 6 + 3 * (1 + len(TABLES[table].indexes))


def pages_for(table: str, rows: list[Row]) -> int:
    """An upper estimate of the pages that inserting rows dirties.

    Rows come in time order and so fill pages; a page that splits unevenly is half full.
    """
    return _fixed_pages(table) + math.ceil(_SPLIT * sum(_costs(table, rows)) / PAGE_BYTES)


def _costs(table: str, rows: list[Row]) -> Iterator[int]:
    """The bytes of each row, index entries included: integers at their longest, text at its longest unless ASCII."""
    kinds = [kind for _, kind in TABLES[table].columns]
    texts = [index for index, kind in enumerate(kinds) if kind in ("TEXT", "BLOB")]
    fixed = _ROW_BYTES + 9 * len(kinds) + _INDEX_BYTES * len(TABLES[table].indexes)
    for row in rows:
        size = fixed
        for index in texts:
            text = row[index]
            if text:
                size += len(text) if isinstance(text, bytes) or text.isascii() else 4 * len(text)
        yield size


def _cut(table: str, rows: list[Row], weights: list[int] | None, pages: int) -> Iterator[Piece]:
    room = (pages - _fixed_pages(table)) * PAGE_BYTES / _SPLIT
    start = cost = 0
    for index, size in enumerate(_costs(table, rows)):
        if index > start and cost + size > room:
            yield _piece(table, rows, weights, start, index, cost)
            start, cost = index, 0
        cost += size
    if start < len(rows):
        yield _piece(table, rows, weights, start, len(rows), cost)


def _piece(table: str, rows: list[Row], weights: list[int] | None, start: int, end: int, cost: int) -> Piece:
    records = end - start if weights is None else sum(weights[start:end])
    return Piece(table, rows[start:end], records, _fixed_pages(table) + math.ceil(_SPLIT * cost / PAGE_BYTES))
