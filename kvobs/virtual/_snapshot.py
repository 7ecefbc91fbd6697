"""Snapshots in torch's schema, out of the library's columns."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Iterator
from typing import Any

from kvobs.allocator import torch_schema
from kvobs.allocator.torch_schema import Frames
from kvobs.virtual._library import Library

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


def _event(row: array[int], stacks: list[Frames]) -> dict[str, Any]:
    action, address, size, stream, pool, time_us, stack = row
    return torch_schema.event(action, address, size, stream, time_us, _frames(stacks, stack)) | {"pool_id": (0, pool)}


def _segments(library: Library, columns: int, device: int, stacks: list[Frames]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    rows = _rows(_numbers(library, columns, _BLOCKS), 5)
    for address, size, stream, pool, small, expandable, count, stack in _rows(
            _numbers(library, columns, _SEGMENTS), 8):
        blocks = [torch_schema.block(at, length, requested, state, _frames(stacks, own))
                  for at, length, requested, state, own in itertools.islice(rows, count)]
        found.append(torch_schema.segment(device, address, size, stream, pool, small=bool(small),
                                          expandable=bool(expandable), blocks=blocks, frames=_frames(stacks, stack)))
    return found


def _frames(stacks: list[Frames], number: int) -> Frames:
    return stacks[number] if number >= 0 else []


def _stacks(library: Library, columns: int) -> list[Frames]:
    """Every stack once: events share the lists, as in torch's own snapshots."""
    frames = [_frame(code, offset) for code, offset in _rows(_numbers(library, columns, _FRAMES), 2)]
    order = _numbers(library, columns, _STACKS)
    found: list[Frames] = []
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
