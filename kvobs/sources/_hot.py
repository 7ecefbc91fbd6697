"""Which blocks of a prefix cache are hot: the article's rule for hot entries (S11), put to blocks.

The article rebuilds an entry of a service's cache that is read more than 500 times a second and would live for less
than 30 s: it computes the entry's aggregate ahead, and doubles its life. A block of keys and values is an aggregate
that is computed already, so the longer life is left. An engine hits a block once per request at most, which is far
below 500 a second: here a block is hot while it was hit more than twice in the last 30 s. How each engine doubles a
life is its own affair, and at most half of a pool's blocks are protected at a time; these two figures are ours.
"""

from __future__ import annotations

from typing import Any

WINDOW_NS = 30_000_000_000  # the article's 30 s
COLD_HITS = 2  # in the window; a block that was hit more often is hot
SHARE = 2  # one block of so many may be protected
NEVER = -(1 << 62)
_NONE = (None, *(NEVER,) * (COLD_HITS + 1))


class Hits:
    """When the blocks of one pool were hit, the newest ``COLD_HITS + 1`` times of each.

    Blocks are known by their numbers, so that there are no more entries than the pool has blocks. With each goes what
    it held when it was hit: a block whose content is another one by now has no hits.
    """

    def __init__(self) -> None:
        self._times: dict[int, tuple[Any, ...]] = {}  # the content, then the times, the newest first

    def add(self, block: int, content: object, now_ns: int) -> None:
        """A request found the block by its content."""
        known = self._times.get(block)
        if known is None or known[0] != content:
            known = _NONE
        self._times[block] = content, now_ns, *known[1:-1]

    def heat_ns(self, block: int, content: object, now_ns: int) -> int | None:
        """The later, the hotter; None for a block that is not hot."""
        known = self._times.get(block)
        if known is None or content is None or known[0] != content:
            return None
        oldest: int = known[-1]
        return oldest if now_ns - oldest < WINDOW_NS else None

    def clear(self) -> None:
        """Forget all."""
        self._times.clear()
