"""From the document that torch dumps (a dict, or a list of segments) to a recording."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from kvobs.allocator import settings
from kvobs.allocator.readers import _columns, _notes
from kvobs.allocator.readers._condensed import Condensed
from kvobs.allocator.readers._events import LATEST, Rows, events
from kvobs.allocator.readers._frames import Interner, kind
from kvobs.allocator.readers._limits import MAX_ANNOTATIONS, MAX_CONF, MAX_DEVICES, MAX_EVENTS, Refused, count
from kvobs.allocator.readers._pickle import Progress
from kvobs.allocator.readers._pools import POOL_KEYS, Pools
from kvobs.allocator.readers._segments import states
from kvobs.allocator.recording import UNKNOWN, Annotation, DeviceRecording, Events, Recording

_KEYS = ("segments", "device_traces")


def recording(document: Any, name: str, progress: Progress = lambda done: None,
              rows_of: Rows | None = None, short: tuple[Condensed, list[Any]] | None = None) -> Recording:
    """What ``torch.cuda.memory._snapshot()`` or ``memory_snapshot()`` gave. ``rows_of`` decodes events on demand;
    ``short`` has those that are None in the document, and their stacks.

    Raises:
        Refused: not such a document.
    """
    if type(document) is list:
        document = {"segments": document}
    if type(document) is not dict or not any(key in document for key in _KEYS):
        raise Refused("It holds no snapshot of torch's allocator: that is a dict with segments and device_traces, or a "
                      "list of segments.")
    rows = _columns.dicts(document.get("segments", []), "segments")
    traces = _traces(document.get("device_traces", []))
    decode = rows_of or _event_rows
    stacks, pools = Interner(), Pools()
    found = states(rows, stacks, pools)
    if short is not None:
        short[0].resolve(short[1], stacks)
    total = sum(map(len, traces))
    starts = list(accumulate(map(len, traces), initial=0))
    histories = [events(trace, decode, stacks, pools, _part(progress, start, len(trace), total),
                        None if short is None else short[0])
                 for trace, start in zip(traces, starts, strict=False)]
    if short is not None:
        short[0].end()
    marks = _annotations(document.get("external_annotations", []), stacks)
    configured, notes = _settings(document.get("allocator_settings"))
    notes += _notes.of_sums(rows)
    devices = []
    for device in sorted({*found, *(index for index, history in enumerate(histories) if len(history))}):
        state, history = found.get(device, ()), histories[device] if device < len(histories) else Events()
        devices.append(DeviceRecording(device, state, history, tuple(marks.get(device, ()))))
        notes += _notes.of_state(device, state) + _notes.of_events(device, history, state)
    if not devices:
        notes.append("The snapshot is empty: no device has segments or events.")
    elif not any(len(history) for history in histories):
        notes.append("The snapshot has no history: torch records it only after "
                     "torch.cuda.memory._record_memory_history().")
    schema = _schema(document, rows, decode([trace[0] for trace in traces if trace][:1]))
    return Recording(name, schema, configured, tuple(devices), pools.all(), stacks.result(), notes=tuple(notes))


def _part(progress: Progress, start: int, length: int, total: int) -> Progress:
    return lambda done: progress((start + done * length) / total)


def _traces(told: Any) -> list[list[Any]]:
    if type(told) is not list:
        raise Refused(f"Its device_traces are {kind(told)}, and must be a list with one list of events per device.")
    count(len(told), MAX_DEVICES, "devices")
    for trace in told:
        if type(trace) is not list:
            raise Refused(f"The trace of a device is {kind(trace)}, and must be a list of events.")
    count(sum(map(len, told)), MAX_EVENTS, "events")
    return told


def _event_rows(chunk: list[Any]) -> list[dict[str, Any]]:
    return _columns.dicts(chunk, "events")


def _annotations(told: Any, stacks: Interner) -> dict[int, list[Annotation]]:
    rows = _columns.dicts(told, "external_annotations")
    count(len(rows), MAX_ANNOTATIONS, "annotations")
    devices = _columns.numbers("q", [row.get("device", 0) for row in rows], 0, MAX_DEVICES, "device of an annotation")
    times = _columns.column("q", rows, "time_us", UNKNOWN, LATEST, "an annotation")
    found: dict[int, list[Annotation]] = {}
    for row, device, time in zip(rows, devices, times, strict=True):
        name, stage = (_columns.text(row.get(key, ""), f"{key} of an annotation") for key in ("name", "stage"))
        found.setdefault(device, []).append(Annotation(stacks.text(name), stacks.text(stage), time))
    return found


def _settings(told: Any) -> tuple[settings.Settings | None, list[str]]:
    if told is None:
        return None, []
    if type(told) is not dict:
        raise Refused(f"Its allocator_settings are {kind(told)}, and must be a dict.")
    try:
        known = {key: _setting(key, value) for key, value in told.items() if key in _SETTINGS}
        return settings.from_snapshot(known), []
    except ValueError as error:
        return None, [f"The allocator's settings could not be understood: {error}."]


def _setting(key: str, value: Any) -> Any:
    if not _SETTINGS[key](value):
        raise ValueError(f"{key} has an impossible value")
    return value


_SETTINGS: dict[Any, Callable[[Any], bool]] = {
    "PYTORCH_CUDA_ALLOC_CONF": lambda value: type(value) is str and len(value) <= MAX_CONF,
    "PYTORCH_ALLOC_CONF": lambda value: type(value) is str and len(value) <= MAX_CONF,
    "max_split_size": lambda value: type(value) is int,
    "garbage_collection_threshold": lambda value: type(value) in (int, float) and 0 <= value <= 1
    and math.isfinite(value),
    "expandable_segments": lambda value: type(value) is bool,
    "roundup_power2_divisions": lambda value: type(value) is dict and all(
        type(key) is str and type(part) is int and 0 <= part < 1 << 20 for key, part in value.items()),
}


def _schema(document: dict[Any, Any], rows: list[dict[str, Any]], first_events: list[dict[str, Any]]) -> str:
    """The kind and age of a snapshot, by the newest thing in it."""
    event = first_events[0] if first_events else {}
    if "device_traces" not in document and "allocator_settings" not in document:
        form = "torch list of segments"
    else:
        form = "torch snapshot"
    block: dict[str, Any] = next((row["blocks"][0] for row in rows if row.get("blocks")), {})
    return f"{form} ({_age(document, rows, block, event)})"


def _age(document: dict[Any, Any], rows: list[dict[str, Any]], block: dict[str, Any], event: dict[str, Any]) -> str:
    if any(key in event for key in POOL_KEYS):
        return "2026: events name their pool"
    if "user_metadata" in event:
        return "late 2025 on: events carry user metadata"
    if "compile_context" in event:
        return "2025 on: events carry the compile context"
    if "external_annotations" in document:
        return "late 2024 on: with annotations"
    if "allocator_settings" in document:
        return "2024 on: with the allocator's settings"
    if "address" in block or any("is_expandable" in row or "segment_pool_id" in row for row in rows):
        return "late 2023 on: blocks with addresses"
    if block or rows:
        return "2023: blocks without addresses, events without times"
    return "of unknown age"
