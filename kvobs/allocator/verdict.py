"""What would happen to a request, and why.

The verdicts in the order in which they are decided:

============  ==========================================================================================================
SERVED        a free block of its stream and pool holds it
GROW          the device gives the memory: a new segment, or more pages of an expandable one
RECLAIM       it does after the allocator has waited for the device and returned what is wholly free
WAIT          that is not enough, but once the streams that still use pending blocks have caught up, it succeeds
WRONG_POOL    a free block is large enough, but serves another stream or pool
FRAGMENTED    what is free, everywhere and on the device, is enough in sum only
CAPACITY      it is not enough even in sum
============  ==========================================================================================================

With RECLAIM the request succeeds today, at the price of a device synchronisation. With WAIT PyTorch raises: its last
attempt asks the device only and does not look again at the blocks that its own wait has freed. The decision is one of
bytes and addresses, not of a ratio.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from kvobs.allocator.arena import Arena
from kvobs.allocator.forecast import Demand
from kvobs.allocator.pinning import Pin, pins
from kvobs.allocator.settings import MIB, SMALL_SIZE, Settings
from kvobs.allocator.state import DEFAULT_POOL, INACTIVE, PENDING, State
from kvobs.allocator.waste import Group

MOST_PINS = 10
ASSUMING = "the device gives nothing"


class Verdict(StrEnum):
    """In the order of decision."""

    SERVED = "SERVED"
    GROW = "GROW"
    RECLAIM = "RECLAIM"
    WAIT = "WAIT"
    WRONG_POOL = "WRONG_POOL"
    FRAGMENTED = "FRAGMENTED"
    CAPACITY = "CAPACITY"


SUCCEEDS = frozenset({Verdict.SERVED, Verdict.GROW, Verdict.RECLAIM})


class Request(NamedTuple):
    """An allocation of ``size`` bytes; pool 0 is the default one. Into a private pool it is made during a capture."""

    size: int
    stream: int = 0
    pool: int = DEFAULT_POOL


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict rests on. Free means inactive; the group is the stream, the pool and small or large.

    ``segment_bytes`` is what the device would be asked for. ``device_free_bytes`` and ``allowed_left_bytes`` are None
    where they are not known or not limited; without the first, GROW cannot be told, and ``assuming`` says so.
    ``releasable_bytes`` is what the release before the last attempt returns, after the wait that comes first.
    ``largest_after_wait_bytes`` is the group's largest free block once pending blocks are free and merged.
    ``sum_bytes`` adds what is free anywhere, what is pending, and what the device gives; ``shortfall_bytes`` is what
    it lacks. ``pins`` are the pinned segments that hold most back, at most ten, only for FRAGMENTED.
    """

    requested_bytes: int
    rounded_bytes: int
    stream: int
    pool: int
    kind: str
    largest_free_bytes: int
    group_free_bytes: int
    segment_bytes: int
    device_free_bytes: int | None
    allowed_left_bytes: int | None
    releasable_bytes: int
    pending_bytes: int
    largest_after_wait_bytes: int
    largest_elsewhere_bytes: int
    elsewhere: Group | None
    total_free_bytes: int
    sum_bytes: int
    shortfall_bytes: int
    assuming: str = ""
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, what it rests on, and both in one sentence."""

    verdict: Verdict
    evidence: Evidence
    sentence: str


def judge(state: State, settings: Settings, request: Request, device_free: int | None,
          allowed_left: int | None = None, freeable: frozenset[int] = frozenset()) -> Judgement:
    """What the allocator would do with a request in this state.

    ``device_free``: bytes the device has left, None if unknown. ``allowed_left``: bytes that a memory fraction still
    allows this process to reserve, None without one. ``freeable``: private pools that no graph uses any more.

    Raises:
        ValueError: the request is for less than one byte.
    """
    arena = Arena(state, settings, device_free or 0, allowed_left)
    return _judge(arena, request, device_free, freeable)


def for_demands(state: State, settings: Settings, demands: Sequence[Demand], device_free: int | None,
                allowed_left: int | None = None) -> tuple[int, Judgement]:
    """What becomes of demands on one device, one after the other: the index of the request that decides, counted
    through all of them, and its judgement.

    Each request is judged after the effects of those before it. The first that fails decides; if none does, the first
    of those that cost most (RECLAIM, else GROW, else SERVED).

    Raises:
        ValueError: there is no request, or one for less than one byte.
    """
    steps = [(Request(size, demand.stream, demand.pool), returned) for demand in demands
             for size, returned in zip(demand.sizes, itertools.chain(demand.returns, itertools.repeat(())),
                                       strict=False)]
    if not steps:
        raise ValueError("A demand needs at least one size.")
    rank = {verdict: number for number, verdict in enumerate(Verdict)}
    index, worst = 0, -1
    arena = Arena(state, settings, device_free or 0, allowed_left)
    for at, step in enumerate(steps):
        found = _serve(arena, *step)
        if found is None or rank[found] > worst:
            index, worst = at, rank[found] if found is not None else worst
        if found is None:
            break
    arena = Arena(state, settings, device_free or 0, allowed_left)  # the evidence costs most: only of what decides
    for step in steps[:index]:
        _serve(arena, *step)
    return index, _judge(arena, steps[index][0], arena.device_free if device_free is not None else None, frozenset())


def _serve(arena: Arena, request: Request, returned: tuple[int, ...]) -> Verdict | None:
    """Serve a request of a step and take what it gives back; None: out of memory."""
    found = _attempt(arena, *_asked(arena, request), frozenset())
    for address in returned if found is not None else ():
        arena.free(address)
    return found


def _asked(arena: Arena, request: Request) -> tuple[Group, int]:
    """Where a request is served, and its rounded size."""
    if request.size < 1:
        raise ValueError(f"A request is for at least one byte, not {request.size}.")
    rounded = arena.settings.round_size(request.size)
    return Group(request.stream, request.pool, rounded <= SMALL_SIZE), rounded


def _judge(arena: Arena, request: Request, device_free: int | None, freeable: frozenset[int]) -> Judgement:
    """Judge a request, and leave the arena as it is afterwards."""
    group, rounded = _asked(arena, request)
    before, waited = arena.copy(), arena.copy()
    waited.complete()
    found = _attempt(arena, group, rounded, freeable)
    evidence = _evidence(before, waited, request, rounded, group, device_free, freeable)
    if found is None:
        if evidence.pending_bytes and _attempt(waited, group, rounded, freeable):
            found = Verdict.WAIT
        elif evidence.largest_elsewhere_bytes >= rounded:
            found = Verdict.WRONG_POOL
        else:
            found = Verdict.CAPACITY if evidence.shortfall_bytes else Verdict.FRAGMENTED
    if found is Verdict.FRAGMENTED:
        evidence = replace(evidence, pins=tuple(pins(before.state(), arena.settings)[:MOST_PINS]))
    return Judgement(found, evidence, sentence(found, evidence))


def _attempt(arena: Arena, group: Group, rounded: int, freeable: frozenset[int]) -> Verdict | None:
    """Do with the arena what the allocator does; None: out of memory."""
    found, spot = Verdict.SERVED, arena.find(group, rounded)
    if spot is None:
        found, spot = Verdict.GROW, arena.take(group, rounded)
    if spot is None:
        found = Verdict.RECLAIM
        if arena.release_oversize(group, rounded):
            spot = arena.take(group, rounded)
        if spot is None and group.pool == DEFAULT_POOL:  # a capture must not wait for the device
            arena.complete()
            arena.release(freeable)
            spot = arena.take(group, rounded)
    if spot is None:
        return None
    arena.hand_out(spot, rounded)
    return found


def _evidence(before: Arena, waited: Arena, request: Request, rounded: int, group: Group, device_free: int | None,
              freeable: frozenset[int]) -> Evidence:
    largest_after_wait = max((block.size for chain in waited.chains.get(group, ()) for block in chain.blocks
                              if block.state == INACTIVE), default=0)
    own_largest = own_free = free = pending = largest_elsewhere = 0
    elsewhere: Group | None = None
    for other, chains in before.chains.items():
        largest = 0
        for chain in chains:
            for block in chain.blocks:
                if block.state == INACTIVE:
                    free += block.size
                    largest = max(largest, block.size)
                    own_free += block.size if other == group else 0
                elif block.state == PENDING:
                    pending += block.size
        if other == group:
            own_largest = largest
        elif largest > largest_elsewhere:
            largest_elsewhere, elsewhere = largest, other
    given = before.device_free if before.allowed_left is None else min(before.device_free, before.allowed_left)
    total = free + pending + max(given, 0)
    return Evidence(
        requested_bytes=request.size, rounded_bytes=rounded, stream=request.stream, pool=request.pool,
        kind="small" if group.small else "large", largest_free_bytes=own_largest, group_free_bytes=own_free,
        segment_bytes=before.missing(group, rounded), device_free_bytes=device_free,
        allowed_left_bytes=before.allowed_left, releasable_bytes=waited.copy().release(freeable),
        pending_bytes=pending, largest_after_wait_bytes=largest_after_wait, largest_elsewhere_bytes=largest_elsewhere,
        elsewhere=elsewhere, total_free_bytes=free, sum_bytes=total, shortfall_bytes=max(rounded - total, 0),
        assuming=ASSUMING if device_free is None else "")


def sentence(verdict: Verdict, found: Evidence) -> str:
    """The verdict in words."""
    what = f"{_size(found.rounded_bytes)} on stream {found.stream}" + (
        f" in private pool {found.pool}" if found.pool else "")
    has, left = found.device_free_bytes, found.allowed_left_bytes
    if has is None:
        device = "the device gives nothing (assumed)"
    else:
        device = f"the device has {_size(has)}"
        if left is not None and left < has:
            device += f", of which the process may reserve {_size(max(left, 0))}"
    match verdict:
        case Verdict.SERVED:
            return f"A free block serves {what}; the largest one there is {_size(found.largest_free_bytes)}."
        case Verdict.GROW:
            return f"The device gives {_size(found.segment_bytes)} for {what}; {device}."
        case Verdict.RECLAIM:
            return (f"{what} need {_size(found.segment_bytes)} of the device, which gives them once up to "
                    f"{_size(found.releasable_bytes)} that are wholly free went back to it, after waiting for it.")
        case Verdict.WAIT:
            return (f"{what} fit once {_size(found.pending_bytes)} of pending blocks are free: the largest block would "
                    f"then be {_size(found.largest_after_wait_bytes)}; {device}.")
        case Verdict.WRONG_POOL:
            return (f"{_size(found.largest_elsewhere_bytes)} are free in one block of {_place(found.elsewhere)}, which "
                    f"does not serve {what}; its own largest free block is {_size(found.largest_free_bytes)}.")
        case Verdict.FRAGMENTED:
            return (f"{_size(found.sum_bytes)} are free in sum, but no way leads to {what}: its largest free block has "
                    f"{_size(found.largest_free_bytes)}, {_size(found.releasable_bytes)} can be returned, {device}.")
        case Verdict.CAPACITY:
            return (f"{what} do not fit: all that is free is {_size(found.sum_bytes)}, which is "
                    f"{_size(found.shortfall_bytes)} too little, wherever it lies; {device}.")


def _place(group: Group | None) -> str:
    if group is None:
        return "no pool"
    return (f"the {'small' if group.small else 'large'} blocks of stream {group.stream} in "
            + (f"private pool {group.pool}" if group.pool else "the default pool"))


def _size(count: int) -> str:
    return f"{count / MIB:,.2f} MiB" if count >= MIB else f"{count:,} B"
