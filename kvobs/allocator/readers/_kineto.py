"""Traces of PyTorch's profiler (Kineto, Chrome trace format): ``[memory]`` events and calls for device memory.

Source of the fields: ``torch/csrc/profiler/kineto_shim.cpp`` and ``collection.cpp`` of PyTorch 1.8 to 2.13 (older ones
do not tell the totals), Kineto's ``output_json.cpp`` (since 2024 times count from ``baseTimeNanoseconds``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec

from kvobs.allocator.calls import MEMORY_CALLS, call_name
from kvobs.allocator.readers._kineto_memory import MemoryEvent, OomEvent, usages
from kvobs.allocator.readers._limits import MAX_EVENTS, MAX_SIZE, Refused, count
from kvobs.allocator.readers._profile import calls_of
from kvobs.allocator.recording import UNKNOWN, Recording

_LATEST = 1 << 61  # ns; the year 2043, and twice that still fits a column
# What an event of interest looks like before it is decoded: most events of a trace are none, and are never decoded.
_NAMED = re.compile(rb'"name"\s*:\s*"(?:\[memory\]|\[OutOfMemory\]|(?:%b)(?:_\w*)?)"'
                    % "|".join(sorted(MEMORY_CALLS)).encode())
_Number = int | float


class _Args(msgspec.Struct, gc=False):
    size: int | None = msgspec.field(default=None, name="Bytes")
    allocated: int = msgspec.field(default=UNKNOWN, name="Total Allocated")
    reserved: int = msgspec.field(default=UNKNOWN, name="Total Reserved")
    kind: int | None = msgspec.field(default=None, name="Device Type")
    index: int = msgspec.field(default=UNKNOWN, name="Device Id")


class _Event(msgspec.Struct, gc=False):
    name: str
    ts: _Number
    ph: str = ""
    dur: _Number | None = None
    pid: int | str = 0
    args: _Args | None = None


class _Trace(msgspec.Struct):
    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    base: int = msgspec.field(default=0, name="baseTimeNanoseconds")


def parse(data: bytes, name: str) -> Recording:
    """Read a trace.

    Raises:
        Refused: with one sentence; the file is no trace, is cut off, or holds nothing about memory.
    """
    base, events, notes = _events(data)
    if not 0 <= base <= _LATEST:
        raise Refused("The baseTimeNanoseconds of this trace is no time.")
    memory: list[MemoryEvent] = []
    ooms: list[OomEvent] = []
    calls: list[tuple[int, int, str, int | str]] = []
    odd = 0
    for event in events:
        try:
            decoded = msgspec.json.decode(event, type=_Event)
            start = base + _ns(decoded.ts)
            if isinstance(decoded.pid, int) and abs(decoded.pid) > _LATEST:
                raise ValueError
            if decoded.name in {"[memory]", "[OutOfMemory]"}:
                _memory(decoded, start, memory, ooms)
            elif (call := call_name(decoded.name)) in MEMORY_CALLS and decoded.ph == "X":
                if decoded.dur is None or decoded.dur < 0:
                    raise ValueError
                calls.append((start, _ns(decoded.dur), call, decoded.pid))
        except (msgspec.MsgspecError, ArithmeticError, ValueError, RecursionError):
            odd += 1
    if odd:
        notes.append(f"{odd} events about memory lack a field or hold impossible values; they are left out.")
    if not memory and not calls and not ooms:
        raise Refused(" ".join((
            *notes, "This trace holds neither [memory] events (record with profile_memory=True) nor calls for device "
                    "memory such as cudaMalloc.")))
    found, told = calls_of(calls)
    usage, said = usages(memory, ooms)
    return Recording(name, "torch profiler trace (Kineto)", calls=found, usage=usage, notes=(*notes, *told, *said))


def _events(data: bytes) -> tuple[int, Iterator[bytes | memoryview | msgspec.Raw], list[str]]:
    """The events that may be of interest, undecoded, with the time that theirs count from (ns)."""
    try:
        if data.lstrip()[:1] == b"[":
            trace = _Trace(msgspec.json.decode(data, type=list[msgspec.Raw]))
        else:
            trace = msgspec.json.decode(data, type=_Trace)
    except msgspec.ValidationError:
        raise Refused("This JSON file is no trace: it has no list of traceEvents, or its baseTimeNanoseconds is no "
                      "whole number.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        return _one_by_one(data, str(error))
    count(len(trace.events), MAX_EVENTS, "events of a trace")
    return trace.base, (event for event in trace.events if _NAMED.search(event)), []


def _one_by_one(data: bytes, why: str) -> tuple[int, Iterator[bytes | memoryview | msgspec.Raw], list[str]]:
    """What can be read of a trace that is not valid JSON: PyTorch does not escape the names of all Python frames, and a
    process that died leaves a trace cut off. Each event of interest is looked for by its name.
    """
    if b'"traceEvents"' not in data[:1 << 20]:
        raise Refused(f"This file is not valid JSON ({why}) and holds no traceEvents.")
    base = re.search(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b', data)
    return int(base[1]) if base else 0, _enclosing(data), [
        f"This trace is not valid JSON ({why}); the events about memory were looked for one by one."]


def _enclosing(data: bytes) -> Iterator[bytes]:
    decoder = json.JSONDecoder()
    end = 0
    for named in _NAMED.finditer(data):
        # Kineto writes an event's name before its args, so that the nearest brace opens the event.
        start = data.rfind(b"{", max(end, named.start() - 4096), named.start())
        if start < 0:
            continue
        text = data[start:named.end() + 4096].decode("utf-8", "replace")
        try:
            event, _ = decoder.raw_decode(text)
            end = named.end()
            yield json.dumps(event).encode()
        except (ValueError, RecursionError):
            yield b""  # counted by the caller as one that cannot be read


def _memory(event: _Event, start: int, memory: list[MemoryEvent], ooms: list[OomEvent]) -> None:
    args = event.args
    if args is None or args.size is None or args.kind is None or abs(args.size) > MAX_SIZE:
        raise ValueError
    if not 0 <= args.kind < 128 or not -1 <= args.index < 1 << 16:
        raise ValueError
    totals = (args.allocated, args.reserved)
    if not all(UNKNOWN <= total <= MAX_SIZE for total in totals):
        raise ValueError
    if event.name == "[OutOfMemory]":
        ooms.append(OomEvent(args.kind, args.index, args.size))
    else:
        memory.append(MemoryEvent(start, args.kind, args.index, *totals))


def _ns(microseconds: _Number) -> int:
    """Microseconds as whole ns; the whole part is kept exact."""
    whole = int(microseconds)
    value = whole * 1000 + round((microseconds - whole) * 1000)
    if abs(value) > _LATEST:
        raise ValueError
    return value
