"""Turns by their trace."""

from __future__ import annotations

from kvobs import model
from kvobs.store import _rows
from kvobs.store._reader import Stored, StoreReader, fetch_there, process_of
from kvobs.store._schema import TABLES

MOST_TURNS = 10_000
_COLUMNS = ", ".join(TABLES["turns"].names)


def turns_of_trace(reader: StoreReader, trace_id: str) -> list[Stored[model.Turn]]:
    """The turns whose spans are of a trace (lower-case hex), in the order in which they began; at most 10,000 a file.

    Raises:
        StoreError: a store became unreadable.
    """
    sql = f"SELECT {_COLUMNS} FROM turns WHERE trace_id = ? ORDER BY wall_ns LIMIT {MOST_TURNS}"
    found = [Stored(process_of(store), row[0], _rows.turn_of(row))
             for store in reader.stores() for row in fetch_there(store.path, sql, (trace_id,))]
    return sorted(found, key=lambda one: one.record.wall_start_ns)


def last_traced(reader: StoreReader, *, sampled: bool) -> Stored[model.Turn] | None:
    """The turn with a trace id that ended last; with ``sampled`` only of those whose spans were exported.

    Raises:
        StoreError: a store became unreadable.
    """
    where = "trace_id != ''" + (" AND sampled" if sampled else "")
    sql = f"SELECT {_COLUMNS} FROM turns WHERE {where} ORDER BY wall_ns DESC LIMIT 1"
    found = [Stored(process_of(store), row[0], _rows.turn_of(row))
             for store in reader.stores() for row in fetch_there(store.path, sql)]
    return max(found, key=lambda one: one.wall_ns, default=None)


def trace_before(reader: StoreReader, process: str, session: str, since_wall_ns: int, until_wall_ns: int) -> str:
    """The trace of the process's turn that ended last within both times; empty without one.

    Args:
        session: whose turn; empty: anybody's.
    Raises:
        StoreError: a store became unreadable.
    """
    sql = ("SELECT wall_ns, trace_id FROM turns WHERE trace_id != '' AND wall_ns BETWEEN ? AND ?"
           f"{' AND session = ?' if session else ''} ORDER BY wall_ns DESC LIMIT 1")
    values = (since_wall_ns, until_wall_ns, *((session,) if session else ()))
    found = [row for store in reader.stores() if process_of(store) == process
             for row in fetch_there(store.path, sql, values)]
    return str(max(found)[1]) if found else ""
