"""Which state each block of a pool is in: SGLang's own accounting identity, in blocks. Pure.

SGLang's check (``SchedulerInvariantChecker``, 0.5.23) is, in tokens of one pool:

    available + evictable + protected + session_held + uncached = size

``available`` the allocator has; ``evictable`` and ``protected`` are the radix tree's, unlocked and locked;
``session_held`` belongs to streaming sessions between turns; ``uncached`` is what running requests have beyond the
tree (their rows' whole pages past the part that the tree owns). It holds between two iterations of the scheduler's
loop: while requests run with their uncached tokens counted in, and with none of them when the scheduler is idle.
Inside an iteration it does not hold: tokens are on their way between a request and the tree.
"""

from __future__ import annotations

from typing import NamedTuple


class Tokens(NamedTuple):
    """One pool's accounting in tokens (Mamba: slots); ``uncached`` is None where the engine cannot tell it."""

    size: int
    available: int
    evictable: int
    protected: int
    session_held: int
    uncached: int | None


class Balance(NamedTuple):
    """The same in blocks. The five add up to the pool's size."""

    used: int
    cached: int
    free: int
    pinned: int
    unexplained: int


def gap_of(tokens: Tokens) -> int:
    """Tokens that no state explains (negative: counted twice); 0 where the identity cannot be checked."""
    if tokens.uncached is None:
        return 0
    return tokens.size - sum(tokens[1:5]) - tokens.uncached


def balance(tokens: Tokens, page_size: int, *, idle: bool, believed: bool) -> Balance:
    """States in blocks of ``page_size`` tokens.

    ``used`` is what requests hold: their own tokens and the locked part of the tree. In an idle engine nobody runs, so
    that what is locked then is pinned (a session's prefix, a transfer). A gap that is not ``believed`` yet counts as
    used, which is SGLang's own definition of used. A gap of less than a block counts as one.
    """
    size, free, cached = (number // page_size for number in tokens[:3])
    pinned = -(-(tokens.session_held + (tokens.protected if idle else 0)) // page_size)
    gap = gap_of(tokens) if believed else 0
    unexplained = (1 if gap > 0 else -1) * -(-abs(gap) // page_size)
    return Balance(size - free - cached - pinned - unexplained, cached, free, pinned, unexplained)


def sentence(pool: str, tokens: Tokens) -> str:
    """What is wrong with a pool's accounting, with its numbers."""
    gap = gap_of(tokens)
    what = f"{gap} of them belong to nobody (a leak)" if gap > 0 else f"{-gap} of them are counted twice"
    return (f"SGLang's {pool} pool has {tokens.size} tokens, and {what}: available {tokens.available} + evictable "
            f"{tokens.evictable} + protected {tokens.protected} + held by sessions {tokens.session_held} + uncached of "
            f"requests {tokens.uncached} = {tokens.size - gap}.")
