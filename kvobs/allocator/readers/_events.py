"""The history of one device: from a list of dicts to columns."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from kvobs.allocator.readers import _columns
from kvobs.allocator.readers._frames import Interner
from kvobs.allocator.readers._limits import MAX_ADDRESS, MAX_SIZE, MAX_TOTAL_SIZE, Refused
from kvobs.allocator.readers._pools import POOL_KEYS, Pools
from kvobs.allocator.recording import ACTIONS, OTHER, UNKNOWN, Events

if TYPE_CHECKING:
    from kvobs.allocator.readers._condensed import Condensed

_CHUNK = 1 << 14
_CODES = {name: code for code, name in enumerate(ACTIONS)}
_FIELDS = itemgetter("action", "addr", "size", "stream", "time_us")
LATEST = 1 << 62  # microseconds
Rows = Callable[[list[Any]], list[dict[str, Any]]]


def events(trace: list[Any], rows_of: Rows, stacks: Interner, pools: Pools,
           progress: Callable[[float], None], condensed: Condensed | None = None) -> Events:
    """All events of a trace, in their order. None among them stands for the next of ``condensed``.

    Raises:
        Refused: one is not what torch writes.
    """
    found = Events()
    for start in range(0, len(trace), _CHUNK):
        part = trace[start:start + _CHUNK]
        if condensed is None:
            _append(found, rows_of(part), stacks, pools)
        else:
            for kind, run in groupby(part, type):
                if kind is type(None):
                    condensed.append(found, len(list(run)))
                else:
                    _append(found, rows_of(list(run)), stacks, pools)
        progress(start / len(trace))
    if sum(found.size) > MAX_TOTAL_SIZE:
        raise Refused("The sizes of its events add up to more bytes than any device handles.")
    return found


def _append(found: Events, rows: list[dict[str, Any]], stacks: Interner, pools: Pools) -> None:
    try:
        fields = list(map(_FIELDS, rows))
    except KeyError:
        fields = list(map(_fields, rows))
    names, where, sizes, streams, times = zip(*fields, strict=True)
    if "oom" in names:
        _, where, *_ = zip(*map(_fields, rows), strict=True)
    for other in set(map(type, names)) - {str}:
        _columns.text(next(name for name in names if type(name) is other), "action of an event")
    actions = [_CODES.get(name, OTHER) for name in names]
    if None in sizes or None in where:
        lacking = [size is None or address is None for size, address in zip(sizes, where, strict=True)]
        actions = [OTHER if lacks else action for lacks, action in zip(lacking, actions, strict=True)]
        sizes, where = (tuple(0 if value is None else value for value in values) for values in (sizes, where))
    found.action.extend(actions)
    found.address.extend(_columns.numbers("Q", where, 0, MAX_ADDRESS, "address of an event"))
    found.size.extend(_columns.numbers("q", sizes, 0, MAX_SIZE + 1, "size of an event"))
    found.stream.extend(_columns.numbers("q", streams, -_columns.STREAM, _columns.STREAM, "stream of an event"))
    found.time_us.extend(_columns.numbers("q", times, UNKNOWN, LATEST, "time_us of an event"))
    stack = stacks.stack
    found.stack.extend([stack(row.get("frames")) for row in rows])
    found.pool.extend(_pools(rows, pools))


def _fields(row: dict[str, Any]) -> tuple[Any, ...]:
    """The same for an event that lacks some: an OOM has device_free for an address, those of 2023 have no time."""
    where = row.get("device_free", row.get("addr")) if row.get("action") == "oom" else row.get("addr")
    return row.get("action"), where, row.get("size"), row.get("stream", 0), row.get("time_us", UNKNOWN)


def _pools(rows: list[dict[str, Any]], pools: Pools) -> array[int]:
    key = next((key for key in POOL_KEYS if any(key in row for row in rows)), None)
    if key is None:
        return array("i", [UNKNOWN]) * len(rows)
    return array("i", [pools.index(row[key]) if key in row else UNKNOWN for row in rows])
