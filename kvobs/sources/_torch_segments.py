"""A bounded summary of an allocator's snapshot. Pure.

Segments are those of ``torch.cuda.memory_snapshot``. A free block serves only its own device, stream, pool and segment
type, so that is how free memory is told.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

LARGEST = 10
LEAST_LIMIT = 1_000
_ALLOCATED, _FREE = "active_allocated", "inactive"
_SUMS = ("segments", "reserved", "allocated", "active_pending", "free")


def summary(segments: Iterable[Mapping[str, Any]], limit_bytes: int = 48_000) -> str:
    """JSON of at most ``limit_bytes`` ASCII characters (at least 1,000), sizes in bytes.

    ``totals`` are over everything. Each of ``groups`` adds, for one device, stream, pool and segment type, the
    ``largest_free`` blocks (ten at most), ``free_histogram`` ([2^k, blocks, bytes] of sizes in [2^k, 2^(k+1))) and
    ``expandable`` (true, false, "some", or null where the snapshot does not say). The largest groups come first;
    ``omitted`` counts those that had no room. ``active_pending`` blocks were freed and wait for a stream that still
    uses them. About 1.3 us per block.

    Raises:
        ValueError: the limit is below 1,000 bytes.
    """
    if limit_bytes < LEAST_LIMIT:
        raise ValueError(f"A summary needs at least {LEAST_LIMIT} bytes, not {limit_bytes}.")
    groups: dict[tuple[str, ...], _Group] = {}
    for segment in segments:
        key = tuple(map(str, (segment.get("device"), segment.get("stream"), segment.get("segment_pool_id"),
                              segment.get("segment_type"))))
        if key not in groups:
            groups[key] = _Group(segment)
        groups[key].add(segment)
    ordered = sorted(groups.values(), key=lambda group: -group.sums["reserved"])
    totals = {name: sum(group.sums[name] for group in ordered) for name in _SUMS}
    left = limit_bytes - len(_document(totals, [], len(ordered)))
    texts: list[str] = []
    for group in ordered:
        text = json.dumps(group.told(), separators=(",", ":"))
        left -= len(text) + 1
        if left < 0:
            break
        texts.append(text)
    return _document(totals, texts, len(ordered) - len(texts))


def _document(totals: dict[str, int], groups: list[str], omitted: int) -> str:
    return f'{{"totals":{json.dumps(totals, separators=(",", ":"))},"groups":[{",".join(groups)}],"omitted":{omitted}}}'


class _Group:
    """Segments of one device, stream, pool and type."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        pool = first.get("segment_pool_id")
        self._who = {"device": first.get("device"), "stream": first.get("stream"),
                     "pool": list(pool) if isinstance(pool, tuple | list) else pool,
                     "type": first.get("segment_type")}
        self.sums: Counter[str] = Counter()
        self._largest: list[int] = []
        self._histogram: dict[int, list[int]] = {}
        self._expandable: set[bool | None] = set()

    def add(self, segment: Mapping[str, Any]) -> None:
        sums = self.sums
        sums["segments"] += 1
        sums["reserved"] += segment["total_size"]
        self._expandable.add(segment.get("is_expandable"))
        for block in segment["blocks"]:
            size, state = block["size"], block["state"]
            if state == _ALLOCATED:
                sums["allocated"] += size
            elif state != _FREE:
                sums["active_pending"] += size
            elif size > 0:
                sums["free"] += size
                entry = self._histogram.setdefault(size.bit_length(), [0, 0])
                entry[0] += 1
                entry[1] += size
                (heapq.heappush if len(self._largest) < LARGEST else heapq.heappushpop)(self._largest, size)

    def told(self) -> dict[str, object]:
        expandable = self._expandable
        return self._who | {name: self.sums[name] for name in _SUMS} | {
            "largest_free": sorted(self._largest, reverse=True),
            "free_histogram": [[1 << (bits - 1), *entry] for bits, entry in sorted(self._histogram.items())],
            "expandable": None if None in expandable else "some" if len(expandable) > 1 else next(iter(expandable)),
        }
