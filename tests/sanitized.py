"""Run random programs on a library that reports its own memory errors: ``python -m tests.sanitized LIBRARY``."""

from __future__ import annotations

import ctypes
import random
import sys

from kvobs.allocator import _abi, core
from kvobs.allocator._core_replay import CoreReplayer
from kvobs.allocator.core import Core
from kvobs.allocator.recording import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP
from kvobs.allocator.script import ALLOC, COMPLETE, DEFER, FREE, OOM, Script
from kvobs.allocator.settings import MIB
from kvobs.allocator.state import ALLOCATED, Block, Segment
from tests.programs import random_plan, random_settings


def follow_nonsense(draw: random.Random) -> None:
    """Replay a history that contradicts itself, from a state whose segments overlap."""
    told, state = random_settings(draw), []
    for _ in range(draw.randrange(6)):
        start, expandable, small = draw.randrange(1, 40) * 2 * MIB, draw.random() < 0.5, draw.random() < 0.5
        parts = [draw.randrange(1, 4096) * 512 for _ in range(draw.randrange(1, 6))]
        blocks = tuple(Block(start + sum(parts[:at]), size, size, draw.randrange(3)) for at, size in enumerate(parts))
        state.append(Segment(start, sum(parts), draw.randrange(2), draw.randrange(2), small, expandable, blocks))
    replayer, script = CoreReplayer(told, tuple(state)), Script()
    for _ in range(300):
        for _ in range(draw.choice((0, 0, 1, 3))):
            script.call.append(draw.choice((SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP)))
            script.call_address.append(draw.randrange(1, 60) * draw.choice((512, 2 * MIB, 20 * MIB)))
            script.call_size.append(draw.choice((2 * MIB, 20 * MIB, 3 * MIB + 512)))
            script.call_stream.append(draw.randrange(2))
            script.call_pool.append(draw.randrange(2))
        script.first.append(len(script.call))
        step = draw.choice((ALLOC, ALLOC, ALLOC, FREE, DEFER, COMPLETE, OOM))
        script.step.append(step)
        script.event.append(len(script))
        script.address.append(draw.randrange(1, 9000) * draw.choice((512, 2 * MIB)))
        script.size.append(draw.choice((1, MIB, 2 * MIB, 12 * MIB, 1 << 50)))
        script.stream.append(draw.randrange(2))
        script.pool.append(draw.randrange(2))
    replayer.run(script, 0, len(script))
    replayer.snapshot()


def main(path: str) -> None:
    """Programs of all operations, valid and refused ones, and calls by address."""
    core._found = _abi.declare(ctypes.CDLL(path))
    for seed in range(25):
        plan = random_plan(random.Random(seed), 400)
        used = Core(plan.settings, plan.capacity)
        used.run(plan.program)
        for segment in used.snapshot():
            for at, block in enumerate(segment.blocks):
                if block.state == ALLOCATED:
                    (used.free if at % 2 else used.defer)(block.address)
        used.empty_cache()
        plan.program.op[300] = 77
        try:
            Core(plan.settings, plan.capacity).run(plan.program)
        except ValueError:
            continue
        raise AssertionError("an unknown operation was accepted")
    for seed in range(60):
        follow_nonsense(random.Random(seed))
    print("every program ran")


if __name__ == "__main__":
    main(sys.argv[1])
