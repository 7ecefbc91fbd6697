"""The last state of a device: from segments with their blocks to ``State``, in every form torch has written them."""

from __future__ import annotations

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
from kvobs.allocator.settings import SMALL_SEGMENT
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, Block, Segment, State

_STATES = {"active_allocated": ALLOCATED, "active_pending_free": PENDING, "active_awaiting_free": PENDING,
           "inactive": INACTIVE}


def states(rows: list[dict[str, Any]], stacks: Interner, pools: Pools) -> dict[int, State]:
    """The segments of every device, in order of address.

    Raises:
        Refused: a segment or block is not what torch writes.
    """
    count(len(rows), MAX_SEGMENTS, "segments")
    found: dict[int, list[Segment]] = {}
    devices = _columns.numbers("q", [row.get("device", 0) for row in rows], 0, MAX_DEVICES, "device of a segment")
    addresses = _columns.addresses(rows, "address", "segment")
    sizes = _columns.sizes(rows, "total_size", "segment")
    streams = _columns.streams(rows, "a segment")
    blocks = [_columns.dicts(row.get("blocks", []), "blocks of a segment") for row in rows]
    count(sum(map(len, blocks)), MAX_BLOCKS, "blocks")
    for index, row in enumerate(rows):
        pool = pools.index(row["segment_pool_id"]) if "segment_pool_id" in row else 0
        found.setdefault(devices[index], []).append(Segment(
            addresses[index], sizes[index], streams[index], pool, _small(row, sizes[index]),
            _flag(row.get("is_expandable", False)), _blocks(blocks[index], addresses[index], stacks),
            stacks.stack(row.get("frames"))))
    for segments in found.values():
        segments.sort(key=lambda segment: segment.address)
    return {device: tuple(segments) for device, segments in found.items()}


def _blocks(rows: list[dict[str, Any]], start: int, stacks: Interner) -> tuple[Block, ...]:
    sizes = _columns.sizes(rows, "size", "block")
    found: list[Block] = []
    following = start
    for row, size in zip(rows, sizes, strict=True):
        told = row.get("state")
        if type(told) is not str or told not in _STATES:
            raise Refused(f"The state of a block is {_shown(told)}, and must be one of {', '.join(_STATES)}.")
        requested, frames = _request(row, size)
        address = _address(row.get("address", following))
        found.append(Block(address, size, requested, _STATES[told], stacks.stack(frames)))
        following = address + size
    found.sort(key=lambda block: block.address)
    return tuple(found)


def _request(row: dict[str, Any], size: int) -> tuple[int, Any]:
    """What was asked for, and from where. Until 2.0 that stood in the block's history, newest first."""
    requested, frames, history = row.get("requested_size", size), row.get("frames"), row.get("history")
    if history:
        newest = _columns.dicts(history, "entries of a block's history")[0]
        requested = row.get("requested_size", newest.get("real_size", size))
        frames = newest.get("frames") if frames is None else frames
    if type(requested) is not int or not 0 <= requested <= MAX_SIZE:
        raise Refused(f"The requested size of a block is {_shown(requested)}, and must be between 0 and "
                      f"{MAX_SIZE}.")
    return requested, frames


def _address(told: Any) -> int:
    if type(told) is not int or not 0 <= told < MAX_ADDRESS:
        raise Refused(f"The address of a block is {_shown(told)}, and must be between 0 and "
                      f"{MAX_ADDRESS - 1}.")
    return told


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
