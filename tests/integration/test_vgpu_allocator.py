"""torch on virtual devices against the Python twin: the same random programs, every address and statistic."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from kvobs.allocator.program import ADVANCE, ALLOC, EMPTY_CACHE, FREE, RECORD_STREAM, RELEASE_POOL, SET
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE
from kvobs.allocator.twin import Allocator, OutOfMemory
from tests.programs import Plan, random_plan
from tests.vgpu import needs_vgpu, on_vgpu
from tests.vgpu_player import NO_LIMIT, LowestAddress, packed

pytestmark = needs_vgpu()
DEVICES, LENGTH = 16, 400
LEAST = 32 * MIB


def allowed(plan: Plan) -> Plan:
    """The plan with settings that torch takes: no limit of splitting is below a large segment."""
    def one(settings: Settings) -> Settings:
        split, rounding, large = settings.max_split_size, settings.max_non_split_rounding, settings.large_segment_size
        return replace(settings, max_split_size=None if split is None else max(split, large),
                       max_non_split_rounding=max(rounding, large))

    plan.program.settings[:] = map(one, plan.program.settings)
    return replace(plan, settings=one(plan.settings))


def by_the_twin(plan: Plan, capacity: int) -> dict[str, Any]:
    """What ``vgpu_player.play`` tells, of the twin."""
    twin = Allocator(plan.settings, LowestAddress(capacity))
    program, given = plan.program, dict[int, int]()
    places, reserved, allocated = [], [], []
    columns = zip(program.op, program.handle, program.size, program.stream, program.pool, strict=True)
    for op, handle, size, stream, pool in columns:
        place = 0
        if op == ALLOC:
            try:
                given[handle] = twin.alloc(size or 1, stream, pool)
                place = given[handle] + 1
            except OutOfMemory:
                given[handle] = -1
        elif op == FREE and given[handle] >= 0:
            twin.free(given[handle])
        elif op == RECORD_STREAM and given[handle] >= 0:
            twin.record_stream(given[handle], stream)
        elif op == ADVANCE:
            twin.advance(stream)
        elif op == EMPTY_CACHE:
            twin.empty_cache()
        elif op == RELEASE_POOL:
            twin.release_pool(pool)
        elif op == SET:
            twin.set(program.settings[handle])
        places.append(place)
        reserved.append(twin.reserved)
        allocated.append(twin.allocated)
    stats = twin.stats()
    states = {ALLOCATED: "active_allocated", INACTIVE: "inactive"}
    return {"places": places, "reserved": reserved, "allocated": allocated,
            "segments": [[one.address, one.size, one.stream, one.pool, one.small, one.expandable,
                          [[block.address, block.size, block.requested, states.get(block.state, "active_pending_free")]
                           for block in one.blocks]] for one in twin.snapshot()],
            "stats": {name: getattr(stats, name) for name in (
                "retries", "ooms", "syncs", "device_allocs", "device_frees", "peak_reserved", "peak_allocated",
                "peak_active", "requested")}}


def by_torch(programs: list[object]) -> object:
    from tests.vgpu_player import play

    return [play(one, device) for device, one in enumerate(programs)]


@pytest.mark.parametrize("batch", range(4))
def test_random_programs_get_the_addresses_of_the_twin(batch: int) -> None:
    """Any settings, changed while it runs, streams, private pools, limits: each request is placed where the twin places
    it, and reserved, allocated, peaks, counters and the last snapshot are equal.
    """
    plans = [allowed(random_plan(random.Random(1000 * batch + number), LENGTH)) for number in range(DEVICES)]
    capacities = [NO_LIMIT if plan.capacity is None else max(plan.capacity, LEAST) for plan in plans]
    found = on_vgpu(by_torch, devices=tuple(capacities),  # type: ignore[arg-type]
                    programs=[packed(plan.program, plan.settings) for plan in plans])
    ooms = 0
    for number, (plan, capacity, told) in enumerate(zip(plans, capacities, found, strict=True)):
        wanted = by_the_twin(plan, capacity)
        for name, value in wanted.items():
            assert told[name] == value, (number, name, first_difference(told[name], value), plan.settings)
        ooms += wanted["stats"]["ooms"]
    assert ooms > DEVICES  # the limits were reached


def first_difference(one: Any, two: Any) -> Any:
    """Where two lists, or dicts, differ first."""
    if isinstance(one, dict):
        return {name: (value, two[name]) for name, value in one.items() if value != two[name]}
    return next(((at, *pair) for at, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]),
                (len(one), len(two)))
