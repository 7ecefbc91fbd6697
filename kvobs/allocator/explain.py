"""Everything kvobs can say about a recording, as one document: state, waste, definitions, replay, verdicts, holders."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvobs.allocator import calls as device_calls
from kvobs.allocator.definitions import Peaks, Wanted, definitions
from kvobs.allocator.held import forced, held
from kvobs.allocator.holders import Attribution, Holder, frame_text, holders
from kvobs.allocator.live import evidence_of
from kvobs.allocator.pinning import Pin, pins
from kvobs.allocator.recording import OOM, SEGMENT_UNMAP, UNKNOWN, DeviceRecording, Recording, Usage
from kvobs.allocator.replay import OOM_STATES, replay
from kvobs.allocator.replayed import RecordedOom, Replay, Score
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, State
from kvobs.allocator.verdict import SUCCEEDS, Judgement, Request, Verdict, judge
from kvobs.allocator.waste import waste

SHOWN = 20


@dataclass(frozen=True, slots=True)
class Explained:
    """``document`` is the JSON of ``kvobs explain --json``; ``replays`` has one replay per device of it."""

    document: dict[str, Any]
    replays: tuple[Replay, ...]


@dataclass(frozen=True, slots=True)
class Hypothetical:
    """A request that was never made. ``device_free``: bytes the device would have left; None if unknown."""

    request: Request
    device_free: int | None = None


def explain(recording: Recording, hypothetical: Sequence[Hypothetical] = (), engine: str = "auto",
            progress: Callable[[str], None] | None = None) -> Explained:
    """Explain every device of a recording. ``progress`` is told what is being done, in words.

    Raises:
        ValueError: the engine that was asked for cannot be had, or a request is for less than one byte.
    """
    tell = progress or (lambda _: None)
    settings = recording.settings or Settings()
    replays, devices = [], []
    for device in recording.devices:
        tell(f"Replaying {len(device.events):,} events of device {device.device}")
        replayed = replay(device, settings, engine)
        tell(f"Explaining device {device.device}")
        replays.append(replayed)
        devices.append(_device(recording, device, settings, replayed, hypothetical))
    return Explained({
        "file": recording.file,
        "schema": recording.schema,
        "settings": None if recording.settings is None else settings.conf(),
        "notes": list(recording.notes),
        "devices": devices,
        "device_calls": [asdict(call) for call in device_calls.summary(recording.calls)],
        "usage": [_usage(usage) for usage in recording.usage],
    }, tuple(replays))


def judge_oom(oom: RecordedOom, settings: Settings) -> tuple[Judgement, str]:
    """The verdict on a recorded OOM, and a note where the device refused although it reported enough (else empty).

    Raises:
        ValueError: its state is not known.
    """
    if oom.state is None:
        raise ValueError("the state at this OOM was not kept")
    request = Request(max(oom.requested, 1), oom.stream, oom.pool)
    found = judge(oom.state, settings, request, oom.device_free)
    if found.verdict not in SUCCEEDS:
        return found, ""
    if found.verdict is Verdict.SERVED:
        return found, ("What it fits into became free while PyTorch waited for other streams; after that it asks only "
                       "the device once more (WAIT). The same request succeeds now.")
    refused = judge(oom.state, settings, request, 0)
    note = (f"The device reported {oom.device_free:,} bytes free and refused all the same: a memory limit of the "
            "process (per_process_memory_fraction), or another process took them meanwhile.")
    return (refused if refused.verdict not in SUCCEEDS else found), note


def _device(recording: Recording, device: DeviceRecording, settings: Settings, replayed: Replay,
            hypothetical: Sequence[Hypothetical]) -> dict[str, Any]:
    state, usable = device.state, replayed.usable
    blocks = [block for segment in state for block in segment.blocks]
    free = [block.size for block in blocks if block.state == INACTIVE]
    allocated = sum(block.size for block in blocks if block.state == ALLOCATED)
    pending = sum(block.size for block in blocks if block.state == PENDING)
    peaks = (Peaks(max(replayed.reserved), max(replayed.allocated), max(replayed.active)) if usable else None)
    attribution = Attribution(recording.stacks)
    actions = device.events.action
    changed = next((event for event in range(len(actions) - 1, -1, -1) if _changes(actions[event])), -1)
    late = len(replayed.ooms) - OOM_STATES
    verdicts = [_oom(recording, device, settings, replayed, oom, oom.event > changed and index >= late)
                | _asker(device, oom, attribution)
                for index, oom in enumerate(replayed.ooms)]
    last = replayed.ooms[-1] if replayed.ooms else None
    wanted = Wanted(last.requested, last.stream, last.pool) if last is not None and last.requested > 0 else None
    wasted = asdict(waste(state, settings).total)
    reserved = wasted.pop("reserved_bytes")
    published = definitions(state, settings, peaks, wanted)
    now = holders(state, recording.stacks, SHOWN, attribution)
    over_time = held(recording, device, replayed) if usable else None
    return {
        "device": device.device,
        "reserved_bytes": reserved,
        "allocated_bytes": allocated,
        "active_bytes": allocated + pending,
        "pending_free_bytes": pending,
        "free_bytes": sum(free),
        "largest_free_bytes": max(free, default=0),
        "segments": len(state),
        "expandable": any(segment.expandable for segment in state),
        "peak": None if peaks is None else {f"{name}_bytes": value for name, value in peaks._asdict().items()},
        "definitions": {found.name: found.value for found in published},
        "about_definitions": [{name: value for name, value in asdict(found).items() if name != "value"}
                              for found in published],
        "waste": {"requested_bytes": wasted.pop("allocated_bytes")} | wasted,
        "pins": [_pin(recording, pin) | {"label": _label(attribution, pin)} for pin in pins(state, settings)[:SHOWN]],
        "replay": {"events": len(device.events), "addresses": _score(replayed.addresses),
                   "device_allocs": _score(replayed.device_allocs), "device_frees": _score(replayed.device_frees),
                   "usable": usable, "reason": replayed.reason, "engine": replayed.engine},
        "ooms": verdicts,
        "requests": [_hypothetical(recording, state, settings, one) for one in hypothetical],
        "kinds": now.kinds,
        "holders": [_holder(holder) for holder in now.top],
        "other_holders": {"holders": now.rest, "bytes": now.rest_bytes},
        "held_at_peak": None if over_time is None else {
            "event": over_time.peak_event, "requested_bytes": over_time.peak.allocated_bytes,
            "kinds": over_time.peak.kinds, "holders": [_holder(holder) for holder in over_time.peak.top]},
        "grew": [] if over_time is None else [
            {"kind": line.place.kind, "label": line.place.label, "first_bytes": line.last[0],
             "last_bytes": line.last[-1]} for line in over_time.lines if line.grew],
        "forced": _forced(recording, device, replayed) if usable else [],
    }


def _changes(action: int) -> bool:
    """Whether an event changes the state."""
    return action != OOM and action <= SEGMENT_UNMAP


def _oom(recording: Recording, device: DeviceRecording, settings: Settings, replayed: Replay,
         oom: RecordedOom, quiet: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "event": oom.event, "time_us": oom.time_us if oom.time_us >= 0 else None, "requested_bytes": oom.requested,
        "device_free_bytes": oom.device_free, "stream": oom.stream, "verdict": None, "evidence": {}, "sentence": "",
        "note": "", "reproduced": oom.reproduced}
    if quiet:  # nothing changed since: the last state is that of the OOM
        oom = replace(oom, state=device.state)
    elif not replayed.usable:
        return told | {"note": f"The state at this moment is not known: {replayed.reason}."}
    if oom.state is None:
        return told | {"note": f"Only the first {OOM_STATES} out-of-memory events of a device are judged, and as many "
                                "of the last where nothing followed them."}
    found, note = judge_oom(oom, settings)
    return told | _judgement(recording, found) | {"note": note}


def _asker(device: DeviceRecording, oom: RecordedOom, attribution: Attribution) -> dict[str, str | None]:
    """Whose request failed (None without a stack), and for what; torch records the stack of an OOM like any other."""
    place = attribution.groups[attribution.group(device.events.stack[oom.event], oom.requested)]
    return {"kind": place.kind, "label": None if place.frame is None else place.label}


def _hypothetical(recording: Recording, state: State, settings: Settings, asked: Hypothetical) -> dict[str, Any]:
    found = judge(state, settings, asked.request, asked.device_free)
    return {"requested_bytes": asked.request.size, "stream": asked.request.stream, "pool": asked.request.pool,
            "device_free_bytes": asked.device_free} | _judgement(recording, found)


def _judgement(recording: Recording, found: Judgement) -> dict[str, Any]:
    evidence = evidence_of(found) | {"pins": [_pin(recording, pin) for pin in found.evidence.pins]}
    return {"verdict": str(found.verdict), "evidence": evidence, "sentence": found.sentence}


def _pin(recording: Recording, pin: Pin) -> dict[str, Any]:
    frames = recording.stacks.of(pin.block.stack)
    return {"address": pin.address, "size_bytes": pin.size_bytes, "held_back_bytes": pin.held_back_bytes,
            "blocks": pin.blocks, "block_address": pin.block.address, "block_bytes": pin.block.size,
            "frames": [f"{name} ({file}:{line})" for file, line, name in frames[:SHOWN]]}


def _label(attribution: Attribution, pin: Pin) -> str:
    return attribution.groups[attribution.group(pin.block.stack, pin.block.requested)].label


def _holder(holder: Holder) -> dict[str, Any]:
    return {"kind": holder.place.kind, "label": holder.place.label, "rule": holder.place.rule,
            "bytes": holder.size_bytes, "requested_bytes": holder.requested_bytes, "blocks": holder.blocks,
            "share": holder.share}


def _forced(recording: Recording, device: DeviceRecording, replayed: Replay) -> list[dict[str, Any]]:
    return [{"event": one.event, "requested_bytes": one.requested_bytes, "device_bytes": one.device_bytes,
             "kind": one.kind, "frame": frame_text(one.frame)} for one in forced(recording, device, replayed)[:SHOWN]]


def _score(score: Score) -> dict[str, int]:
    return {"checked": score.checked, "matched": score.matched}


def _usage(usage: Usage) -> dict[str, Any]:
    return {"device": usage.device, "samples": len(usage.time_us),
            "peak_allocated_bytes": _peak(usage.allocated), "peak_reserved_bytes": _peak(usage.reserved),
            "peak_by_category_bytes": {name: max(column, default=0) for name, column in usage.categories.items()}}


def _peak(column: array[int]) -> int | None:
    """The largest value; None where the file never told one."""
    most = max(column, default=UNKNOWN)
    return None if most == UNKNOWN else most
