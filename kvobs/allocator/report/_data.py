"""What the report's page draws, as JSON: numbers as they are, long columns as base64 of little-endian arrays."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvobs.allocator.held import Forced, Held, forced, held
from kvobs.allocator.holders import Attribution, Holdings, frame_text, holders
from kvobs.allocator.kinds import KINDS
from kvobs.allocator.pinning import pins
from kvobs.allocator.recording import DeviceRecording, Recording
from kvobs.allocator.replayed import Replay
from kvobs.allocator.report._map import BLOCKS, GROUPS, UNIT, Map, memory_map, packed, place
from kvobs.allocator.settings import Settings
from kvobs.allocator.timeline import Line, Timeline, interval_line, timeline

TEXT = 160  # letters of one name
OOMS = 64
PINS = 10
ROWS = 40  # of the map, at most
RANGES = 4_096  # of addresses; further ones are drawn without an address
MEANING = {
    "requested": "requested by the program and in use",
    "rounding": "added to requests by rounding them up",
    "gaps": "free, but a block in use keeps its segment or page",
    "cached": "free, and can be returned to the device",
    "other_pools": "free in private pools, which serve only their own requests",
    "pending": "freed, but a stream may still use it",
    "unexplained": "reserved, but in no block: the file contradicts itself",
}


def page_data(recording: Recording, replays: Sequence[Replay], document: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of the page. ``replays`` and the document's devices are in the order of the recording's devices."""
    devices = recording.devices
    return {
        "file": text(recording.file.replace("\\", "/").rpartition("/")[2]), "schema": text(recording.schema),
        "settings": None if recording.settings is None else recording.settings.conf() or "the defaults",
        "notes": [text(note, 500) for note in recording.notes[:50]], "kinds": KINDS,
        "devices": [_device(recording, device, replay, told, BLOCKS // max(len(devices), 1))
                    for device, replay, told in zip(devices, replays, document["devices"], strict=True)],
        "calls": [[text(call["name"]), call["count"], *(call[f"{name}_ns"] for name in (
            "total", "median", "p95", "max", "first"))] for call in document["device_calls"]],
        "usage": [{"device": "A device that the file does not name" if one.device in {"", "unknown"}
                   else text(one.device), "timeline": _usage(one.time_us, {
            "allocated": one.allocated, "reserved": one.reserved, **one.categories})} for one in recording.usage[:16]],
    }


def _device(recording: Recording, device: DeviceRecording, replay: Replay, told: Mapping[str, Any],
            most_blocks: int) -> dict[str, Any]:
    settings = recording.settings or Settings()
    found = Attribution(recording.stacks)
    line, history = timeline(device, replay), held(recording, device, replay) if replay.usable else None
    ooms = [one["event"] for one in told["ooms"][:OOMS]]
    special = {*ooms, *([history.peak_event] if history is not None else [])}
    drawn = memory_map(device, replay, settings, found, special, most_blocks)
    return {
        "device": device.device, "score": score_text(replay),
        "numbers": [[name.removesuffix("_bytes").replace("_", " "), told[name]] for name in (
            "reserved_bytes", "allocated_bytes", "active_bytes", "pending_free_bytes", "free_bytes",
            "largest_free_bytes")],
        "segments": len(device.state), "events": len(device.events),
        "ooms": [_oom(one) for one in told["ooms"][:OOMS]],
        "ooms_total": len(told["ooms"]), "waste": _waste(told["waste"], told["reserved_bytes"]),
        "timeline": None if line is None else _timeline(line, ooms),
        "holders": {"last": _holdings(holders(device.state, recording.stacks, attribution=found)),
                    "peak": None if history is None else _holdings(history.peak)},
        "peak_event": None if history is None else history.peak_event,
        "growth": [] if history is None else _growth(history),
        "forced": [_forced(one) for one in forced(recording, device, replay)] if replay.usable else [],
        "forced_total": len(replay.forced),
        "definitions": [[one["name"], one["owner"], one["formula"], told["definitions"][one["name"]], one["unit"],
                         one["reason"], one["objection"]] for one in told["about_definitions"]],
        "pins": [[f"{pin.address:x}", pin.size_bytes, pin.held_back_bytes, pin.blocks, pin.block.size,
                  text(found.groups[found.group(pin.block.stack, pin.block.requested)].label)]
                 for pin in pins(device.state, settings)[:PINS]],
        "map": _map(drawn, found, device.events.time_us),
    }


def score_text(replay: Replay) -> str:
    """How far the replay can be trusted, in one sentence that stands beside every conclusion."""
    if not replay.events:
        return f"No replay: {replay.reason}; what follows is the file's own state."
    parts = [f"{score.matched:,}/{score.checked:,} {name}" for name, score in (
        ("addresses", replay.addresses), ("device allocations", replay.device_allocs),
        ("device frees", replay.device_frees)) if score.checked]
    told = ", ".join(parts) or "nothing could be checked"
    doubt = f" ({replay.reason})" if replay.reason else ""
    return f"Replay: {told} reproduced{doubt}." if replay.usable else (
        f"Replay not usable: {told} reproduced{doubt}; conclusions about the past are withheld or doubtful.")


def text(found: str, most: int = TEXT) -> str:
    """A text of the file, on one line and of bounded length."""
    line = " ".join(found.split())
    return line if len(line) <= most else line[:most - 1] + "…"


def packed_column(kind: str, values: Iterable[int] | Iterable[float]) -> str:
    """Base64 of a little-endian array of the given type code."""
    column = array(kind, values)  # type: ignore[call-overload,unused-ignore]
    if sys.byteorder == "big":
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode("ascii")


def _oom(told: Mapping[str, Any]) -> dict[str, Any]:
    facts = [[name.removesuffix("_bytes").replace("_", " "), value] for name, value in told["evidence"].items()
             if name.endswith("_bytes") and value is not None]
    asker = f"{text(told['label'])} ({told['kind']})" if told["label"] else None
    return {"requested": told["requested_bytes"], "asker": asker, "device_free": told["device_free_bytes"],
            "verdict": told["verdict"], "sentence": " ".join(filter(None, (told["sentence"], told["note"]))),
            "facts": facts, "event": told["event"]}


def _waste(told: Mapping[str, Any], reserved: int) -> dict[str, Any]:
    return {"reserved": reserved, "parts": [[name.replace("_", " "), told[f"{name}_bytes"], meaning]
                                            for name, meaning in MEANING.items()]}


def _timeline(found: Timeline, ooms: list[int]) -> dict[str, Any]:
    return {"first": packed_column("d", found.first), "time_us": packed_column("d", found.time_us),
            "lines": _lines(found.lines), "ooms": ooms}


def _usage(time_us: array[int], columns: Mapping[str, array[int]]) -> dict[str, Any] | None:
    """A profiler's columns as lines over samples; values that it did not tell are left out with their line."""
    known = {text(name): column for name, column in columns.items()
             if len(column) and len(column) == len(time_us) and min(column) >= 0}
    if not known or not len(time_us):
        return None
    step = -(-len(time_us) // 1_000)
    first = array("q", [*range(0, len(time_us), step), len(time_us)])
    lines = {name: interval_line(column, first) for name, column in list(known.items())[:10]}
    times = array("q", [time_us[end - 1] for end in first[1:]])
    return _timeline(Timeline(first, times, lines), [])


def _lines(found: Mapping[str, Line]) -> dict[str, dict[str, str]]:
    return {name: {"low": packed_column("d", line.low), "high": packed_column("d", line.high)}
            for name, line in found.items()}


def _holdings(found: Holdings) -> dict[str, Any]:
    return {"allocated": found.allocated_bytes, "kinds": list(found.kinds.items()), "rest": found.rest,
            "rest_bytes": found.rest_bytes,
            "top": [[text(one.place.label), one.place.kind, text(one.place.rule), one.size_bytes, one.blocks]
                    for one in found.top]}


def _growth(found: Held) -> list[list[Any]]:
    return [[text(line.place.label), line.place.kind, line.grew, list(line.last)] for line in found.lines]


def _forced(one: Forced) -> list[Any]:
    return [one.event, one.requested_bytes, one.device_bytes, one.kind, text(frame_text(one.frame))]


def _map(drawn: Map, found: Attribution, time_us: array[int]) -> dict[str, Any]:
    timed = len(time_us) > 0 and 0 <= time_us[0] < time_us[-1]
    ranges = packed(drawn.segments)
    starts = [address for address, _, _ in ranges]
    columns: dict[str, Any] = {}
    outside = 0
    for name, spans in (("blocks", drawn.blocks), ("segments", drawn.segments)):
        rows = []
        for index in range(len(spans)):
            at = place(ranges, starts, spans.address[index])
            if at is None:
                outside += 1
            else:
                rows.append((at, index))
        rows.sort()
        chosen = [index for _, index in rows]
        columns[name] = {
            "count": len(rows), "at": packed_column("d", [at for at, _ in rows]),
            "size": packed_column("d", [spans.size[index] for index in chosen]),
            "first": packed_column("H", [spans.first[index] for index in chosen]),
            "end": packed_column("H", [spans.end[index] for index in chosen]),
            "group": packed_column("H", [spans.group[index] for index in chosen]),
            "state": packed_column("B", [spans.state[index] for index in chosen])}
    total = sum(size for _, size, _ in ranges)
    row = 1 << max(-(-total // ROWS) - 1, UNIT - 1).bit_length()  # bytes: a power of two
    return {"moments": drawn.moments,
            "since_us": [time_us[event] - time_us[0] if timed and event >= 0 else None for event in drawn.moments],
            "row": row, "rows": max(-(-total // row), 1), "outside": outside,
            "ranges": [[f"{address:x}", size, at] for address, size, at in ranges[:RANGES]],
            "groups": [[text(place_.label), place_.kind] for place_ in found.groups[:GROUPS]], **columns}
