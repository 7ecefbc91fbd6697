"""Snapshots in torch's schema, out of the library's columns."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from typing import Any

from kvobs.allocator.recording import ACTIONS, OOM
from kvobs.allocator.state import ALLOCATED, INACTIVE
from kvobs.virtual._library import Library

_STATES = {INACTIVE: "inactive", ALLOCATED: "active_allocated"}
_PENDING = "active_pending_free"
_SEGMENTS, _BLOCKS, _EVENTS, _FRAMES, _ENDS, _STACKS = range(6)
_line = ctypes.pythonapi.PyCode_Addr2Line
_line.restype, _line.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_int)


def take(library: Library, device: int, traces: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Segments and events of one device, as ``torch.cuda.memory._snapshot`` has them."""
    columns = library.snapshot(device, int(traces))
    if not columns:
        raise ValueError(library.error().decode("utf-8", "replace"))
    try:
        stacks = _stacks(library, columns)
        segments = _segments(library, columns, device, stacks)
        events = [_event(row, stacks) for row in _rows(_numbers(library, columns, _EVENTS), 7)]
    finally:
        library.drop(columns)
    return segments, events


def _event(row: array[int], stacks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    action, address, size, stream, pool, time_us, stack = row
    return {"action": ACTIONS[action], "device_free" if action == OOM else "addr": address, "size": size,
            "stream": stream, "pool_id": (0, pool), "time_us": time_us, "compile_context": "N/A", "user_metadata": "",
            "frames": stacks[stack] if stack >= 0 else []}


def _segments(library: Library, columns: int, device: int, stacks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    rows = _rows(_numbers(library, columns, _BLOCKS), 5)
    for address, size, stream, pool, small, expandable, count, stack in _rows(
            _numbers(library, columns, _SEGMENTS), 8):
        blocks = [{"address": at, "size": length, "requested_size": requested, "state": _STATES.get(state, _PENDING),
                   "frames": stacks[own] if own >= 0 else []}
                  for at, length, requested, state, own in (next(rows) for _ in range(count))]
        active = [block for block in blocks if block["state"] != _STATES[INACTIVE]]
        found.append({
            "device": device, "address": address, "total_size": size,
            "allocated_size": sum(block["size"] for block in active if block["state"] == _STATES[ALLOCATED]),
            "active_size": sum(block["size"] for block in active),
            "requested_size": sum(block["requested_size"] for block in active), "stream": stream,
            "segment_type": "small" if small else "large", "segment_pool_id": (0, pool),
            "is_expandable": bool(expandable), "frames": stacks[stack] if stack >= 0 else [], "blocks": blocks})
    return found


def _stacks(library: Library, columns: int) -> list[list[dict[str, Any]]]:
    """Every stack once: events share the lists, as in torch's own snapshots."""
    frames = [_frame(code, offset) for code, offset in _rows(_numbers(library, columns, _FRAMES), 2)]
    order = _numbers(library, columns, _STACKS)
    found: list[list[dict[str, Any]]] = []
    start = 0
    for end in _numbers(library, columns, _ENDS):
        found.append([frames[number] for number in order[start:end]])
        start = end
    return found


def _frame(address: int, offset: int) -> dict[str, Any]:
    """A frame of the code object at an address, which the columns keep alive, in words."""
    code = ctypes.cast(address, ctypes.py_object).value
    return {"filename": code.co_filename, "name": code.co_name, "line": _line(code, offset)}


def _rows(column: array[int], width: int) -> Iterator[array[int]]:
    return (column[start:start + width] for start in range(0, len(column), width))


def _numbers(library: Library, columns: int, which: int) -> array[int]:
    length = ctypes.c_int64()
    place = library.column(columns, which, ctypes.byref(length))
    return array("q", ctypes.string_at(place, 8 * length.value) if length.value else b"")
