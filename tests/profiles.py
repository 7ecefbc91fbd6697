"""Writes small profiler files, as torch and Nsight Systems write them, for the tests of their readers."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

# The tables that kvobs reads, with the columns and types of the export schema 3.16 (Nsight Systems 2024.6). No nsys ran
# here: what these files hold is made up, their shape is not.
NSYS_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER,
    nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS (
    start INTEGER NOT NULL, globalPid INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    address INTEGER NOT NULL, pc INTEGER NOT NULL, bytes INTEGER NOT NULL, memKind INTEGER NOT NULL,
    memoryOperationType INTEGER NOT NULL, name TEXT, correlationId INTEGER, streamId INTEGER,
    localMemoryPoolAddress INTEGER, localMemoryPoolReleaseThreshold INTEGER, localMemoryPoolSize INTEGER,
    localMemoryPoolUtilizedSize INTEGER, importedMemoryPoolAddress INTEGER, importedMemoryPoolProcessId INTEGER);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
"""


def serialised(process: int, thread: int = 0) -> int:
    """A process (and thread) as Nsight Systems serialises them, on its virtual machine 1."""
    return 1 << 48 | process << 24 | thread


def write_nsys(path: Path, calls: Sequence[tuple[int, int, str, int]] = (),
               usage: Sequence[tuple[int, int, int, int, int, int]] = (), began: int | None = None) -> Path:
    """An export. ``calls``: start, end (ns), name, process. ``usage``: start, process, device, bytes, kind (2 is device
    memory), operation (0 allocates, 1 frees). ``began``: ns since the epoch.
    """
    names = {name: key for key, name in enumerate(dict.fromkeys(["printed by the program", *(c[2] for c in calls)]), 1)}
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(NSYS_SCHEMA)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(key, name) for name, key in names.items()])
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0, NULL)",
            [(start, end, serialised(process, 7), index, names[name])
             for index, (start, end, name, process) in enumerate(calls)])
        database.executemany(
            "INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS (start, globalPid, deviceId, contextId, address, pc, bytes, "
            "memKind, memoryOperationType) VALUES (?, ?, ?, 1, 4096, 0, ?, ?, ?)",
            [(start, serialised(process), device, size, kind, operation)
             for start, process, device, size, kind, operation in usage])
        if began is not None:
            database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?, '', '')", (began,))
    return path


def memory_event(ts: float, address: int, size: int, allocated: int, reserved: int, kind: int = 1,
                 index: int = 0) -> dict[str, Any]:
    """A ``[memory]`` event as Kineto writes it; ``ts`` in microseconds, device type 1 is CUDA."""
    return {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": 7, "ts": ts,
            "args": {"Total Reserved": reserved, "Total Allocated": allocated, "Bytes": size, "Device Id": index,
                     "Device Type": kind, "Addr": address, "Ev Idx": 1}}


def call_event(ts: float, duration: float, name: str, process: int = 7) -> dict[str, Any]:
    """A call of CUDA's runtime as Kineto writes it; microseconds."""
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": process, "tid": process, "ts": ts, "dur": duration,
            "args": {"External id": 9, "cbid": 20, "correlation": 9}}


def trace(events: Sequence[dict[str, Any]], base: int | None = None) -> dict[str, Any]:
    """A whole trace; ``base``: the time its events count from, ns."""
    head: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": []}
    return head | ({} if base is None else {"baseTimeNanoseconds": base}) | {"traceEvents": list(events)}
