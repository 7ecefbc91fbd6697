"""What would become of a request for blocks of a paged pool, and why. Pure.

Every block serves every request, so that a paged pool cannot be FRAGMENTED; what it can lack is free blocks, free
blocks without content worth keeping, or blocks at all. The names are those of ``kvobs.allocator.verdict``:

==========  ============================================================================================
SERVED      free blocks hold it
RECLAIM     it fits once cached blocks are evicted: what they hold has to be computed again when asked for
WAIT        running requests have to end, or be preempted, first
CAPACITY    the pool is too small for it even when it is empty
==========  ============================================================================================
"""

from __future__ import annotations

from typing import NamedTuple


class PagedState(NamedTuple):
    """Blocks of a pool; ``size`` is all of them, pinned ones included."""

    size: int
    used: int
    cached: int
    free: int
    pinned: int = 0


def paged_verdict(needs: int, state: PagedState, *, kept: int = 0, found: int = 0) -> tuple[str, str]:
    """The verdict on a request that needs so many blocks, and one sentence.

    Args:
        needs: blocks beyond those of its prefix that the pool has already.
        kept: blocks, free or cached, that the scheduler leaves while others run (its watermark).
        found: blocks of its prefix that the pool has already; those that nobody holds are not in ``state.cached``.
    """
    most, missing = state.size - state.pinned, needs + kept - state.free - state.cached
    if needs + found > most:
        return "CAPACITY", (f"It needs {_blocks(needs + found)}, and the pool has {most:,} in all: it can never be "
                            "admitted.")
    if missing > 0:
        return "WAIT", (f"It needs {_blocks(needs)}; {max(needs - missing, 0):,} can be had, so running requests, "
                        f"which hold {state.used:,}, must give back {min(missing, state.used):,}.")
    if needs > state.free:
        return "RECLAIM", (f"It needs {_blocks(needs)}: {state.free:,} free ones and {needs - state.free:,} that are "
                           "evicted from the prefix cache.")
    return "SERVED", f"It needs {_blocks(needs)}, and {state.free:,} are free."


def _blocks(number: int) -> str:
    return f"{number:,} block{'' if number == 1 else 's'}"
