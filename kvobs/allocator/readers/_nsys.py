"""Exports of Nsight Systems to SQLite (``nsys export --type sqlite``).

Tables and columns as of the export schema 3.16 (Nsight Systems 2024.6): CUPTI_ACTIVITY_KIND_RUNTIME, StringIds,
CUDA_GPU_MEMORY_USAGE_EVENTS (with ``--cuda-memory-usage=true``), TARGET_INFO_SESSION_START_TIME.
"""

from __future__ import annotations

import sqlite3
from array import array

from kvobs.allocator.calls import MEMORY_CALLS, call_name
from kvobs.allocator.readers._limits import MAX_EVENTS, MAX_SIZE, Refused, count
from kvobs.allocator.readers._profile import calls_of
from kvobs.allocator.readers._sqlite import Database, opened, printable
from kvobs.allocator.recording import UNKNOWN, Calls, Recording, Usage

_RUNTIME, _STRINGS = "CUPTI_ACTIVITY_KIND_RUNTIME", "StringIds"
_USAGE, _SESSION = "CUDA_GPU_MEMORY_USAGE_EVENTS", "TARGET_INFO_SESSION_START_TIME"
# ENUM_CUDA_MEM_KIND; the file's own labels are text of others.
_KINDS = ("pageable", "pinned", "device", "array", "managed", "device static", "managed static", "unknown")
_ON_DEVICE = frozenset({"device", "array", "device static"})
_SIGNS = {0: 1, 1: -1}  # ENUM_CUDA_DEV_MEM_EVENT_OPER: allocation, deallocation
_LATEST = 1 << 62
MAGIC = b"SQLite format 3\0"


def parse(source: str | bytes, name: str) -> Recording:
    """Read an export, from its path or from its bytes.

    Raises:
        Refused: with one sentence; the file is no such export, is damaged, or holds nothing about memory.
    """
    if isinstance(source, bytes) and not source.startswith(MAGIC):
        raise Refused("This is no SQLite file.")
    try:
        with opened(source) as database:
            return _recording(database, name)
    except UnicodeDecodeError:
        # Python's sqlite3 raises it instead of an error whose text quotes such a schema.
        raise Refused("Its tables cannot be read (their schema is not text).") from None
    except sqlite3.Error as error:
        raise Refused(f"Its tables cannot be read ({printable(str(error))}).") from None


def _recording(database: Database, name: str) -> Recording:
    if not database.columns(_STRINGS) or not (database.columns(_RUNTIME) or database.columns(_USAGE)):
        raise Refused("This SQLite file is no Nsight Systems export with CUDA calls: it needs the tables StringIds "
                      f"and {_RUNTIME} or {_USAGE}.")
    base = _base(database)
    notes = [] if base else ["The export does not tell when it began; times count from the beginning of the session."]
    calls, told = _calls(database, base)
    usage, said = _usages(database, base)
    if not calls.name and not usage:
        raise Refused("This Nsight Systems export holds no calls for device memory and no memory usage; record with "
                      "--trace=cuda --cuda-memory-usage=true.")
    if usage and any(call in {"cuMemMap", "hipMemMap"} for call in calls.name):
        notes.append("Memory that was mapped (cuMemMap, as expandable segments do) may be missing in the usage.")
    return Recording(name, "Nsight Systems export (SQLite)", calls=calls, usage=usage, notes=(*notes, *told, *said))


def _base(database: Database) -> int:
    """The time of the session's beginning, ns since the epoch; 0 where it is not told."""
    if "utcEpochNs" not in database.columns(_SESSION):
        return 0
    for (value,) in database.rows(_SESSION, ("utcEpochNs",), "LIMIT 1"):
        if isinstance(value, int) and 0 < value < _LATEST:
            return value
    return 0


def _calls(database: Database, base: int) -> tuple[Calls, tuple[str, ...]]:
    columns = database.columns(_RUNTIME)
    if not {"start", "end", "nameId"} <= set(columns) or not {"id", "value"} <= set(database.columns(_STRINGS)):
        return Calls(), (f"The table {_RUNTIME} is missing or lacks its columns; durations of calls are not known.",)
    names: dict[int, str] = {}
    # The table also holds what the program printed; only words that begin as such calls do are taken out of the file.
    for key, text in database.rows(_STRINGS, ("id", "value"),
                                   "WHERE value >= 'cu' AND value < 'cv' OR value >= 'hip' AND value < 'hiq'"):
        if isinstance(key, int) and isinstance(text, str) and len(text) < 64 and call_name(text) in MEMORY_CALLS:
            names[key] = call_name(text)
    wanted = ("start", "end", "nameId", "globalTid" if "globalTid" in columns else "nameId")
    threads = "globalTid" in columns
    rows: list[tuple[int, int, str, int | str]] = []
    odd = 0
    for number, (start, end, key, thread) in enumerate(database.rows(_RUNTIME, wanted), 1):
        count(number, MAX_EVENTS, "calls")
        call = names.get(key) if isinstance(key, int) else None
        if call is None:
            continue
        if not isinstance(start, int) or not isinstance(end, int) or not -_LATEST < start <= end < _LATEST \
                or start + base > _LATEST or end - start > _LATEST:
            odd += 1
            continue
        rows.append((start + base, end - start, call, _process(thread) if threads else 0))
    calls, told = calls_of(rows)
    return calls, (*told, f"{odd} calls have no end or impossible times; they are left out.") if odd else told


def _usages(database: Database, base: int) -> tuple[tuple[Usage, ...], tuple[str, ...]]:
    columns = database.columns(_USAGE)
    wanted = ("start", "globalPid", "deviceId", "bytes", "memKind", "memoryOperationType")
    if not columns:
        return (), ("The export holds no memory usage; record with --cuda-memory-usage=true.",)
    if not set(wanted) <= set(columns):
        return (), (f"The table {_USAGE} lacks columns of the export schema; memory usage is not known.",)
    found: dict[tuple[int, int], list[tuple[int, str, int]]] = {}
    odd = 0
    for number, row in enumerate(database.rows(_USAGE, wanted), 1):
        count(number, MAX_EVENTS, "memory usage events")
        numbers = [value for value in row if isinstance(value, int)]
        if len(numbers) < len(wanted):
            odd += 1
            continue
        start, process, device, size, kind, operation = numbers
        if operation not in _SIGNS or not 0 <= size < MAX_SIZE or not 0 <= kind < len(_KINDS) \
                or not -_LATEST < start < _LATEST - base or not 0 <= device < 1 << 16:
            odd += 1
            continue
        found.setdefault((_process(process), device), []).append((start + base, _KINDS[kind], _SIGNS[operation] * size))
    several = len({process for process, _ in found}) > 1
    usage = tuple(_usage(f"cuda:{device} of process {process}" if several else f"cuda:{device}", events)
                  for (process, device), events in sorted(found.items()))
    notes = ["Usage is what the program took from the driver: what PyTorch's allocator reserved, and what others in "
             "the process took."] if usage else []
    if odd:
        notes.append(f"{odd} memory usage events have unknown kinds or impossible values; they are left out.")
    below = [entry.device for entry in usage if min(entry.reserved) < 0]
    if below:
        notes.append(f"On {', '.join(below)} more was freed than the export says was allocated.")
    return usage, tuple(notes)


def _usage(device: str, events: list[tuple[int, str, int]]) -> Usage:
    events.sort(key=lambda event: event[0])
    kinds = sorted({kind for _, kind, _ in events})
    running = dict.fromkeys(kinds, 0)
    columns = {kind: array("q") for kind in kinds}
    reserved = array("q")
    for _, kind, change in events:
        running[kind] += change
        if abs(running[kind]) > MAX_SIZE:
            raise Refused("The sizes in this Nsight Systems export add up to more bytes than any device has.")
        for each, column in columns.items():
            column.append(running[each])
        reserved.append(sum(running[each] for each in kinds if each in _ON_DEVICE))
    return Usage(device, array("q", (time // 1000 for time, _, _ in events)), array("q", [UNKNOWN]) * len(events),
                 reserved, columns)


def _process(serialised: object) -> int:
    """The process id in a serialised global id: bits 24 to 47."""
    return serialised >> 24 & 0xFFFFFF if isinstance(serialised, int) else 0
