"""The allocator's pool ids, numbered from 0 in the order in which they are met."""

from __future__ import annotations

from typing import Any

from kvobs.allocator.readers._frames import kind
from kvobs.allocator.readers._limits import MAX_POOLS, Refused

POOL_KEYS = ("pool_id", "segment_pool_id", "mempool_id")  # what torch has called the pool of an event
_LARGEST = 1 << 62


class Pools:
    """Numbers for pool ids; 0 is the default pool (0, 0)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {(0, 0): 0}

    def index(self, told: Any) -> int:
        """The number of a pool id, which is a pair of whole numbers.

        Raises:
            Refused: it is not, or there are too many.
        """
        if type(told) is list:
            told = tuple(told)
        if type(told) is not tuple or len(told) != 2 or any(
                type(part) is not int or not 0 <= part < _LARGEST for part in told):
            raise Refused(f"A pool id is {kind(told)}, and must be a pair of whole numbers, 0 or more.")
        found = self._known.setdefault(told, len(self._known))
        if found == MAX_POOLS:
            raise Refused(f"It names more than {MAX_POOLS:,} pools, which are allowed.")
        return found

    def all(self) -> tuple[tuple[int, int], ...]:
        """Every pool id, by its number."""
        return tuple(self._known)
