"""A snapshot replayed by both engines and scored against what torch recorded and counted. Pure: no torch, no device."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvobs.allocator.explain import Explained, explain
from kvobs.allocator.readers import Unreadable, read
from kvobs.allocator.recording import ALLOC, OOM, TAKEN, DeviceRecording, Recording
from kvobs.allocator.replay import replay
from kvobs.allocator.replayed import RecordedOom, Replay
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, State
from kvobs.allocator.verdict import Verdict
from tests.gpu._checks import Check, agrees, check, ground_truth
from tests.gpu._sanitised import MOST_BYTES, packed

ENGINES = ("C++", "Python")
POOL_KEYS = ("pool_id", "segment_pool_id", "mempool_id")
FACTS = ("addresses", "device_allocs", "device_frees")
_IN_SUM = frozenset({Verdict.FRAGMENTED, Verdict.WRONG_POOL, Verdict.WAIT})


class Plain(pickle.Unpickler):
    """Numbers, texts and containers only."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Refuse.

        Raises:
            pickle.UnpicklingError: always.
        """
        raise pickle.UnpicklingError(f"A snapshot names {module}.{name}.")


def judged(path: Path, result: Mapping[str, Any], most_bytes: int = MOST_BYTES) -> tuple[dict[str, Any], bytes]:
    """Everything about one part's snapshot, and the trace that may be published (empty: it does not fit).

    ``result`` is what the part said: its statistics, and its out-of-memory errors.
    """
    with path.open("rb") as file:
        document = Plain(file).load()
    recording, refused = _read(path, document)
    told: dict[str, Any] = {"schema": recording.schema, "notes": list(recording.notes), "pools": pools(document),
                            "settings": document.get("allocator_settings"), "engines": {}, "scores": {},
                            "checks": [check("kvobs reads the file as torch wrote it", "", refused)]}
    replays = _replays(recording, told)
    explained = explain(recording, engine=next(iter(replays), "Python"))
    used = [device for device in recording.devices if device.state or len(device.events)]
    told["devices"] = len(used)
    if len(used) == 1:
        at = recording.devices.index(used[0])
        told["checks"] += conservation(used[0], explained.document["devices"][at])
        told["checks"] += counted(used[0], explained.replays[at], result.get("stats") or {})
        told["ooms"] = ooms(explained, at, result.get("failures") or [], recording.settings or Settings(),
                            told["checks"])
    data, events, whole = packed(document, most_bytes)
    told["published"] = {"bytes": len(data), "events": events, "complete": whole}
    return told, data


def _read(path: Path, document: Mapping[str, Any]) -> tuple[Recording, str]:
    """The recording; where kvobs refuses the file as torch wrote it, its document written anew, and the refusal."""
    try:
        return read(path), ""
    except Unreadable as error:
        again = path.with_suffix(".again")
        again.write_bytes(pickle.dumps(document, protocol=3))  # without frames
        return read(again), str(error).replace(str(path), path.name)


def _replays(recording: Recording, told: dict[str, Any]) -> dict[str, tuple[Replay, ...]]:
    """Each engine's replays of all devices; the scores, and whether they are the same, go into ``told``."""
    found: dict[str, tuple[Replay, ...]] = {}
    settings = recording.settings or Settings()
    for engine in ENGINES:
        try:
            found[engine] = tuple(replay(device, settings, engine) for device in recording.devices)
        except ValueError as error:
            told["engines"][engine] = str(error)
            continue
        told["engines"][engine] = "replayed"
        told["scores"][engine] = [score(one) for one in found[engine]]
    if len(found) == len(ENGINES):
        first, second = found.values()
        told["checks"].append(check("both engines replay alike", [alike(one) for one in first],
                                    [alike(one) for one in second]) | {"expected": "", "found": ""})
    return found


def score(one: Replay) -> dict[str, Any]:
    """The score of a replay."""
    return {fact: [getattr(one, fact).matched, getattr(one, fact).checked] for fact in FACTS} | {
        "events": one.events, "usable": one.usable, "reason": one.reason}


def alike(one: Replay) -> Any:
    """What two engines must agree on."""
    return ([getattr(one, fact) for fact in FACTS], one.usable, one.reason, one.reserved, one.allocated, one.active,
            [(oom.event, oom.requested, oom.reproduced, sums(oom.state)) for oom in one.ooms])


def sums(state: State | None) -> dict[str, int] | None:
    """Bytes of a state: reserved, allocated, pending and free."""
    if state is None:
        return None
    blocks = Counter[int]()
    for segment in state:
        for block in segment.blocks:
            blocks[block.state] += block.size
    return {"reserved": sum(segment.size for segment in state), "allocated": blocks[ALLOCATED],
            "pending": blocks[PENDING], "free": blocks[INACTIVE]}


def pools(document: Mapping[str, Any]) -> dict[str, Any]:
    """Which pools the segments and the events name, and under which key the events do."""
    events = [event for trace in document.get("device_traces", []) for event in trace]
    keys = Counter(key for event in events for key in POOL_KEYS if key in event)
    named = Counter(str(tuple(event[key])) for event in events for key in POOL_KEYS if key in event)
    return {"events": len(events), "events_naming_a_pool": dict(keys), "pools_of_events": dict(named.most_common(12)),
            "keys_of_events": sorted({key for event in events for key in event}),
            "pools_of_segments": dict(Counter(str(tuple(segment.get("segment_pool_id", ())))
                                              for segment in document["segments"]).most_common(12)),
            "expandable_segments": sum(bool(segment.get("is_expandable")) for segment in document["segments"]),
            "actions": dict(Counter(event.get("action") for event in events))}


def conservation(device: DeviceRecording, explained: Mapping[str, Any]) -> list[Check]:
    """Blocks fill their segments, and rounding, gaps and requests make up what is reserved."""
    waste = explained["waste"]
    parts = sum(value for name, value in waste.items() if name.endswith("_bytes"))
    found = sums(device.state) or {}
    return [
        check("segments that their blocks do not fill", 0,
              sum(sum(block.size for block in segment.blocks) != segment.size for segment in device.state)),
        check("reserved = allocated + pending + free", found["reserved"],
              found["allocated"] + found["pending"] + found["free"]),
        check("reserved = requested + waste", explained["reserved_bytes"], parts)]


def counted(device: DeviceRecording, replayed: Replay, stats: Mapping[str, Any]) -> list[Check]:
    """The snapshot and its replay against the allocator's own counters of the same moment."""
    if not stats:
        return []
    now, events = sums(device.state) or {}, device.events
    empty = not sum(segment.size for segment in replayed.initial)
    found = [check("reserved, as counted", stats.get("reserved_bytes.all.current"), now["reserved"]),
             check("allocated, as counted", stats.get("allocated_bytes.all.current"), now["allocated"]),
             check("active, as counted", stats.get("active_bytes.all.current"), now["allocated"] + now["pending"]),
             check("the history begins with nothing", True, empty)]
    if empty:
        taken = sum(action in TAKEN for action in events.action)
        found += [check("allocations, as counted", stats.get("allocation.all.allocated"),
                        events.action.tobytes().count(ALLOC)),
                  check("device allocations, as counted", stats.get("num_device_alloc"), taken),
                  check("errors, as counted", stats.get("num_ooms"), events.action.tobytes().count(OOM))]
    if empty and replayed.usable:
        found += [check(f"peak {name}, as counted", stats.get(f"{name}_bytes.all.peak"),
                        max(getattr(replayed, name), default=0)) for name in ("reserved", "allocated", "active")]
    return found


def ooms(explained: Explained, at: int, failures: list[dict[str, Any]], settings: Settings,
         checks: list[Check]) -> list[dict[str, Any]]:
    """Each recorded error: the verdict, what torch's message and its observer said, and whether they agree."""
    verdicts, replayed = explained.document["devices"][at]["ooms"], explained.replays[at].ooms
    expected = [(failure, seen) for failure in failures for seen in failure["failures"]]
    checks.append(check("every error is in the history", len(expected), len(verdicts)))
    checks += [check(f"ran out: {failure['label']}", True, failure["ran_out"]) for failure in failures]
    told = []
    for verdict, oom, (failure, seen) in zip(verdicts, replayed, expected, strict=False):
        told.append(_oom(verdict, oom, failure, seen, settings, checks))
    return told


def _oom(verdict: Mapping[str, Any], oom: RecordedOom, failure: Mapping[str, Any], seen: Mapping[str, Any],
         settings: Settings, checks: list[Check]) -> dict[str, Any]:
    label, state, said = failure["label"], sums(oom.state), failure["said"]
    truth = ground_truth(oom.requested, seen["allowed"], seen.get("reserved", 0), seen.get("allocated", 0),
                         seen["device_free"])
    found = verdict["verdict"]
    in_bytes = None if found is None else "CAPACITY" if found == Verdict.CAPACITY else "ENOUGH IN SUM"
    last = seen is failure["failures"][-1]
    if truth is not None:
        checks.append(check(f"{label}: the verdict is what the bytes say", truth, in_bytes))
    if failure["expected"] and last:
        checks.append(check(f"{label}: the verdict is what was arranged", failure["expected"], found))
    checks.append(check(f"{label}: the twin ran out too", True, oom.reproduced))
    if state is not None:
        checks += [check(f"{label}: reserved at the error", seen.get("reserved"), state["reserved"]),
                   check(f"{label}: allocated at the error", seen.get("allocated"), state["allocated"])]
    if last and state is not None and said:
        # CUDA's message tells the segment that was asked of the device, not the request.
        amounts = {"requested": (oom.requested, settings.segment_size(oom.requested)),
                   "allocated": (state["allocated"],), "unallocated": (state["reserved"] - state["allocated"],)}
        checks += [check(f"{label}: torch's message says the same of {name}", True,
                         any(agrees(said[name], size) for size in sizes))
                   for name, sizes in amounts.items() if name in said]
    return {"label": label, "verdict": found, "truth": truth, "sentence": verdict["sentence"],
            "note": verdict["note"], "requested_bytes": oom.requested, "device_free_bytes": oom.device_free,
            "observer": dict(seen), "said": said, "state": state, "reproduced": oom.reproduced,
            "decided_in_sum": found in _IN_SUM}


def rescored(path: Path) -> dict[str, Any]:
    """The score of the published trace by itself, which its commit is checked against."""
    try:
        recording = read(path)
    except Unreadable as error:
        return {"unreadable": str(error).replace(str(path), path.name)}
    return {"scores": [score(replay(device, recording.settings or Settings(), "Python"))
                       for device in recording.devices]}
