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


def paged_verdict(needs: int, state: PagedState, *, kept: int = 0) -> tuple[str, str]:
    """The verdict on a request that needs so many blocks, and one sentence.

    Args:
        needs: blocks beyond those of a prefix that it shares with running requests.
        kept: blocks that the scheduler keeps free (its watermark).
    """
    available = state.free + state.cached - kept
    if needs > state.size - state.pinned:
        return "CAPACITY", (f"It needs {_blocks(needs)}, and the pool has {state.size - state.pinned:,} in all: it can "
                            "never be admitted.")
    if needs > available:
        return "WAIT", (f"It needs {_blocks(needs)}; {max(available, 0):,} can be had, so running requests, which hold "
                        f"{state.used:,}, must give back {needs - max(available, 0):,}.")
    if needs > state.free - kept:
        evicted = needs - max(state.free - kept, 0)
        return "RECLAIM", (f"It needs {_blocks(needs)}: {max(needs - evicted, 0):,} free ones and {evicted:,} that are "
                           "evicted from the prefix cache.")
    return "SERVED", f"It needs {_blocks(needs)}, and {state.free:,} are free."


def _blocks(number: int) -> str:
    return f"{number:,} block{'' if number == 1 else 's'}"
