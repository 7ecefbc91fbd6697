"""The schema, said once: writer, reader and Parquet export all derive from ``TABLES``.

Times named ``wall_ns`` are Unix nanoseconds, converted from the process's monotonic clock by one anchor taken
at its start; ``t_ns`` and ``start_ns`` are that monotonic clock itself. NULL means absent, never zero.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Literal

import msgspec

SCHEMA_VERSION = 5  # 2 brought attention and flights, 3 maps, 4 pools, preemptions, phases and requests, 5 the breaker
APPLICATION_ID = 0x6B764F62  # "kvOb", in the header of every store
PAGE_BYTES = 4096
SUFFIX = ".sqlite"


class StoreError(Exception):
    """A store cannot be read or exported; ``str()`` is one whole sentence."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table. ``timed`` ones are read by time and lose their oldest rows first.

    A ``key`` makes it a clustered upsert table; one without is appended to and indexed by time.
    """

    name: str
    columns: tuple[tuple[str, str], ...]
    key: tuple[str, ...] = ()
    indexes: tuple[tuple[str, ...], ...] = ()
    timed: bool = True
    since: int = 1  # the schema version that brought it

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(name for name, _ in self.columns)

    def ddl(self) -> list[str]:
        """The statements that create it."""
        body = ", ".join(f"{name} {kind}" for name, kind in self.columns)
        if self.key:
            return [f"CREATE TABLE {self.name} ({body}, PRIMARY KEY ({', '.join(self.key)})) WITHOUT ROWID"]
        return [f"CREATE TABLE {self.name} ({body})"] + [
            f"CREATE INDEX {self.name}_{'_'.join(index)} ON {self.name} ({', '.join(index)})"
            for index in self.indexes]


def _integers(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "INTEGER") for name in names)


def _texts(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "TEXT") for name in names)


_ORIGIN = _texts("source", "model", "cache", "device", "dtype")
_SIZES = _integers("kv_bytes", "kv_reserved_bytes", "kv_largest_bytes")
_WORK = _integers("reallocations", "bytes_written", "bytes_copied")

TABLES: dict[str, Table] = {table.name: table for table in (
    Table(name="process", timed=False, key=("process",), columns=(
        *_texts("process"), *_integers("sequence", "pid"), *_texts("host", "python", "argv"),
        *_integers("started_wall_ns", "started_ns"), *_texts("endpoint"),
        *_integers("heartbeat_wall_ns", "ended_wall_ns", "dropped"))),
    Table(name="turns", indexes=(("wall_ns",),), columns=(
        *_integers("wall_ns", "t_ns", "start_ns", "wall_start_ns"), *_ORIGIN, *_integers("cache_id"),
        *_texts("session", "priority"), *_integers("turn"), *_texts("outcome"),
        *_integers("steps", "prompt_tokens", "cached_tokens", "new_tokens"), *_SIZES, *_WORK,
        *_texts("migrations"), *_integers("ttft_ns", "tpot_ns", "prefill_ns", "hook_ns"),
        *_texts("trace_id", "span_id"), *_integers("sampled"))),
    Table(name="migrations", indexes=(("wall_ns",),), columns=(
        *_integers("wall_ns", "t_ns"), *_ORIGIN, *_integers("cache_id"), *_texts("src", "dst"),
        *_integers("buffers", "bytes", "duration_ns"))),
    # Out-of-memory errors, failed hooks, freed caches: rare facts of one shape.
    Table(name="events", indexes=(("wall_ns",),), columns=(
        *_integers("wall_ns", "t_ns"), *_texts("kind"), *_ORIGIN, *_integers("cache_id"),
        *_texts("session", "hook", "message"))),
    # One row per second and cache; wall_ns is the second's beginning, sizes are the last step's.
    Table(name="steps", key=("wall_ns", "cache_id"), columns=(
        *_integers("wall_ns", "cache_id", "t_ns"), *_ORIGIN,
        *_integers("steps", "prefill_steps", "tokens", "prefill_tokens", "duration_ns", "hook_ns"), *_SIZES, *_WORK)),
    Table(name="blocks", key=("wall_ns", "cache_id"), columns=(
        *_integers("wall_ns", "cache_id", "t_ns"), *_ORIGIN,
        *_integers("block_bytes", "used", "cached", "free", "allocations", "failures", "preemptions"))),
    Table(name="allocators", key=("wall_ns", "device"), columns=(
        *_integers("wall_ns"), *_texts("device"),
        *_integers("t_ns", "allocations", "requested_bytes", "latency_ns", "latency_max_ns",
                   "reserved_bytes", "allocated_bytes", "largest_free_bytes"))),
    # Sampled decode steps summed per second, cache and kind of layers; sizes and states are the last one's.
    Table(name="attention", since=2, key=("wall_ns", "cache_id", "layers"), columns=(
        *_integers("wall_ns", "cache_id"), *_texts("layers"), *_integers("t_ns"), *_ORIGIN, *_texts("session"),
        *_integers("turn", "every", "steps", "hook_ns", "tokens", "queries"), ("local_sum", "REAL"),
        ("chance_sum", "REAL"), *_integers("entries", "alive", "blocks", "pending", "to_pending", "to_active",
                                           "reclaimable_bytes"))),
    # What was known when memory ran out; windows and snapshot are JSON.
    Table(name="flights", since=2, indexes=(("wall_ns",),), columns=(
        *_integers("wall_ns", "t_ns"), *_texts("reason", "device"), *_integers("requested_bytes"),
        *_texts("message", "windows", "snapshot"))),
    # The newest memory map of each device; packed is what kvobs.allocator.memory_map unpacks, holders is JSON.
    Table(name="maps", since=3, timed=False, key=("device",), columns=(
        *_texts("device"), *_integers("wall_ns", "t_ns", "duration_ns", "every_ns", "steady", "reserved_bytes",
                                      "allocated_bytes", "active_bytes", "requested_bytes", "segments"),
        *_texts("settings", "holders"), ("packed", "BLOB"))),
    # Beside blocks: what a serving engine's pool did since it began; the last one of a second is kept.
    Table(name="pools", since=4, key=("wall_ns", "cache_id"), columns=(
        *_integers("wall_ns", "cache_id", "t_ns"), *_ORIGIN,
        *_integers("pinned", "tail_tokens", "tail_bytes", "unexplained", "evictions", "dropped", "touches",
                   "queried_tokens", "hit_tokens", "resumed_queried_tokens", "resumed_hit_tokens",
                   "recomputed_preempted_tokens", "recomputed_evicted_tokens", "failures_waiting"))),
    # holders is JSON: who held the pool then.
    Table(name="preemptions", since=4, indexes=(("wall_ns",),), columns=(
        *_integers("wall_ns", "t_ns"), *_ORIGIN, *_integers("cache_id"),
        *_texts("request", "session", "cause", "wanted_by"), *_integers("tokens_lost", "blocks"), *_texts("holders"))),
    # A request's phase that ended; wall_ns is its end.
    Table(name="phases", since=4, indexes=(("wall_ns",),), columns=(
        *_integers("wall_ns", "t_ns", "start_ns", "start_wall_ns"), *_ORIGIN, *_integers("cache_id"),
        *_texts("request", "session", "phase", "outcome"), *_integers("blocks"))),
    # The newest word on who is in each engine; counts and rows are JSON, times in rows are Unix nanoseconds.
    Table(name="requests", since=4, timed=False, key=("cache_id",), columns=(
        *_integers("cache_id", "wall_ns", "t_ns"), *_ORIGIN, *_integers("block_bytes", "slots"),
        *_texts("counts", "rows"), *_integers("more"), *_texts("next_request"), *_integers("next_needs"),
        *_texts("next_verdict", "next_sentence"))),
    # What the breaker decided; readings and rejected are JSON.
    Table(name="decisions", since=5, indexes=(("wall_ns",),), columns=(
        *_integers("wall_ns", "t_ns"), *_texts("scope", "policy", "mode"), *_integers("level"),
        *_texts("before", "after", "reason", "readings", "rejected"), *_integers("generation"))),
    Table(name="actions", since=5, indexes=(("wall_ns",),), columns=(
        *_integers("wall_ns", "t_ns"), *_texts("actuator"), *_integers("level"), *_texts("kind"),
        *_integers("undo", "generation", "done", "bytes", "duration_ns", "late"), *_texts("reason"))),
    Table(name="availability", timed=False, key=("subject",), columns=(
        *_texts("subject"), *_integers("wall_ns", "available"), *_texts("reason"))),
    # A metric with one attribute set, named once; attributes and bounds are JSON.
    Table(name="series", timed=False, columns=(
        ("id", "INTEGER PRIMARY KEY"), *_texts("metric", "attributes", "bounds")), indexes=(("metric", "attributes"),)),
    # Histograms: value is the sum, buckets the JSON list of counts per bucket (the last is +Inf).
    Table(name="points", key=("wall_ns", "series"), columns=(
        *_integers("wall_ns", "series"), ("value", "REAL"), *_integers("count"), *_texts("buckets"))),
)}
TIMED = tuple(table for table in TABLES.values() if table.timed)

Merge = Literal["add", "max", "keep", "new"]
_ADDED = frozenset({"steps", "prefill_steps", "tokens", "prefill_tokens", "duration_ns", "hook_ns", "reallocations",
                    "bytes_written", "bytes_copied", "requested_bytes", "latency_ns", "queries", "local_sum",
                    "chance_sum", "entries", "alive", "to_pending", "to_active"})
# Of these, `tokens` and the like mean the last step's in the table attention.
_LAST = frozenset({("attention", "tokens")})


def merge_rules(table: Table) -> tuple[Merge, ...]:
    """What each column does when a row meets one of the same key: rows of one second are sums and last values.

    ``new`` takes the newer value, ``keep`` too unless it is absent.
    """
    return tuple(_merge_rule(table.name, name) for name in table.names)


def _merge_rule(table: str, column: str) -> Merge:
    if table not in ("steps", "allocators", "attention"):
        return "new"
    if (column in _ADDED and (table, column) not in _LAST) or (table, column) == ("allocators", "allocations"):
        return "add"
    return "max" if column == "latency_max_ns" else "keep"


def insert_sql(table: Table) -> str:
    """The statement that inserts one row, or merges it into the row of the same key."""
    names = table.names
    sql = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    if not table.key:
        return sql
    forms = {"add": "{0} = {0} + excluded.{0}", "max": "{0} = max({0}, excluded.{0})",
             "keep": "{0} = coalesce(excluded.{0}, {0})", "new": "{0} = excluded.{0}"}
    changes = ", ".join(forms[rule].format(name) for name, rule in zip(names, merge_rules(table), strict=True)
                        if name not in table.key)
    return f"{sql} ON CONFLICT ({', '.join(table.key)}) DO UPDATE SET {changes}"


def create(path: Path) -> None:
    """Make an empty store at ``path``, which must not exist; on disk it is complete or not there.

    Raises:
        sqlite3.Error, OSError: the disk refused.
    """
    raw = path.with_name(path.name + ".new")
    raw.unlink(missing_ok=True)
    try:
        connection = sqlite3.connect(raw, isolation_level=None, timeout=0)
        try:
            # auto_vacuum can only be chosen before the first table exists.
            for pragma in (f"page_size = {PAGE_BYTES}", "auto_vacuum = INCREMENTAL", "journal_mode = MEMORY"):
                connection.execute(f"PRAGMA {pragma}").fetchall()
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
            connection.executemany("INSERT INTO meta VALUES (?, ?)", [
                ("format", "kvobs store"), ("schema_version", str(SCHEMA_VERSION))])
            for table in TABLES.values():
                for statement in table.ddl():
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        finally:
            connection.close()
        raw.rename(path)
    except BaseException:
        raw.unlink(missing_ok=True)
        raise


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what is not a store, or one that a newer kvobs wrote.

    Raises:
        StoreError: one sentence saying which file, what is wrong and what is allowed.
    """
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if application == APPLICATION_ID:
            connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} cannot be read as a kvobs store: {error}.") from None
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is an SQLite file but not a kvobs store; name a store or a directory of stores.")
    if version > SCHEMA_VERSION:
        raise StoreError(f"{path} was written by a newer kvobs (schema version {version}); this one reads versions "
                         f"up to {SCHEMA_VERSION}.")
    if version < 1:
        raise StoreError(f"{path} has no valid schema version ({version}); allowed are 1 to {SCHEMA_VERSION}.")
