"""Memory maps: one snapshot of the allocator per poll, and only while somebody looks.

A snapshot takes the lock that every allocation waits for. So it is asked for by a view, never taken of many blocks,
and the less often the more time it takes (the thread's own: while it waits for the lock or the GIL, nobody waits for
it). The statistics are read before and after it; where they differ the engine went on meanwhile, and it is taken again,
three times at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from kvobs.allocator.memory_map import MOST_BLOCKS, NOBODY, SEVERAL, Held, HolderName, pack, with_holders
from kvobs.allocator.state import ALLOCATED, State
from kvobs.model import Availability, MemoryMap
from kvobs.sources._torch_handle import Torch
from kvobs.sources._torch_stats import NATIVE, blocks, read, touched

SUBJECT = "torch: memory map"
MOST_SHARE = 0.02  # of the time that snapshots may take
MOST_HOLDERS = 512  # beyond them the holders of a device's blocks are not named
MOST_PACKED = 256 * 1024
TRIES = 3
BY_STACK = "estimated from its stack"
HISTORY = "No memory map: the host records a memory history, whose stacks a snapshot would resolve."
CROWDED = f"No memory map: there are more than {MOST_BLOCKS:,} blocks, and a snapshot of them would hold up the engine."
LARGE = f"No memory map: it would take more than {MOST_PACKED // 1024} KiB."
UNLISTED = "No memory map: {why}."
FAILED = "No memory map: it could not be taken ({error})."
UNUSED = "No memory map: this process has not used an accelerator's memory yet."
Stats = Mapping[int, Mapping[str, Any]]


class Taken(msgspec.Struct, frozen=True):
    """What a poll gets: the maps, the statistics that belong to them, and whether and why not."""

    maps: tuple[MemoryMap, ...] = ()
    stats: Stats = {}
    facts: tuple[Availability, ...] = ()


NOTHING = Taken()


class Maps:
    """Takes the maps of a process. One thread calls."""

    def __init__(self) -> None:
        self._watched: Callable[[], bool] = lambda: False
        self._held: Callable[[], Iterable[Held]] = tuple
        self._share = MOST_SHARE
        self._next_ns = 0
        self._facts: tuple[Availability, ...] = ()

    def watch(self, watched: Callable[[], bool], held: Callable[[], Iterable[Held]], share: float) -> None:
        """Who says that somebody looks, who knows holders, and the share of time that all of kvobs may take."""
        self._watched, self._held, self._share = watched, held, min(share, MOST_SHARE)

    def take(self, torch: Torch, kind: str, now_ns: int) -> Taken:
        """The maps of all devices that this process uses, or nothing while nobody looks or it is too early."""
        if not self._watched():
            self._next_ns, self._facts = 0, ()
            return NOTHING
        if now_ns < self._next_ns:
            return Taken(facts=self._facts)
        try:
            taken = self._take(torch, kind, now_ns)
        except Exception as error:
            taken = _no(FAILED.format(error=type(error).__name__))
        self._facts = taken.facts
        return taken

    def _take(self, torch: Torch, kind: str, now_ns: int) -> Taken:
        count = torch.device_count()
        stats = {index: torch.stats(index) for index in range(count)}
        used = [index for index, found in stats.items() if touched(found)]
        unlisted = torch.unlisted(kind)
        why = (UNLISTED.format(why=unlisted) if unlisted else UNUSED if not used else
               CROWDED if sum(map(blocks, stats.values())) > MOST_BLOCKS else
               HISTORY if torch.resolves_stacks(kind) else "")
        if why:
            return _no(why)
        _states([])  # imports what reads them, which is no part of what a map costs
        began, tries, steady = time.thread_time_ns(), 0, False
        before = set(self._held())
        while not steady and tries < TRIES:
            stats = {index: torch.stats(index) for index in used}
            segments = torch.segments(kind)
            after = {index: torch.stats(index) for index in used}
            stats, steady, tries = after, after == stats, tries + 1
        held = before.intersection(self._held())  # who holds an address before and after held it meanwhile
        states, recorded = _states(segments), _recorded(segments)
        if sum(len(segment.blocks) for state in states.values() for segment in state) > MOST_BLOCKS:
            return self._wait(now_ns, began, _no(CROWDED))
        conf = torch.settings()[0]
        made: list[tuple[int, tuple[HolderName, ...], bytes]] = []
        for index in used:
            named, holders = with_holders(states.get(index, ()), held, f"{kind}:{index}", recorded)
            if len(holders) > MOST_HOLDERS:
                named, holders = _unnamed(named, holders)
            made.append((index, holders, pack(named)))
        if sum(len(packed) for _, _, packed in made) > MOST_PACKED:
            return self._wait(now_ns, began, _no(LARGE))
        taken_ns = time.thread_time_ns() - began
        every_ns = int(taken_ns / self._share)
        maps = []
        for index, holders, packed in made:
            found = read(f"{kind}:{index}", stats[index], backend=NATIVE)
            told = {name: int(value) for name, _, value in found.readings}
            maps.append(MemoryMap(
                now_ns, found.device, taken_ns, every_ns, steady, found.reserved_bytes or 0,
                found.allocated_bytes or 0, told.get("kvobs.allocator.active"), told.get("kvobs.allocator.requested"),
                told.get("kvobs.allocator.segments"), conf, holders, packed))
        return self._wait(now_ns, began, Taken(tuple(maps), stats, (Availability(SUBJECT, True, ""),)))

    def _wait(self, now_ns: int, began: int, taken: Taken) -> Taken:
        self._next_ns = now_ns + int((time.thread_time_ns() - began) / self._share)
        return taken


def _no(reason: str) -> Taken:
    return Taken(facts=(Availability(SUBJECT, False, reason),))


def _states(segments: list[Mapping[str, Any]]) -> dict[int, State]:
    """The states by device, without stacks.

    Raises:
        ValueError: a segment or block is not what torch lists.
    """
    from kvobs.allocator.readers._pools import Pools
    from kvobs.allocator.readers._segments import states

    return states([dict(segment) for segment in segments], None, Pools())


def _recorded(segments: list[Mapping[str, Any]]) -> dict[int, HolderName]:
    """What blocks are for, by address, as far as a recorded history has their stacks; estimated from frames."""
    from kvobs.allocator.kinds import Kinds

    kinds, found = Kinds(), dict[int, HolderName]()
    for segment in segments:
        for block in segment["blocks"]:
            if frames := block.get("frames"):
                told = tuple((str(one["filename"]), int(one["line"]), str(one["name"])) for one in frames)
                decided = kinds.decide(told, int(block.get("requested_size", 0))).kind
                if decided != "unknown":
                    found[block["address"]] = decided, BY_STACK, None
    return found


def _unnamed(state: State, holders: tuple[HolderName, ...]) -> tuple[State, tuple[HolderName, ...]]:
    """The same with as many holders as there may be: those that hold most keep their names."""
    sizes = [0] * len(holders)
    for segment in state:
        for block in segment.blocks:
            if block.state == ALLOCATED and block.stack != NOBODY:
                sizes[block.stack] += block.size
    kept = sorted(range(len(holders)), key=lambda number: -sizes[number])[:MOST_HOLDERS - 1]
    places = {number: place for place, number in enumerate(kept)}
    rest = len(kept)
    named = tuple(segment._replace(blocks=tuple(
        block._replace(stack=places.get(block.stack, rest)) if block.stack != NOBODY else block
        for block in segment.blocks)) for segment in state)
    return named, (*(holders[number] for number in kept), SEVERAL)
