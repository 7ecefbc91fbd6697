"""The same demand under other settings, on another device, with a KV cache that grows otherwise: all *modelled*."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import mul

from kvobs.allocator import program as ops
from kvobs.allocator.calls import PAGE, Estimate, estimates
from kvobs.allocator.capacity import Capacity, capacity_of, reserved_before, reserved_bytes
from kvobs.allocator.chains import IsKV, Regrown, regrow
from kvobs.allocator.core import run
from kvobs.allocator.demand import RecordedDemand, demand_of
from kvobs.allocator.growth import PAGED, STATIC, Growth
from kvobs.allocator.kinds import kind_of
from kvobs.allocator.program import Outcome, Program
from kvobs.allocator.recording import ALLOC, GIVEN_BACK, OOM, TAKEN, UNKNOWN, Calls, DeviceRecording, Recording
from kvobs.allocator.replayed import Replay
from kvobs.allocator.settings import Settings
from kvobs.allocator.verdict import SUCCEEDS as SERVED
from kvobs.allocator.verdict import Request, judge

MOST_JUDGED = 8  # failed requests whose verdict is worked out: each costs a run up to it
SUCCEEDS, NOT_ASKED, FAILS = "succeeds", "not asked", "OOM"
AS_RECORDED = "as recorded"
CANNOT_KNOW = (
    "The program is taken to ask for the same memory in the same order; one that fails, waits or measures free memory "
    "would do something else.",
    "The addresses that the device gives are invented; where free blocks of equal size compete, they decide.",
    "What the device can give is taken to be the same all the time: other processes, contexts, libraries' own memory "
    "and kernels' stacks are not part of the model.",
    "How long streams keep freed blocks is taken from the recording, and would change with the timing of the program.",
    "Libraries choose workspaces and algorithms by the memory they find; that choice is not modelled.")


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ran out of memory. ``event``: that it stands for, UNKNOWN before the first. ``verdict``: why, for
    the first few of a run; None for others, and where only addresses lacked.
    """

    event: int
    requested_bytes: int
    stream: int
    pool: int
    verdict: str | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run of the model gave.

    ``settings``: a value of PYTORCH_ALLOC_CONF, empty for the defaults. ``capacity_bytes``: what the device can give,
    None without limit. ``utilisation_at_peaks``: peak allocated over peak reserved. ``utilisation_over_time``:
    allocated over reserved, both summed over time (over operations where the recording has no times; None where it has
    no history). ``device_allocs`` and ``device_frees`` are calls, also those for what was there before the first event;
    ``mapped_bytes`` and ``unmapped_bytes`` are what they moved with expandable segments (at least: a request that
    makes room first counts by its net effect). ``call_time``: their time, *estimated* unless the recording measured
    such calls.
    """

    settings: str
    growth: str
    capacity_bytes: int | None
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    utilisation_at_peaks: float | None
    utilisation_over_time: float | None
    device_allocs: int
    device_frees: int
    mapped_bytes: int
    unmapped_bytes: int
    call_time: tuple[Estimate, ...]
    retries: int
    ooms: int
    failures: tuple[Failure, ...]
    engine: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """What really happened; ``peak_allocated_bytes`` is None without a replay. Counts are those of the history alone,
    None without one. ``difference_bytes``: the modelled peak of reserved bytes under the recorded settings less the
    recorded one, which is how far the model is off.
    """

    peak_reserved_bytes: int
    peak_allocated_bytes: int | None
    device_allocs: int | None
    device_frees: int | None
    ooms: int | None
    difference_bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """A request that fails in one of two runs: a verdict where it does, or "OOM", "succeeds", "not asked". ``event``:
    UNKNOWN for the first of those before the history.
    """

    event: int
    requested_bytes: int
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two modelled runs of a device's demand and what was recorded. ``capacity_reason`` says where the capacity before
    the change comes from, ``unknown`` what the model cannot know, ``notes`` what has to be said about this comparison;
    whole sentences.
    """

    device: int
    capacity_reason: str
    before: Figures
    after: Figures
    recorded: Recorded
    verdicts_changed: tuple[Change, ...]
    kv: Regrown | None
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a run needs. ``settings`` and ``capacity`` are those of the recording; ``limit``, in bytes, is the
    capacity that the changes are tried with, None without limit.
    """

    device: DeviceRecording
    demand: RecordedDemand
    settings: Settings
    capacity: Capacity
    limit: int | None
    calls: Calls
    notes: tuple[str, ...]


def case_of(recording: Recording, device: DeviceRecording, capacity: int | None = None) -> Case:
    """A device's demand, its settings and what it had to give; ``capacity`` (bytes) is another to be tried."""
    notes = []
    settings = recording.settings
    if settings is None:
        settings = Settings()
        notes.append("The file does not tell the allocator's settings; the defaults are taken.")
    demand = demand_of(device, settings, recording.stacks)
    found = capacity_of(device, settings, demand.refused)
    return Case(device, demand, settings, found, found.bytes if capacity is None else capacity, recording.calls,
                (*notes, *demand.notes))


def changed(settings: Settings, changes: Mapping[str, str]) -> Settings:
    """The settings with options of PYTORCH_ALLOC_CONF changed; ``true`` and ``false`` are accepted in any case.

    Raises:
        ValueError: no such option, a value that PyTorch refuses, or another allocator.
    """
    for key, value in changes.items():
        if key == "backend" and value != "native":
            raise ValueError(f"backend:{value} is another allocator, which is not modelled")
        settings = settings.with_option(key, value.title() if value.lower() in {"true", "false"} else value)
    return settings


def what_if(recording: Recording, device: DeviceRecording, changes: Mapping[str, str], capacity: int | None = None,
            growth: Growth | None = None, *, replay: Replay | None = None, engine: str = "auto",
            is_kv: IsKV | None = None) -> Comparison:
    """Run a device's demand twice: as it was recorded, and with something changed.

    Raises:
        ValueError: a change that is not possible, or a KV cache that cannot be made to grow otherwise.
    """
    return compare(case_of(recording, device, capacity), recording, changes, growth, replay=replay, engine=engine,
                   is_kv=is_kv)


def compare(case: Case, recording: Recording, changes: Mapping[str, str], growth: Growth | None = None, *,
            settings: Settings | None = None, replay: Replay | None = None, engine: str = "auto",
            is_kv: IsKV | None = None) -> Comparison:
    """As ``what_if``, for a case that is at hand; ``settings`` are those to compare with if not those changed."""
    settings = settings or changed(case.settings, changes)
    demand, kv = asked(case, recording, growth, is_kv)
    before = figures(case, case.demand, case.settings, case.capacity.bytes, AS_RECORDED, engine)
    after = before if (settings, case.limit, kv) == (case.settings, case.capacity.bytes, None) else figures(
        case, demand, settings, case.limit, AS_RECORDED if growth is None else str(growth), engine)
    return Comparison(
        case.device.device, case.capacity.reason, before, after,
        _recorded(case.device, before, replay), _changes(before, after, demand), kv, CANNOT_KNOW,
        (*case.notes, *_notes(case, settings, changes, growth, kv), *_at_the_start(after)))


def asked(case: Case, recording: Recording, growth: Growth | None,
          is_kv: IsKV | None = None) -> tuple[RecordedDemand, Regrown | None]:
    """The demand, with the KV cache growing in another way if one is given.

    Raises:
        NotDerivable: no KV cache of the recording grows.
    """
    if growth is None:
        return case.demand, None
    return regrow(case.demand, growth, recording.stacks, is_kv or (lambda frames: kind_of(frames) == "kv"))


def figures(case: Case, demand: RecordedDemand, settings: Settings, capacity: int | None, growth: str, engine: str,
            judged: int = MOST_JUDGED) -> Figures:
    """Run a demand under settings on a device of ``capacity`` bytes (None: without limit) and sum up.

    ``judged``: for how many of the requests that fail a verdict is worked out.
    """
    outcome = run(demand.program, settings, capacity, engine)
    stats = outcome.stats
    mapped, unmapped = _moved(outcome) if settings.expandable_segments else (0, 0)
    allocs, frees = (0, 0) if settings.expandable_segments else (stats.device_allocs, stats.device_frees)
    return Figures(
        settings=settings.conf(), growth=growth, capacity_bytes=capacity,
        peak_reserved_bytes=stats.peak_reserved, peak_allocated_bytes=stats.peak_allocated,
        utilisation_at_peaks=stats.peak_allocated / stats.peak_reserved if stats.peak_reserved else None,
        utilisation_over_time=_over_time(outcome, demand.lasted_us(case.device.events)) if demand.history else None,
        device_allocs=stats.device_allocs, device_frees=stats.device_frees,
        mapped_bytes=mapped, unmapped_bytes=unmapped,
        call_time=estimates(case.calls, allocs, frees, mapped // PAGE, unmapped // PAGE),
        retries=stats.retries, ooms=len(outcome.ooms),
        failures=tuple(_failure(demand, settings, capacity, op, rank < judged, engine)
                       for rank, op in enumerate(outcome.ooms)),
        engine=outcome.engine)


def _failure(demand: RecordedDemand, settings: Settings, capacity: int | None, op: int, judged: bool,
             engine: str) -> Failure:
    program = demand.program
    size, stream, pool = program.size[op], program.stream[op], program.pool[op]
    found = Failure(demand.event[op], size, stream, pool)
    if not judged or capacity is None or size < 1:
        return found
    until = Program(program.op[:op], program.handle[:op], program.size[:op], program.stream[:op], program.pool[:op],
                    program.settings)
    outcome = run(until, settings, capacity, engine)
    reserved = outcome.stats.reserved
    allowed = None if settings.memory_fraction is None else int(settings.memory_fraction * capacity) - reserved
    judgement = judge(outcome.state, settings, Request(size, stream, pool), capacity - reserved, allowed,
                      _released(until))
    return found if judgement.verdict in SERVED else replace(found, verdict=judgement.verdict.value)


def _released(program: Program) -> frozenset[int]:
    """The private pools that no graph uses at the end of a program."""
    found = set()
    for op, pool in zip(program.op, program.pool, strict=True):
        if op == ops.RELEASE_POOL:
            found.add(pool)
        elif op == ops.ALLOC:
            found.discard(pool)
    return frozenset(found)


def _moved(outcome: Outcome) -> tuple[int, int]:
    """Bytes by which reserved grew and shrank, operation by operation."""
    steps = [after - before for before, after in pairwise((0, *outcome.reserved))]
    return sum(step for step in steps if step > 0), -sum(step for step in steps if step < 0)


def _over_time(outcome: Outcome, weights: array[int]) -> float | None:
    reserved = sum(map(mul, outcome.reserved, weights))
    return sum(map(mul, outcome.allocated, weights)) / reserved if reserved else None


def _recorded(device: DeviceRecording, before: Figures, replay: Replay | None) -> Recorded:
    history = device.events
    peak = max(reserved_before(history, reserved_bytes(device)))
    counts = Counter(history.action)
    told = any(counts[kind] for kind in (ALLOC, OOM, *TAKEN, *GIVEN_BACK))
    return Recorded(
        peak, max(replay.allocated, default=None) if replay is not None and replay.usable else None,
        sum(counts[kind] for kind in TAKEN) if told else None,
        sum(counts[kind] for kind in GIVEN_BACK) if told else None, counts[OOM] if told else None,
        before.peak_reserved_bytes - peak)


def _changes(before: Figures, after: Figures, demand: RecordedDemand) -> tuple[Change, ...]:
    """Requests that fail in one run only. Several of one event (a KV cache in blocks, or all that was there before the
    first event) count as one.
    """
    first, second = _by_event(before), _by_event(after)
    events = {event for event, op in zip(demand.event, demand.program.op, strict=True) if op == ops.ALLOC}
    found = []
    for event in sorted(first.keys() | second.keys()):
        old, new = first.get(event), second.get(event)
        if (old is None) != (new is None):
            some = old or new
            assert some is not None
            found.append(Change(event, some.requested_bytes, _end(old, True), _end(new, event in events)))
    return tuple(found)


def _by_event(run: Figures) -> dict[int, Failure]:
    found: dict[int, Failure] = {}
    for failure in run.failures:
        found.setdefault(failure.event, failure)
    return found


def _end(failure: Failure | None, asked: bool) -> str:
    if failure is None:
        return SUCCEEDS if asked else NOT_ASKED
    return failure.verdict or FAILS


def _at_the_start(run: Figures) -> list[str]:
    failed = sum(failure.event == UNKNOWN for failure in run.failures)
    return [f"{failed} requests for what was there before the first event fail; only the first of them is listed."
            ] if failed > 1 else []


def _notes(case: Case, settings: Settings, changes: Mapping[str, str], growth: Growth | None,
           kv: Regrown | None) -> list[str]:
    notes = []
    if settings.garbage_collection_threshold and settings.memory_fraction is None:
        notes.append("garbage_collection_threshold acts only where per_process_memory_fraction is set too, and it is "
                     "not: it changes nothing.")
    if settings.memory_fraction is not None and case.limit is None:
        notes.append("per_process_memory_fraction is a part of the device's memory, which is not known: without "
                     "--capacity it changes nothing.")
    for key, value in changes.items():
        if changed(case.settings, {key: value}) == case.settings:
            notes.append(f"{key}:{value} changes nothing: it was in force already, or has no influence on where device "
                         "memory goes.")
    if growth is not None and kv is not None:
        notes.append(f"A token is taken to be the smallest growth of a KV tensor ({kv.chains} tensors grow).")
        if kv.left:
            notes.append(f"{kv.left} KV allocations do not grow by whole tokens and stay as they were recorded.")
        if growth.kind == STATIC:
            notes.append("The static cache is given the length that was reached, which a program would have to know.")
        if growth.kind == PAGED:
            notes.append("Each block of the paged cache is an allocation of its own; engines cut blocks from one.")
    return notes
