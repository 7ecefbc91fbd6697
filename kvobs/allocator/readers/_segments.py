"""The last state of a device: from segments with their blocks to ``State``, in every form torch has written them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

from kvobs.allocator.readers import _columns
from kvobs.allocator.readers._frames import Interner, kind
from kvobs.allocator.readers._limits import (
    MAX_ADDRESS,
    MAX_BLOCKS,
    MAX_DEVICES,
    MAX_SEGMENTS,
    MAX_SIZE,
    Refused,
    count,
)
from kvobs.allocator.readers._pools import Pools
from kvobs.allocator.recording import UNKNOWN
from kvobs.allocator.settings import SMALL_SEGMENT
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, Block, Segment, State

_STATES = {"active_allocated": ALLOCATED, "active_pending_free": PENDING, "active_awaiting_free": PENDING,
           "inactive": INACTIVE}
_FIELDS = itemgetter("state", "address", "requested_size", "frames")
_ADDRESS = itemgetter(0)


def states(rows: list[dict[str, Any]], stacks: Interner | None, pools: Pools) -> dict[int, State]:
    """The segments of every device, in order of address. Without ``stacks`` none are looked at.

    Raises:
        Refused: a segment or block is not what torch writes.
    """
    count(len(rows), MAX_SEGMENTS, "segments")
    found: dict[int, list[Segment]] = {}
    devices = _columns.numbers("q", [row.get("device", 0) for row in rows], 0, MAX_DEVICES, "device of a segment")
    addresses = _columns.addresses(rows, "address", "segment")
    sizes = _columns.sizes(rows, "total_size", "segment")
    streams = _columns.streams(rows, "a segment")
    told = [_columns.dicts(row.get("blocks", []), "blocks of a segment") for row in rows]
    count(sum(map(len, told)), MAX_BLOCKS, "blocks")
    blocks, end = _blocks(told, addresses, stacks), 0
    for index, row in enumerate(rows):
        pool = pools.index(row["segment_pool_id"]) if "segment_pool_id" in row else 0
        start, end = end, end + len(told[index])
        found.setdefault(devices[index], []).append(Segment(
            addresses[index], sizes[index], streams[index], pool, _small(row, sizes[index]),
            _flag(row.get("is_expandable", False)), tuple(sorted(blocks[start:end], key=_ADDRESS)),
            UNKNOWN if stacks is None else stacks.stack(row.get("frames"))))
    for segments in found.values():
        segments.sort(key=_ADDRESS)
    return {device: tuple(segments) for device, segments in found.items()}


def _blocks(told: list[list[dict[str, Any]]], starts: Sequence[int], stacks: Interner | None) -> list[Block]:
    """The blocks of all segments."""
    rows = list(chain.from_iterable(told))
    if not rows:
        return []
    sizes = _columns.sizes(rows, "size", "block")
    try:
        words, addresses, requested, frames = zip(*map(_FIELDS, rows), strict=True)
        if None in frames:
            raise KeyError("frames")
    except KeyError:
        words, addresses, requested, frames = zip(*_older(told, starts), strict=True)
    for other in set(map(type, words)) - {str}:
        raise Refused(_no_state(next(word for word in words if type(word) is other)))
    for word in set(words) - _STATES.keys():
        raise Refused(_no_state(word))
    return list(map(Block, _columns.numbers("Q", addresses, 0, MAX_ADDRESS, "address of a block"), sizes,
                    _columns.numbers("q", requested, 0, MAX_SIZE + 1, "requested size of a block"),
                    [_STATES[word] for word in words],
                    repeat(UNKNOWN) if stacks is None else map(stacks.stack, frames)))


def _older(told: list[list[dict[str, Any]]], starts: Sequence[int]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """The same fields of blocks that lack some: without an address they follow one another."""
    for rows, start in zip(told, starts, strict=True):
        following = start
        for row in rows:
            address = row.get("address", following)
            requested, frames = _request(row, row["size"])
            yield row.get("state"), address, requested, frames
            following = address + row["size"] if type(address) is int else 0


def _no_state(told: Any) -> str:
    return f"The state of a block is {_shown(told)}, and must be one of {', '.join(_STATES)}."


def _request(row: dict[str, Any], size: int) -> tuple[int, Any]:
    """What was asked for, and from where. Until 2.0 that stood in the block's history, newest first."""
    requested, frames, history = row.get("requested_size", size), row.get("frames"), row.get("history")
    if history:
        newest = _columns.dicts(history, "entries of a block's history")[0]
        requested = row.get("requested_size", newest.get("real_size", size))
        frames = newest.get("frames") if frames is None else frames
    return requested, frames


def _small(row: dict[str, Any], size: int) -> bool:
    told = row.get("segment_type")
    if told is None:
        return size <= SMALL_SEGMENT
    if type(told) is not str or told not in ("small", "large"):
        raise Refused(f"The type of a segment is {_shown(told)}, and must be small or large.")
    return bool(told == "small")


def _flag(told: Any) -> bool:
    if type(told) is not bool:
        raise Refused(f"The is_expandable of a segment is {kind(told)}, and must be true or false.")
    return told


def _shown(value: Any) -> str:
    if type(value) is str:
        return repr(value[:40])
    return str(value) if type(value) is int and abs(value) < 1 << 70 else kind(value)
