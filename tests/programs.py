"""Random programs of allocator operations, for tests that compare engines. Reproducible by their seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvobs.allocator.program import ADVANCE, ALLOC, EMPTY_CACHE, FREE, RECORD_STREAM, RELEASE_POOL, SET, Program
from kvobs.allocator.settings import INTERVALS, MIB, Settings

OPERATIONS = (ALLOC, FREE, RECORD_STREAM, ADVANCE, EMPTY_CACHE, RELEASE_POOL, SET)
WEIGHTS = (500, 420, 60, 80, 3, 3, 6)


@dataclass(frozen=True)
class Plan:
    """A program and what to run it with."""

    program: Program
    settings: Settings
    capacity: int | None


def random_settings(draw: random.Random) -> Settings:
    """Any settings that PYTORCH_ALLOC_CONF could give, those that change most more often than not."""
    split = draw.choice((None, None, 21, 24, 40, 100))
    return Settings(
        max_split_size=None if split is None else split * MIB,
        max_non_split_rounding=draw.choice((20, 21, 64)) * MIB,
        roundup_power2_divisions=draw.choice((
            (0,) * INTERVALS, (0,) * INTERVALS, (4,) * INTERVALS,
            tuple(draw.choice((0, 1, 2, 4, 8, 1024)) for _ in range(INTERVALS)))),
        garbage_collection_threshold=draw.choice((0.0, 0.1, 0.5, 0.8)),
        expandable_segments=draw.random() < 0.5,
        large_segment_size=draw.choice((20, 20, 20, 21, 32)) * MIB,
        memory_fraction=draw.choice((None, None, 0.3, 0.7, 1.0)))


def random_size(draw: random.Random) -> int:
    """A request of 0 bytes to 130 MiB; edges of the rules more often than between them."""
    kind = draw.random()
    if kind < 0.08:
        edge = draw.choice((0, 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 21 * MIB, 40 * MIB))
        return max(0, edge + draw.choice((-1, 0, 1, 511, 512)))
    if kind < 0.5:
        return draw.randrange(1, MIB)
    if kind < 0.8:
        return draw.randrange(MIB, 12 * MIB)
    return draw.randrange(8 * MIB, draw.choice((30, 60, 130)) * MIB)


def random_plan(draw: random.Random, length: int) -> Plan:
    """A program of ``length`` operations, settings and a capacity."""
    program, names = Program(), 0
    live: list[int] = []
    streams, pools = draw.randrange(1, 4), draw.choice((1, 1, 3))
    while len(program) < length:
        op = draw.choices(OPERATIONS, WEIGHTS)[0]
        if op == ALLOC:
            pool = draw.randrange(pools) if draw.random() < 0.3 else 0
            program.add(ALLOC, names, random_size(draw), draw.randrange(streams), pool)
            live.append(names)
            names += 1
        elif op == FREE and live:
            # Mostly the young, now and then a wave.
            for _ in range(min(len(live), draw.choice((1, 1, 1, 1, 1, 8)), length - len(program))):
                place = draw.randrange(max(0, len(live) - draw.choice((3, 30, 300))), len(live))
                live[place], live[-1] = live[-1], live[place]
                program.add(FREE, live.pop())
        elif op == RECORD_STREAM and live:
            program.add(RECORD_STREAM, draw.choice(live[-20:]), stream=draw.randrange(streams + 1))
        elif op == ADVANCE:
            program.add(ADVANCE, stream=draw.randrange(streams + 1))
        elif op == EMPTY_CACHE:
            program.add(EMPTY_CACHE)
        elif op == RELEASE_POOL:
            program.add(RELEASE_POOL, pool=draw.randrange(pools))
        elif op == SET:
            program.add(SET, len(program.settings))
            program.settings.append(random_settings(draw))
    capacity: int | None = draw.choice((None, 1, 64 * MIB, 200 * MIB, 512 * MIB, 2048 * MIB))
    return Plan(program, random_settings(draw), capacity)
