"""What contradicts itself in a snapshot, in whole sentences: counted, never one sentence per case."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Any

from kvobs.allocator.recording import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OTHER,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    SNAPSHOT,
    UNKNOWN,
    Events,
)
from kvobs.allocator.settings import MIN_BLOCK, SMALL_SEGMENT, SMALL_SIZE
from kvobs.allocator.state import INACTIVE, Block, State

_SEGMENTS = frozenset({SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP})
_PLACED = _SEGMENTS | {ALLOC, FREE_REQUESTED, FREE_COMPLETED}


def of_state(device: int, state: State) -> list[str]:
    """Segments and blocks against each other and against the allocator's rules."""
    found = _Sentences(f"Device {device}: ")
    gaps = [segment.size - sum(block.size for block in segment.blocks) for segment in state]
    short, over = [gap for gap in gaps if gap > 0], [-gap for gap in gaps if gap < 0]
    found.say(len(short), "segment is not filled by its blocks", "segments are not filled by their blocks",
              f", {sum(short):,} bytes belong to no block")
    found.say(len(over), "segment is smaller than its blocks together",
              "segments are smaller than their blocks together", f", by {sum(over):,} bytes in all")
    found.say(sum(not segment.size for segment in state), "segment has size 0", "segments have size 0")
    found.say(sum(first.address + first.size > second.address for first, second in pairwise(state)),
              "segment reaches into the next one", "segments reach into the next one")
    found.say(sum(not _contiguous(segment.address, segment.blocks) for segment in state),
              "segment has blocks that leave a hole, overlap, or begin elsewhere",
              "segments have blocks that leave a hole, overlap, or begin elsewhere")
    blocks = [block for segment in state for block in segment.blocks]
    found.say(sum(block.address % MIN_BLOCK > 0 or block.size % MIN_BLOCK > 0 for block in blocks),
              f"block has an address or size that is no multiple of {MIN_BLOCK}",
              f"blocks have an address or size that is no multiple of {MIN_BLOCK}")
    found.say(sum(block.state != INACTIVE and block.requested > block.size for block in blocks),
              "block is smaller than what was requested", "blocks are smaller than what was requested")
    found.say(sum(segment.small and segment.size % SMALL_SEGMENT > 0 for segment in state),
              f"segment of small requests is no multiple of {SMALL_SEGMENT:,} bytes",
              f"segments of small requests are no multiple of {SMALL_SEGMENT:,} bytes")
    found.say(sum(segment.small and block.state != INACTIVE and block.size > SMALL_SIZE
                  for segment in state for block in segment.blocks),
              f"block of more than {SMALL_SIZE:,} bytes is in use in a segment of small requests",
              f"blocks of more than {SMALL_SIZE:,} bytes are in use in segments of small requests")
    return found.sentences


def of_sums(rows: list[dict[str, Any]]) -> list[str]:
    """The sums that segments carry, against their blocks."""
    found = _Sentences("")
    for key, states in (("allocated_size", ("active_allocated",)),
                        ("active_size", ("active_allocated", "active_pending_free", "active_awaiting_free"))):
        wrong = differ = 0
        for row in rows:
            told = row.get(key)
            if type(told) is int:
                total = sum(block["size"] for block in row.get("blocks", ()) if block["state"] in states)
                wrong += told != total
                differ += abs(told - total)
        found.say(wrong, f"segment has an {key} that its blocks contradict", f"segments have an {key} that their "
                  "blocks contradict", f", by {differ:,} bytes in all" if differ < 1 << 70 else "")
    return found.sentences


def of_events(device: int, events: Events, state: State) -> list[str]:
    """The history against itself and against the last state."""
    found = _Sentences(f"Device {device}: ")
    alive: set[int] = set()
    requested: set[int] = set()
    twice = unasked = 0
    for action, address in zip(events.action, events.address, strict=True):
        if action == ALLOC:
            if address in alive:
                twice += 1
            alive.add(address)
        elif action == FREE_REQUESTED:
            requested.add(address)
        elif action == FREE_COMPLETED:
            if address not in requested:
                unasked += address in alive
            else:
                requested.remove(address)
            alive.discard(address)
    askew = 0
    if any(address % MIN_BLOCK for address in set(events.address)):
        askew = sum(address % MIN_BLOCK > 0 and action in _PLACED
                    for action, address in zip(events.action, events.address, strict=True))
    found.say(unasked, "free was completed without having been requested",
              "frees were completed without having been requested")
    found.say(twice, "alloc is at an address that is allocated already", "allocs are at addresses that are allocated "
              "already")
    found.say(askew, f"event has an address that is no multiple of {MIN_BLOCK}",
              f"events have an address that is no multiple of {MIN_BLOCK}")
    found.say(events.action.count(OTHER), "event is of a kind that kvobs does not know, or without an address or size",
              "events are of a kind that kvobs does not know, or without an address or size")
    timeless = events.time_us.count(UNKNOWN)
    if timeless:  # the mark that a snapshot leaves is no event of the program
        timeless = sum(time == UNKNOWN and action != SNAPSHOT
                       for action, time in zip(events.action, events.time_us, strict=True))
    found.say(timeless, "event has no time", "events have no time")
    if state and not any(action in _SEGMENTS for action in set(events.action)):
        found.say(_outside(events, state), "alloc lies in no segment, though the history adds and removes none",
                  "allocs lie in no segment, though the history adds and removes none")
    found.say(_astray(alive, state), "alloc is alive at the end of the history, and no such block is in the last state",
              "allocs are alive at the end of the history, and no such blocks are in the last state")
    return found.sentences


def _outside(events: Events, state: State) -> int:
    """Allocs that are not wholly within a segment of the last state."""
    starts = [segment.address for segment in state]
    ends = [segment.address + segment.size for segment in state]
    outside = 0
    for action, address, size in zip(events.action, events.address, events.size, strict=True):
        if action == ALLOC:
            index = bisect_right(starts, address) - 1
            outside += index < 0 or address + size > ends[index]
    return outside


def _astray(alive: set[int], state: State) -> int:
    """Addresses at which the last state has no block in use."""
    used = {block.address for segment in state for block in segment.blocks if block.state != INACTIVE}
    return sum(address not in used for address in alive)


def _contiguous(start: int, blocks: tuple[Block, ...]) -> bool:
    for block in blocks:
        if block.address != start:
            return False
        start += block.size
    return True


class _Sentences:
    def __init__(self, start: str) -> None:
        self.start = start
        self.sentences: list[str] = []

    def say(self, many: int, one: str, several: str, detail: str = "") -> None:
        """One sentence about ``many`` things; none about none."""
        if many:
            self.sentences.append(f"{self.start}{many:,} {one if many == 1 else several}{detail}.")
