"""The C++ core and the Python twin, two readings of one allocator, on random programs of everything it can do."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.allocator import _expandable, blocks, core, twin
from kvobs.allocator.core import Core, run
from kvobs.allocator.device import SimulatedDevice
from kvobs.allocator.program import ALLOC, EMPTY_CACHE, FREE, RELEASE_POOL, Outcome, Program
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, State
from tests.programs import Plan, random_plan, random_settings, random_size

REASON = core.why_not()
needs_core = pytest.mark.skipif(REASON is not None, reason=str(REASON))
engines = pytest.mark.parametrize("engine", [pytest.param("C++", marks=needs_core), "Python"])
seeds = st.integers(0, 2**32 - 1)


def same(plan: Plan) -> Outcome:
    """Run a plan on both engines; equal in every address, size, statistic and in the final state."""
    found, wanted = (run(plan.program, plan.settings, plan.capacity, engine) for engine in ("C++", "Python"))
    assert found.address == wanted.address
    assert found.reserved == wanted.reserved
    assert found.allocated == wanted.allocated
    assert found.ooms == wanted.ooms
    assert found.stats == wanted.stats
    assert found.state == wanted.state
    assert (found.engine, wanted.engine) == ("C++", "Python")
    return found


@needs_core
@settings(max_examples=300)
@given(seed=seeds, length=st.integers(1, 300))
def test_equal_on_random_programs(seed: int, length: int) -> None:
    """Whatever a program does, both engines give every request the same address and end in the same state."""
    same(random_plan(random.Random(seed), length))


@needs_core
def test_equal_on_a_long_run() -> None:
    """Both engines agree over 200,000 operations, in which the device runs out, and memory goes back to it."""
    totals = dict.fromkeys(("device_allocs", "device_frees", "retries", "ooms", "syncs"), 0)
    for seed in range(5):
        stats = same(random_plan(random.Random(seed), 40_000)).stats
        for name in totals:
            totals[name] += getattr(stats, name)
    assert all(count > 100 for count in totals.values()), totals


@needs_core
@settings(max_examples=200)
@given(seed=seeds)
def test_equal_method_by_method(seed: int) -> None:
    """One call at a time, deferred frees among them, the core answers, refuses and counts as the twin does."""
    draw = random.Random(seed)
    first, capacity = random_settings(draw), draw.choice((None, 200 * MIB, 1024 * MIB))
    pair = (Core(first, capacity), twin.Allocator(first, SimulatedDevice(capacity)))
    live: list[int] = []
    deferred: list[int] = []
    for _ in range(150):
        kind = draw.random()
        if kind < 0.5:
            size, stream, pool = random_size(draw), draw.randrange(2), draw.choice((0, 0, 0, 1))
            given_addresses = [_attempt(one.alloc, size, stream, pool) for one in pair]
            assert given_addresses[0] == given_addresses[1]
            if isinstance(given_addresses[0], int):
                live.append(given_addresses[0])
        elif kind < 0.65 and live:
            address = live.pop(draw.randrange(len(live)))
            assert [_attempt(one.complete, address) for one in pair] == ["KeyError", "KeyError"]
            assert [_attempt(one.free, address) for one in pair] == [None, None]
            assert [_attempt(one.free, address) for one in pair] == ["KeyError", "KeyError"]
        elif kind < 0.75 and live:
            deferred.append(live.pop(draw.randrange(len(live))))
            assert [_attempt(one.defer, deferred[-1]) for one in pair] == [None, None]
            assert [_attempt(one.free, deferred[-1]) for one in pair] == ["KeyError", "KeyError"]
            assert [_attempt(one.record_stream, deferred[-1], 9) for one in pair] == ["KeyError", "KeyError"]
        elif kind < 0.85 and deferred:
            address = deferred.pop(draw.randrange(len(deferred)))
            assert [_attempt(one.complete, address) for one in pair] == [None, None]
        elif kind < 0.92 and live:
            arguments = live[-1], draw.randrange(3)
            assert [_attempt(one.record_stream, *arguments) for one in pair] == [None, None]
        elif kind < 0.96:
            stream = draw.randrange(3)
            assert [_attempt(one.advance, stream) for one in pair] == [None, None]
        elif kind < 0.98:
            assert [_attempt(one.empty_cache) for one in pair] == [None, None]
            pool = draw.randrange(3)
            assert [_attempt(one.release_pool, pool) for one in pair] == [None, None]
        else:
            changed = random_settings(draw)
            assert [_attempt(one.set, changed) for one in pair] == [None, None]
        assert pair[0].stats() == pair[1].stats()
    assert pair[0].snapshot() == pair[1].snapshot()


@engines
@settings(max_examples=200)
@given(seed=seeds, length=st.integers(1, 250))
def test_conservation(engine: str, seed: int, length: int) -> None:
    """Rounding, gaps, pending and requested bytes sum to reserved; nothing overlaps; no two free neighbours are left
    apart; every address given and not freed is an allocated block.
    """
    plan = random_plan(random.Random(seed), length)
    outcome = run(plan.program, plan.settings, plan.capacity, engine)
    state, stats = outcome.state, outcome.stats
    check_shape(state)
    parts = [block for segment in state for block in segment.blocks]
    held = [block for block in parts if block.state == ALLOCATED]
    gaps = sum(block.size for block in parts if block.state == INACTIVE)
    pending = sum(block.size for block in parts if block.state == PENDING)
    rounding = sum(block.size - block.requested for block in held)
    requested = sum(block.requested for block in held)
    assert rounding + gaps + pending + requested == stats.reserved == sum(segment.size for segment in state)
    assert requested + rounding == stats.allocated
    assert pending == stats.active - stats.allocated
    assert all(block.requested <= block.size for block in held)
    freed = {plan.program.handle[at] for at in range(length) if plan.program.op[at] == FREE}
    still = sorted(outcome.address[at] for at in range(length)
                   if outcome.address[at] and plan.program.handle[at] not in freed)
    assert still == sorted(block.address for block in held)


@engines
@settings(max_examples=200)
@given(seed=seeds, length=st.integers(1, 250))
def test_everything_freed_goes_back(engine: str, seed: int, length: int) -> None:
    """Once all is freed, all pools are released and the cache is emptied, the device has everything again."""
    plan = random_plan(random.Random(seed), length)
    program, freed = plan.program, set()
    for at in range(length):
        if program.op[at] == FREE:
            freed.add(program.handle[at])
    for at in range(length):
        if program.op[at] == ALLOC and program.handle[at] not in freed:
            program.add(FREE, program.handle[at])
    for pool in range(3):
        program.add(RELEASE_POOL, pool=pool)
    program.add(EMPTY_CACHE)
    outcome = run(program, plan.settings, plan.capacity, engine)
    stats = outcome.stats
    assert (stats.reserved, stats.allocated, stats.active, stats.requested) == (0, 0, 0, 0)
    assert outcome.state == ()


@needs_core
def test_every_rule_of_the_twin_is_reached() -> None:
    """The random programs that the engines are compared on execute every line of the twin's rules."""
    rules = [getattr(found, "fget", found) for owner in (
        twin.Allocator, _expandable.Expandable, blocks.Pool, blocks.Block) for found in vars(owner).values()]
    rules = [function for function in rules if hasattr(function, "__code__")]
    wanted = {(function.__code__, line) for function in rules for _, _, line in function.__code__.co_lines()
              if line is not None and line != function.__code__.co_firstlineno}
    with lines_of({function.__code__ for function in rules}) as reached:
        for seed in range(40):
            same(random_plan(random.Random(seed), 500))
        same(beyond_all_addresses())
        test_equal_method_by_method.hypothesis.inner_test(seed=1)
    missed = {f"{code.co_qualname}:{line}" for code, line in wanted - reached}
    assert not missed


def beyond_all_addresses() -> Plan:
    """A request for more than an expandable segment of an endless device has addresses."""
    program = Program()
    program.add(ALLOC, 0, 1 << 41)
    return Plan(program, Settings(expandable_segments=True), None)


def check_shape(state: State) -> None:
    """Segments lie apart and are filled by their blocks; free neighbours have been merged."""
    end = 0
    for segment in state:
        assert segment.address >= end
        end = segment.address
        previous = None
        for block in segment.blocks:
            assert block.address == end
            assert block.size > 0
            assert block.size % 512 == 0
            assert not (previous == block.state == INACTIVE)
            previous, end = block.state, block.address + block.size
        assert end == segment.address + segment.size


@contextmanager
def lines_of(codes: set[CodeType]) -> Iterator[set[tuple[CodeType, int]]]:
    """The lines of these functions that are executed meanwhile."""
    reached: set[tuple[CodeType, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in codes:
            return None
        if event == "line":
            reached.add((frame.f_code, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield reached
    finally:
        sys.settrace(before)


def _attempt(call: Any, *arguments: Any) -> Any:
    """What a call returned, or the name of the exception it raised."""
    try:
        return call(*arguments)
    except (twin.OutOfMemory, KeyError) as error:
        return type(error).__name__
