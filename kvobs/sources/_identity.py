"""Ids of caches and pools, and records about third-party objects that are kept as long as these live."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_ids = itertools.count(1)


def next_cache_id() -> int:
    """The id of one more cache or pool; no two of a process have the same, whichever source tells of them."""
    return next(_ids)


class ByIdentity(Generic[T]):
    """Records about third-party objects, kept by identity and only as long as the objects live."""

    def __init__(self) -> None:
        self._records: dict[int, T] = {}
        self._ends: dict[int, weakref.finalize[Any, Any]] = {}

    def get(self, owner: Any) -> T | None:
        """The record of the object, if it has one."""
        return self._records.get(id(owner))

    def add(self, owner: Any, record: T, gone: Callable[[T], None]) -> T:
        """Keep a record (or return the one that is there already); ``gone`` is told when the object died."""
        key = id(owner)
        kept = self._records.setdefault(key, record)
        if kept is record:
            end = weakref.finalize(owner, self._end, key, gone)
            end.atexit = False
            self._ends[key] = end
        return kept

    def _end(self, key: int, gone: Callable[[T], None]) -> None:
        self._ends.pop(key, None)
        record = self._records.pop(key, None)
        if record is not None:
            gone(record)

    def records(self) -> list[T]:
        """All records."""
        return list(self._records.values())

    def clear(self) -> list[T]:
        """Forget everything; the records that were kept."""
        for end in list(self._ends.values()):
            end.detach()
        self._ends.clear()
        records = list(self._records.values())
        self._records.clear()
        return records
