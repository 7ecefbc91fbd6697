"""A recording as bytes, from the child that read it to the process that asked. Checked on arrival, never trusted."""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from kvobs.allocator.recording import (
    ACTIONS,
    Annotation,
    Calls,
    DeviceRecording,
    Events,
    Recording,
    Stacks,
    Usage,
)
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import ALLOCATED, Block, Segment, State

_EVENT_CODES = {"action": "B", "address": "Q", "size": "q", "stream": "q", "time_us": "q", "stack": "i", "pool": "i"}


class _Column(msgspec.Struct, array_like=True):
    code: str
    data: bytes


class _Device(msgspec.Struct, array_like=True):
    device: int
    segments: list[_Column]  # address, size, stream, pool, small, expandable, stack, number of blocks
    blocks: list[_Column]  # address, size, requested, state, stack
    events: list[_Column]
    annotations: list[tuple[str, str, int]]


class _Usage(msgspec.Struct, array_like=True):
    device: str
    columns: list[_Column]  # time_us, allocated, reserved
    categories: dict[str, _Column]


class _Message(msgspec.Struct, array_like=True):
    schema: str
    settings: Settings | None
    devices: list[_Device]
    pools: list[tuple[int, int]]
    frames: list[tuple[str, int, str]]
    stacks: list[_Column]  # lengths; all frames
    calls: tuple[list[str], _Column, _Column]
    usage: list[_Usage]
    notes: list[str]


class Damaged(Exception):
    """These bytes are no recording."""


def pack(recording: Recording) -> bytes:
    """A recording as bytes."""
    stacks = recording.stacks
    return msgspec.msgpack.encode(_Message(
        recording.schema, recording.settings, [_device(device) for device in recording.devices], list(recording.pools),
        list(stacks.frames),
        [_column("i", map(len, stacks.stacks)), _column("i", (frame for stack in stacks.stacks for frame in stack))],
        (list(recording.calls.name), _sent(recording.calls.start_ns), _sent(recording.calls.duration_ns)),
        [_Usage(usage.device, [_sent(usage.time_us), _sent(usage.allocated), _sent(usage.reserved)],
                {name: _sent(column) for name, column in usage.categories.items()}) for usage in recording.usage],
        list(recording.notes)))


def unpack(data: bytes, file: str) -> Recording:
    """The recording that these bytes hold.

    Raises:
        Damaged: they hold none.
    """
    try:
        told = msgspec.msgpack.decode(data, type=_Message)
        stacks = _stacks(told)
        names, start, duration = told.calls
        calls = Calls(tuple(names), *_equal(len(names), _received(start, "q"), _received(duration, "q")))
        return Recording(file, told.schema, told.settings,
                         tuple(_rebuilt(device, len(stacks.stacks), len(told.pools)) for device in told.devices),
                         tuple(told.pools), stacks, calls, tuple(_usage(usage) for usage in told.usage),
                         tuple(told.notes))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(str(error)) from None


def _sent(column: array[int]) -> _Column:
    return _Column(column.typecode, column.tobytes())


def _column(code: str, values: Any) -> _Column:
    return _sent(array(code, values))


def _device(device: DeviceRecording) -> _Device:
    state = device.state
    blocks = [block for segment in state for block in segment.blocks]
    fields = list(zip(*state, strict=True)) or [()] * len(Segment._fields)
    parts = list(zip(*blocks, strict=True)) or [()] * len(Block._fields)
    return _Device(
        device.device,
        [_column(code, values) for code, values in zip("QqqiBB", fields[:6], strict=True)]
        + [_column("i", fields[7]), _column("i", map(len, fields[6]))],
        [_column(code, values) for code, values in zip("QqqBi", parts, strict=True)],
        [_sent(getattr(device.events, name)) for name in _EVENT_CODES],
        [(mark.name, mark.stage, mark.time_us) for mark in device.annotations])


def _received(column: _Column, code: str) -> array[int]:
    if column.code != code:
        raise ValueError("a column of another kind")
    found = array(code)
    found.frombytes(column.data)
    return found


def _equal(length: int, *columns: array[int]) -> tuple[array[int], ...]:
    if any(len(column) != length for column in columns):
        raise ValueError("columns of unequal length")
    return columns


def _within(column: array[int], low: int, high: int) -> None:
    if len(column) and not low <= min(column) <= max(column) < high:
        raise ValueError("an index out of range")


def _stacks(told: _Message) -> Stacks:
    lengths, flat = (_received(column, "i") for column in told.stacks)
    _within(lengths, 0, 1 << 31)
    _within(flat, 0, len(told.frames))
    if sum(lengths) != len(flat):
        raise ValueError("stacks of another length")
    bounds = pairwise(accumulate(lengths, initial=0))
    return Stacks(tuple(told.frames), tuple([tuple(flat[start:end]) for start, end in bounds]))


def _rebuilt(told: _Device, stacks: int, pools: int) -> DeviceRecording:
    columns = [_received(column, code) for column, code in zip(told.events, _EVENT_CODES.values(), strict=True)]
    events = Events(*_equal(len(columns[0]), *columns))
    _within(events.action, 0, len(ACTIONS))
    _within(events.stack, -1, stacks)
    _within(events.pool, -1, pools)
    return DeviceRecording(told.device, _state(told, stacks, pools), events,
                           tuple([Annotation(*mark) for mark in told.annotations]))


def _state(told: _Device, stacks: int, pools: int) -> State:
    columns = [_received(column, code) for column, code in zip(told.segments, "QqqiBBii", strict=True)]
    parts = [_received(column, code) for column, code in zip(told.blocks, "QqqBi", strict=True)]
    address, size, stream, pool, small, expandable, stack, lengths = _equal(len(columns[0]), *columns)
    _equal(len(parts[0]), *parts)
    _within(pool, 0, pools)
    _within(stack, -1, stacks)
    _within(lengths, 0, 1 << 31)
    _within(parts[3], 0, ALLOCATED + 1)
    _within(parts[4], -1, stacks)
    if sum(lengths) != len(parts[0]):
        raise ValueError("blocks without a segment")
    blocks = [Block(*values) for values in zip(*parts, strict=True)]
    bounds = pairwise(accumulate(lengths, initial=0))
    return tuple([
        Segment(address[index], size[index], stream[index], pool[index], bool(small[index]), bool(expandable[index]),
                tuple(blocks[start:end]), stack[index]) for index, (start, end) in enumerate(bounds)])


def _usage(told: _Usage) -> Usage:
    time, allocated, reserved = (_received(column, "q") for column in told.columns)
    _equal(len(time), allocated, reserved)
    categories = {name: _received(column, "q") for name, column in told.categories.items()}
    _equal(len(time), *categories.values())
    return Usage(told.device, time, allocated, reserved, categories)
