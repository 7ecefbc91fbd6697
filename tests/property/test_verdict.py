"""Verdicts against the twin: random programs bring it into a state, a verdict is told of it, then the twin tries."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from kvobs.allocator.device import SimulatedDevice
from kvobs.allocator.forecast import Demand
from kvobs.allocator.pinning import pins
from kvobs.allocator.settings import MIB, SMALL_SIZE, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, State
from kvobs.allocator.twin import Allocator, OutOfMemory
from kvobs.allocator.verdict import Evidence, Judgement, Request, Verdict, for_demands, judge
from kvobs.allocator.waste import Group, waste

ADDRESSES = 1 << 42  # what the twin believes the device to have: reservations of addresses never run out


class Limited(SimulatedDevice):
    """A device that has less than it says, and counts what it is asked for."""

    def __init__(self, has: int) -> None:
        super().__init__(ADDRESSES)
        self.has, self.given, self.refused = has, 0, 0

    def _take(self, size: int) -> bool:
        if self.used + size > self.has:
            self.refused += 1
            return False
        self.given += 1
        return super()._take(size)


@dataclass
class Made:
    """An allocator after a program, and its addresses in use."""

    twin: Allocator
    device: Limited
    live: list[int] = field(default_factory=list)


SIZES = st.one_of(st.integers(1, MIB), st.integers(MIB, 10 * MIB), st.integers(10 * MIB, 60 * MIB),
                  st.sampled_from([MIB, 2 * MIB, 20 * MIB, 21 * MIB, 32 * MIB, 70 * MIB]))
STREAMS, POOLS = st.sampled_from([0, 0, 0, 7]), st.sampled_from([0, 0, 0, 0, 0, 0, 0, 1])
ALLOCS = st.tuples(st.just("alloc"), SIZES, STREAMS, POOLS)
FREES = st.tuples(st.just("free"), st.integers(0, 99), st.booleans())
OPERATIONS = st.one_of(
    ALLOCS, ALLOCS, ALLOCS, FREES, FREES, FREES,
    st.one_of(st.tuples(st.just("advance"), st.sampled_from([0, 7, 9])), st.tuples(st.just("empty")),
              st.tuples(st.just("expandable"), st.booleans())))
PROGRAMS = st.builds(lambda start, more: start + more, st.lists(ALLOCS, min_size=4, max_size=12),
                     st.lists(OPERATIONS, min_size=6, max_size=40))
SETTINGS = st.one_of(
    st.builds(Settings, expandable_segments=st.booleans()),
    st.builds(Settings, max_split_size=st.sampled_from([21, 24, 32]).map(lambda size: size * MIB)),
    st.builds(Settings, roundup_power2_divisions=st.sampled_from([(1,) * 16, (4,) * 16, (8,) * 16])))


def made(program: list[tuple[object, ...]], config: Settings, has: int) -> Made:
    """The allocator after the program, everything told to it that streams have done."""
    device = Limited(has)
    found = Made(Allocator(config, device), device)
    twin = found.twin
    for operation, *values in program:
        if operation == "alloc":
            size, stream, pool = values
            try:
                found.live.append(twin.alloc(size, stream, pool))  # type: ignore[arg-type]
            except OutOfMemory:
                continue
        elif operation == "free" and found.live:
            index, crosses = values
            address = found.live.pop(index % len(found.live))  # type: ignore[operator]
            if crosses:
                twin.record_stream(address, 9)
            twin.free(address)
        elif operation == "advance":
            twin.advance(values[0])  # type: ignore[arg-type]
        elif operation == "empty":
            twin.empty_cache()
        elif operation == "expandable" and twin.settings.max_split_size is None:
            twin.set(Settings(expandable_segments=bool(values[0]),
                              roundup_power2_divisions=twin.settings.roundup_power2_divisions))
    twin._process_events()
    return found


def hidden(twin: Allocator) -> bool:
    """Whether the twin knows addresses that a snapshot does not tell: unmapped ones before the first mapped page, or
    several reservations for one stream and pool.
    """
    for pair in twin._pools.values():
        for pool in pair:
            streams = [stream for stream, _, block in pool.unmapped if block.next is None]
            if len(set(streams)) < len(streams) or any(block.prev is None for _, _, block in pool.unmapped):
                return True
    return False


def tried(found: Made, request: Request) -> Verdict | None:
    """What the twin does with a request, told by how it got there; None: out of memory."""
    before, refused, given = found.twin.stats(), found.device.refused, found.device.given
    try:
        found.twin.alloc(request.size, request.stream, request.pool)
    except OutOfMemory:
        return None
    after = found.twin.stats()
    if after.retries > before.retries or after.device_frees > before.device_frees or found.device.refused > refused:
        return Verdict.RECLAIM
    return Verdict.GROW if found.device.given > given else Verdict.SERVED


def unserved(state: State, config: Settings, request: Request, device_free: int) -> Verdict:
    """The verdict of a request that nothing serves, from sums over all blocks."""
    rounded = config.round_size(request.size)
    group = Group(request.stream, request.pool, rounded <= SMALL_SIZE)
    if any(block.state == INACTIVE and block.size >= rounded for segment in state for block in segment.blocks
           if (segment.stream, segment.pool, segment.small) != group):
        return Verdict.WRONG_POOL
    free = sum(block.size for segment in state for block in segment.blocks if block.state != ALLOCATED)
    return Verdict.FRAGMENTED if free + device_free >= rounded else Verdict.CAPACITY


@settings(max_examples=400, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(PROGRAMS, SETTINGS, st.integers(24, 160), SIZES, STREAMS, POOLS)
def test_a_verdict_is_what_the_twin_then_does(program: list[tuple[object, ...]], config: Settings, has: int, size: int,
                                              stream: int, pool: int) -> None:
    """Each verdict, told from a snapshot alone, is what the twin does next with the same request."""
    request = Request(size, stream, pool)
    found = made(program, config, has * MIB)
    assume(not hidden(found.twin))
    state, now, free = found.twin.snapshot(), found.twin.settings, found.device.has - found.device.used
    told = judge(state, now, request, free)
    used = found.device.used
    did = tried(found, request)
    if did is Verdict.GROW:
        assert told.evidence.segment_bytes == found.device.used - used
    if did is None:
        later = made(program, config, has * MIB)
        later.twin._synchronize()
        did = Verdict.WAIT if tried(later, request) else unserved(state, now, request, free)
    event(str(did))
    assert told.verdict is did, told.sentence
    _check(told, state, free)
    emptied = made(program, config, has * MIB)
    emptied.twin.empty_cache()
    assert told.evidence.releasable_bytes == used - emptied.device.used


def _check(told: Judgement, state: State, device_free: int) -> None:
    """The evidence again, block by block."""
    found: Evidence = told.evidence
    blocks = [(segment, block) for segment in state for block in segment.blocks]
    group = (found.stream, found.pool, found.rounded_bytes <= SMALL_SIZE)
    own = [block.size for segment, block in blocks
           if block.state == INACTIVE and (segment.stream, segment.pool, segment.small) == group]
    assert (found.largest_free_bytes, found.group_free_bytes) == (max(own, default=0), sum(own))
    assert found.pending_bytes == sum(block.size for _, block in blocks if block.state == PENDING)
    assert found.total_free_bytes == sum(block.size for _, block in blocks if block.state == INACTIVE)
    assert found.sum_bytes == found.pending_bytes + found.total_free_bytes + device_free
    assert found.shortfall_bytes == max(found.rounded_bytes - found.sum_bytes, 0)
    assert found.largest_after_wait_bytes >= found.largest_free_bytes
    assert told.verdict is Verdict.FRAGMENTED or not found.pins


@settings(max_examples=150, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(PROGRAMS, SETTINGS, st.integers(24, 160), st.lists(SIZES, min_size=1, max_size=8), STREAMS)
def test_a_demand_is_decided_where_the_twin_fails_or_pays_most(program: list[tuple[object, ...]], config: Settings,
                                                               has: int, sizes: list[int], stream: int) -> None:
    """A step's verdict is that of the request at which the twin, served in order, runs out or first pays most."""
    found = made(program, config, has * MIB)
    assume(not hidden(found.twin))
    state, now, free = found.twin.snapshot(), found.twin.settings, found.device.has - found.device.used
    index, told = for_demands(state, now, [Demand("cuda:0", stream, 0, tuple(sizes))], free)
    paid: list[Verdict | None] = []
    for size in sizes:
        paid.append(tried(found, Request(size, stream)))
        assume(not hidden(found.twin))
        if paid[-1] is None:
            break
    event(str(told.verdict))
    if paid[-1] is None:
        assert (index, told.verdict in (Verdict.SERVED, Verdict.GROW, Verdict.RECLAIM)) == (len(paid) - 1, False)
    else:
        worst = next(cost for cost in (Verdict.RECLAIM, Verdict.GROW, Verdict.SERVED) if cost in paid)
        assert (index, told.verdict) == (paid.index(worst), worst)


@settings(max_examples=100, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(PROGRAMS, st.integers(24, 160), st.floats(0.3, 0.9), st.sampled_from([0.0, 0.2, 0.6]), SIZES)
def test_a_memory_fraction_limits_what_the_device_gives(program: list[tuple[object, ...]], has: int, share: float,
                                                        threshold: float, size: int) -> None:
    """With a memory fraction, with and without garbage collection, a request succeeds where the twin serves it."""
    config = Settings(memory_fraction=share * has * MIB / ADDRESSES, garbage_collection_threshold=threshold)
    found = made([step for step in program if step[0] != "expandable"], config, has * MIB)
    allowed, request = found.twin.allowed, Request(size)
    assert allowed is not None
    left = allowed - found.twin.stats().reserved
    told = judge(found.twin.snapshot(), config, request, found.device.has - found.device.used, left)
    did = tried(found, request)
    event(f"{told.verdict} {did}")
    assert (told.verdict in (Verdict.SERVED, Verdict.GROW, Verdict.RECLAIM)) == (did is not None)
    if not threshold and did:
        assert told.verdict is did


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS, SETTINGS, st.integers(24, 160))
def test_waste_is_conserved_and_agrees_with_the_twin(program: list[tuple[object, ...]], config: Settings,
                                                     has: int) -> None:
    """Classes sum to the twin's own totals, and cached is exactly what the twin returns when its cache is emptied."""
    twin = made(program, config, has * MIB).twin
    now = twin.settings
    for pages in (True, False):  # with pending blocks, and once they are free
        state, totals = twin.snapshot(), twin.stats()
        found = waste(state, now).total
        active = found.allocated_bytes + found.pending_bytes + found.rounding_bytes
        assert (found.reserved_bytes, active) == (totals.reserved, totals.active)
        assert found.allocated_bytes + found.pending_bytes == totals.requested
        assert found.unexplained_bytes == 0
        idle = found.gaps_bytes + found.cached_bytes + found.other_pools_bytes
        assert idle == totals.reserved - totals.active
        groups = waste(state, now).groups
        assert sum(part.reserved_bytes for part in groups.values()) == totals.reserved
        if pages:
            twin._synchronize()
    assert found.pending_bytes == 0
    twin.empty_cache()
    assert found.cached_bytes == totals.reserved - twin.stats().reserved


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS, SETTINGS, st.integers(24, 160))
def test_freeing_the_one_block_that_pins_a_segment_returns_what_it_held_back(program: list[tuple[object, ...]],
                                                                             config: Settings, has: int) -> None:
    """Where a single block pins memory of the default pool, freeing it lets the twin return all that it held back."""
    twin = made(program, config, has * MIB).twin
    twin.empty_cache()
    state = twin.snapshot()
    alone = [pin for pin in pins(state, twin.settings)
             if pin.blocks == 1 and pin.pool == 0 and pin.block.state == ALLOCATED]
    event(f"{min(len(alone), 3)} pins")
    if alone:
        pin, before = alone[0], twin.stats().reserved
        twin.free(pin.block.address)
        twin.empty_cache()
        returned = before - twin.stats().reserved
        if next(segment for segment in state if segment.address == pin.address).expandable:
            assert returned >= pin.held_back_bytes
        else:
            assert returned == pin.held_back_bytes + pin.block.size == pin.size_bytes
