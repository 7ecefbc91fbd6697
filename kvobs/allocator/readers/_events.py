"""The history of one device: from a list of dicts to columns."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from kvobs.allocator.readers import _columns
from kvobs.allocator.readers._frames import Interner
from kvobs.allocator.readers._limits import MAX_TOTAL_SIZE, Refused
from kvobs.allocator.readers._pools import Pools
from kvobs.allocator.recording import ACTIONS, OTHER, UNKNOWN, Events

_CHUNK = 1 << 16
_CODES = {name: code for code, name in enumerate(ACTIONS)}
_LATEST = 1 << 62  # microseconds
_POOL_KEYS = ("pool_id", "segment_pool_id", "mempool_id")
Rows = Callable[[list[Any]], list[dict[str, Any]]]


def events(trace: list[Any], rows_of: Rows, stacks: Interner, pools: Pools, progress: Callable[[float], None]) -> Events:
    """All events of a trace, in their order.

    Raises:
        Refused: one is not what torch writes.
    """
    found = Events()
    for start in range(0, len(trace), _CHUNK):
        _append(found, rows_of(trace[start:start + _CHUNK]), stacks, pools)
        progress(start / len(trace))
    if sum(found.size) > MAX_TOTAL_SIZE:
        raise Refused("The sizes of its events add up to more bytes than any device handles.")
    return found


def _append(found: Events, rows: list[dict[str, Any]], stacks: Interner, pools: Pools) -> None:
    names = [row.get("action") for row in rows]
    for other in set(map(type, names)) - {str}:
        _columns.text(next(name for name in names if type(name) is other), "action of an event")
    actions = [_CODES.get(name, OTHER) for name in names]  # type: ignore[arg-type]
    sizes = [row.get("size") for row in rows]
    where = [row.get("device_free") if name == "oom" and "device_free" in row else row.get("addr")
             for name, row in zip(names, rows, strict=True)]
    if None in sizes or None in where:
        for index, (size, address) in enumerate(zip(sizes, where, strict=True)):
            if size is None or address is None:
                actions[index], sizes[index], where[index] = OTHER, size or 0, address or 0
    found.action.extend(actions)
    found.size.extend(_columns.numbers("q", sizes, 0, _columns.MAX_SIZE + 1, "size of an event"))
    found.address.extend(_columns.numbers("Q", where, 0, _columns.MAX_ADDRESS, "address of an event"))
    found.stream.extend(_columns.streams(rows, "an event"))
    times = [row.get("time_us", UNKNOWN) for row in rows]
    found.time_us.extend(_columns.numbers("q", times, UNKNOWN, _LATEST, "time_us of an event"))
    stack = stacks.stack
    found.stack.extend([stack(row.get("frames")) for row in rows])
    found.pool.extend(_pools(rows, pools))


def _pools(rows: list[dict[str, Any]], pools: Pools) -> array[int]:
    key = next((key for key in _POOL_KEYS if rows and key in rows[0]), None)
    if key is None:
        return array("i", [UNKNOWN]) * len(rows)
    return array("i", [pools.index(row[key]) if key in row else UNKNOWN for row in rows])
