"""Run random programs on a library that reports its own memory errors: ``python -m tests.sanitized LIBRARY``."""

from __future__ import annotations

import ctypes
import random
import sys

from kvobs.allocator import _abi, core
from kvobs.allocator.core import Core
from tests.programs import random_plan


def main(path: str) -> None:
    """Programs of all operations, valid and refused ones, and calls by address."""
    core._found = _abi.declare(ctypes.CDLL(path))
    for seed in range(25):
        plan = random_plan(random.Random(seed), 400)
        used = Core(plan.settings, plan.capacity)
        used.run(plan.program)
        for segment in used.snapshot():
            for at, block in enumerate(segment.blocks):
                if block.state == 2:
                    (used.free if at % 2 else used.defer)(block.address)
        used.empty_cache()
        plan.program.op[300] = 77
        try:
            Core(plan.settings, plan.capacity).run(plan.program)
        except ValueError:
            continue
        raise AssertionError("an unknown operation was accepted")
    print("every program ran")


if __name__ == "__main__":
    main(sys.argv[1])
