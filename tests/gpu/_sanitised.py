"""A snapshot that may be published: sizes, addresses, streams, pools and function names; no paths, no other texts.

Pure. Times count from the first event. A long history is cut at its beginning, which a replay undoes from the end.
"""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Mapping
from typing import Any

MOST_BYTES = 1_000_000
DEPTH = 4  # innermost frames
_SEGMENT = ("device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream",
            "segment_type", "segment_pool_id", "is_expandable")
_BLOCK = ("address", "size", "requested_size", "state")
_EVENT = ("action", "addr", "device_free", "size", "stream", "pool_id", "segment_pool_id", "mempool_id")


def sanitised(document: Mapping[str, Any], most_events: int | None = None) -> dict[str, Any]:
    """The part of a snapshot that may be published, with the last ``most_events`` events of each device."""
    known: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    pairs: dict[Any, Any] = {}
    traces = [list(trace) if most_events is None else list(trace)[max(len(trace) - most_events, 0):]
              for trace in document.get("device_traces", [])]
    first = min((event.get("time_us", 0) for trace in traces for event in trace), default=0)
    return {
        "segments": [_picked(segment, _SEGMENT, pairs) | {
            "frames": [], "blocks": [_picked(block, _BLOCK, pairs) | {"frames": _frames(block, known)}
                                     for block in segment["blocks"]]} for segment in document["segments"]],
        "device_traces": [[_picked(event, _EVENT, pairs) | {"frames": _frames(event, known)} | (
            {"time_us": event["time_us"] - first} if "time_us" in event else {}) for event in trace]
            for trace in traces],
        "allocator_settings": dict(document.get("allocator_settings") or {}),
    }


def packed(document: Mapping[str, Any], most_bytes: int = MOST_BYTES) -> tuple[bytes, int, bool]:
    """A .pickle.gz of at most ``most_bytes``, the events in it, and whether those are all; empty where none fits."""
    total = most = max((len(trace) for trace in document.get("device_traces", [])), default=0)
    while True:
        told = sanitised(document, most)
        data = gzip.compress(pickle.dumps(told, protocol=4), mtime=0)
        if len(data) <= most_bytes:
            return data, sum(map(len, told["device_traces"])), most == total
        if not most:
            return b"", 0, False
        most = int(most * min(most_bytes / len(data), 0.95) * 0.97)


def _picked(row: Mapping[str, Any], names: tuple[str, ...], known: dict[Any, Any]) -> dict[str, Any]:
    """Some of a row's values; equal pairs are one object, which a pickle holds once."""
    return {name: known.setdefault(value, value) if type(value := row[name]) is tuple else value
            for name in names if name in row}


def _frames(row: Mapping[str, Any], known: dict[tuple[str, ...], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    names = tuple(str(frame.get("name", "")) for frame in (row.get("frames") or ())[:DEPTH])
    if names not in known:
        known[names] = [{"filename": "", "line": 0, "name": name} for name in names]
    return known[names]
