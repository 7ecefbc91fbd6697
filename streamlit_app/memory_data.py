"""What the page Memory map shows: the newest map of each device, its sums beside the metrics of the same poll.

Only while a view looks does the observed process take maps, so reading here also says that somebody looks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvobs.allocator.definitions import Definition, definitions
from kvobs.allocator.memory_map import SEVERAL, HolderName, Sums, sums, unpack
from kvobs.allocator.pinning import Pin, pins
from kvobs.allocator.settings import known
from kvobs.allocator.state import ALLOCATED, PENDING, Block, State
from kvobs.model import Availability, MemoryMap
from kvobs.store import Process, Series, Stored, StoreReader, series, touch
from streamlit_app import data, units

MAP, SOURCE = "torch: memory map", "torch"
DEVICES = 8  # drawn at once
FREE, PENDING_FREE, OTHER, SEVERAL_HOLDERS = "free", "pending free", "other", "several holders"
MORE_CACHES = "KV of more caches"
CACHES = 6  # with a colour of their own
UNASKED = ("The view cannot write into {place}, so that it cannot ask the process for a memory map; open it as a user "
           "who can.")
WAITING = "Asked for; a process that runs and uses an accelerator answers within two seconds."
ENDED = "The process has ended, and nobody looked at its memory map while it ran."
METRICS = ("kvobs.allocator.usage", "kvobs.allocator.active", "kvobs.allocator.requested", "kvobs.allocator.segments")
POLL_NS = 2 * data.SECOND_NS  # within which the points of the same poll were written


@dataclass(frozen=True)
class Check:
    """A sum of the map beside the metric of the same poll; ``metric`` is None where there is none."""

    what: str
    unit: str
    mapped: int
    metric: int | None
    source: str

    @property
    def equal(self) -> bool | None:
        """Whether they are; None where there is nothing to compare."""
        return None if self.metric is None else self.metric == self.mapped


@dataclass(frozen=True)
class DeviceMap:
    """The map of one device of one process, worked out. Ages in seconds; ``metric_age_s`` is of what it is checked by.

    ``names`` says of each holder what it is called here.
    """

    process: str
    alive: bool
    found: MemoryMap
    age_s: float
    metric_age_s: float | None
    state: State
    sums: Sums
    names: tuple[str, ...]
    pins: dict[int, Pin]
    checks: list[Check]
    definitions: tuple[Definition, ...]

    @property
    def stale(self) -> bool:
        """Whether it is older than the process's own pause between maps explains."""
        return self.age_s > data.STALE_S + self.found.every_ns / data.SECOND_NS


@dataclass(frozen=True)
class Maps:
    """The page at one moment: the maps, those of running processes first, and in whole sentences what stands in the
    way of newer ones.
    """

    devices: list[DeviceMap]
    more: int
    reasons: list[str]
    processes: dict[str, Process]


def maps(path: str, chosen: str | None, now_ns: int | None = None) -> Maps:
    """Ask for maps, and read those that are there.

    Raises:
        NothingYet, StoreError: as ``data.open_store``.
    """
    reader = data.open_store(path, chosen)
    asked = touch(Path(path))
    now = time.time_ns() if now_ns is None else now_ns
    processes = {found.process: found for found in reader.processes()}
    running = [found for found in processes.values() if found.alive]
    newest = reader.maps()
    if running:  # what an ended process held is held no more
        newest = [one for one in newest if processes[one.process].alive]
    else:
        newest = _of_the_last(newest)
    facts = [fact for fact in reader.availability() if not running or processes[fact.process].alive]
    shown, damaged = list[DeviceMap](), list[str]()
    for one in newest[:DEVICES]:
        try:
            shown.append(_device(reader, one, processes[one.process].alive, now))
        except ValueError as error:
            damaged.append(f"The map of {one.record.device} cannot be read: {error}")
    reasons = damaged + _reasons(facts, shown, asked, bool(running), path)
    return Maps(shown, max(len(newest) - DEVICES, 0), reasons, processes)


def _of_the_last(newest: list[Stored[MemoryMap]]) -> list[Stored[MemoryMap]]:
    last = max(newest, key=lambda one: one.wall_ns, default=None)
    return [one for one in newest if last is not None and one.process == last.process]


def _reasons(facts: Sequence[Stored[Availability]], shown: Sequence[DeviceMap], asked: bool, running: bool,
             path: str) -> list[str]:
    """Why there is no map, or no newer one."""
    if not running:
        return [] if shown else [ENDED]
    if not asked:
        return [UNASKED.format(place=path)]
    if shown and not any(one.stale for one in shown):
        return []
    of_map = {fact.record.reason for fact in facts if fact.record.subject == MAP and not fact.record.available}
    of_source = {fact.record.reason for fact in facts if fact.record.subject == SOURCE and not fact.record.available}
    return sorted(of_map or of_source) or [WAITING]


def _device(reader: StoreReader, stored: Stored[MemoryMap], alive: bool, now_ns: int) -> DeviceMap:
    found = stored.record
    state, settings = unpack(found.packed), known(found.settings)
    total = sums(state)
    polled = series(reader, METRICS, stored.wall_ns, stored.wall_ns + POLL_NS, processes=[stored.process])
    when = min((one.wall_ns[0] for one in polled), default=None)
    return DeviceMap(
        stored.process, alive, found, max(now_ns - stored.wall_ns, 0) / data.SECOND_NS,
        None if when is None else max(now_ns - when, 0) / data.SECOND_NS, state, total, _names(state, found.holders),
        {pin.address: pin for pin in pins(state, settings)}, _checks(total, state, polled, found.device, when),
        definitions(state, settings))


def _checks(total: Sums, state: State, polled: Sequence[Series], device: str, when: int | None) -> list[Check]:
    """The sums that have a metric. Mapped ranges of expandable segments are not what torch counts as segments."""
    def metric(name: str, **attributes: str) -> int | None:
        found = [one.values[0] for one in data.of(polled, name, device=device, **attributes) if one.wall_ns[0] == when]
        return int(found[0]) if found else None

    usage = "kvobs.allocator.usage"
    allocated, unused = metric(usage, state="allocated"), metric(usage, state="unused")
    reserved = None if allocated is None or unused is None else allocated + unused
    checks = [Check("reserved", "B", total.reserved, reserved, usage),
              Check("allocated", "B", total.allocated, allocated, usage),
              Check("active (allocated and pending)", "B", total.active, metric("kvobs.allocator.active"),
                    "kvobs.allocator.active"),
              Check("requested (of active)", "B", total.requested, metric("kvobs.allocator.requested"),
                    "kvobs.allocator.requested")]
    if not any(segment.expandable for segment in state):
        checks.append(Check("segments", "", total.segments, metric("kvobs.allocator.segments"),
                            "kvobs.allocator.segments"))
    return checks


def _names(state: State, holders: Sequence[HolderName]) -> tuple[str, ...]:
    """What each holder is called: of the caches those that hold most by their session, the others together."""
    sizes = [0] * len(holders)
    for segment in state:
        for block in segment.blocks:
            if block.state == ALLOCATED and 0 <= block.stack < len(holders):
                sizes[block.stack] += block.size
    caches = sorted((number for number, (kind, _, _) in enumerate(holders) if kind == "kv"),
                    key=lambda number: -sizes[number])[:CACHES]
    return tuple(_name(holder, number in caches) for number, holder in enumerate(holders))


def _name(holder: HolderName, own: bool) -> str:
    kind, name, cache = holder
    if kind == "kv":
        return (f"KV {name[:24]} #{cache}" if name else f"KV cache #{cache}") if own else MORE_CACHES
    return SEVERAL_HOLDERS if holder == SEVERAL else kind


def category(block: Block, names: Sequence[str]) -> str:
    """What a block is drawn as; who holds an allocated one is said only where it is known."""
    if block.state == ALLOCATED:
        return names[block.stack] if 0 <= block.stack < len(names) else OTHER
    return PENDING_FREE if block.state == PENDING else FREE


def holder_text(block: Block, holders: Sequence[HolderName]) -> str:
    """The holder of a block in full."""
    if block.state != ALLOCATED or not 0 <= block.stack < len(holders):
        return "not known" if block.state == ALLOCATED else "nobody"
    kind, name, cache = holders[block.stack]
    words = {"kv": "KV of " + (f"session {name}" if name else "a cache"), "weights": f"weights of {name}"}
    return words.get(kind, f"{kind} {name}".strip()) + (f", cache #{cache}" if cache is not None else "")


def check_rows(device: DeviceMap) -> list[dict[str, str]]:
    """The checks as a table."""
    words = {True: "yes", False: "no", None: "no metric"}
    return [{"what": check.what, "map": _figure(check.mapped, check.unit),
             "metric": "absent" if check.metric is None else _figure(check.metric, check.unit),
             "equal": words[check.equal], "of": check.source} for check in device.checks]


def _figure(value: int, unit: str) -> str:
    return f"{units.size(value)} ({value:,} B)" if unit else f"{value:,}"


def pin_rows(device: DeviceMap, most: int = 10) -> list[dict[str, str]]:
    """The pinned segments that hold most back."""
    names = {block.address: holder_text(block, device.found.holders)
             for segment in device.state for block in segment.blocks}
    return [{"segment": f"{pin.address:#x}", "held back": units.size(pin.held_back_bytes),
             "of": units.size(pin.size_bytes), "by blocks": units.count(pin.blocks),
             "smallest of them": units.size(pin.block.size), "held by": units.plain(names[pin.block.address])}
            for pin in list(device.pins.values())[:most]]
