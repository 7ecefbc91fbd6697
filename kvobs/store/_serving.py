"""Reading what serving engines did (pools, preemptions, phases of requests, who is in them now), and the breaker."""

from __future__ import annotations

from kvobs import model
from kvobs.store import _rows
from kvobs.store._reader import Stored, StoreReader


def pools(reader: StoreReader, since_wall_ns: int | None = None,
          until_wall_ns: int | None = None) -> list[Stored[model.PoolWork]]:
    """The last word on each pool in each second; ``wall_ns`` is the second's beginning."""
    return [Stored(row[0], row[1], _rows.work_of(row[1:])) for row in reader.rows(
        "pools", since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]


def preemptions(reader: StoreReader, since_wall_ns: int | None = None,
                until_wall_ns: int | None = None) -> list[Stored[model.Preemption]]:
    """Preemptions in the order of time."""
    return [Stored(row[0], row[1], _rows.preemption_of(row[1:])) for row in reader.rows(
        "preemptions", since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]


def phases(reader: StoreReader, since_wall_ns: int | None = None,
           until_wall_ns: int | None = None) -> list[Stored[model.RequestPhase]]:
    """Phases of requests in the order in which they ended.

    A phase began ``t_ns - start_ns`` before ``wall_ns``, its end.
    """
    return [Stored(row[0], row[1], _rows.phase_of(row[1:])) for row in reader.rows(
        "phases", since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]


def requests(reader: StoreReader) -> list[Stored[model.RequestStates]]:
    """The newest word on who is in each engine, per process and pool; times in its rows are Unix nanoseconds.

    Whether it still holds depends on the process: see ``StoreReader.processes``.
    """
    latest: dict[tuple[str, int], Stored[model.RequestStates]] = {}
    for process, *row in reader.rows("requests"):
        known = latest.get((process, row[0]))
        if known is None or known.wall_ns <= row[1]:
            latest[process, row[0]] = Stored(process, row[1], _rows.states_of(row))
    return [latest[key] for key in sorted(latest)]


def decisions(reader: StoreReader, since_wall_ns: int | None = None,
              until_wall_ns: int | None = None) -> list[Stored[model.Decided]]:
    """What the breaker decided, in the order of time."""
    return [Stored(row[0], row[1], _rows.decision_of(row[1:])) for row in reader.rows(
        "decisions", since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]


def actions(reader: StoreReader, since_wall_ns: int | None = None,
            until_wall_ns: int | None = None) -> list[Stored[model.ActionTaken]]:
    """What became of the breaker's orders, in the order of time."""
    return [Stored(row[0], row[1], _rows.action_of(row[1:])) for row in reader.rows(
        "actions", since_wall_ns=since_wall_ns, until_wall_ns=until_wall_ns)]
