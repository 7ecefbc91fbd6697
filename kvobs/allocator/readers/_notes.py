"""What contradicts itself in a snapshot, in whole sentences: counted, never one sentence per case."""

from __future__ import annotations

from bisect import bisect_right
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
    UNKNOWN,
    Events,
)
from kvobs.allocator.settings import MIN_BLOCK, SMALL_SEGMENT, SMALL_SIZE
from kvobs.allocator.state import INACTIVE, State

_PLACED = frozenset({ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP})


def of_state(device: int, state: State) -> list[str]:
    """Segments and blocks against each other and against the allocator's rules."""
    found = _Sentences(f"Device {device}: ")
    gaps = [segment.size - sum(block.size for block in segment.blocks) for segment in state]
    short, over = [gap for gap in gaps if gap > 0], [-gap for gap in gaps if gap < 0]
    found.say(len(short), "segment", f"not filled by its blocks: {sum(short):,} bytes belong to no block")
    found.say(len(over), "segment", f"smaller than its blocks together, by {sum(over):,} bytes in all")
    found.say(sum(not segment.size for segment in state), "segment", "of size 0")
    found.say(sum(first.address + first.size > second.address for first, second in zip(state, state[1:], strict=False)),
              "segment", "overlapped by the next one")
    found.say(sum(not _contiguous(segment.address, segment.blocks) for segment in state), "segment",
              "not covered by its blocks in order: they leave a hole, overlap, or begin elsewhere")
    blocks = [block for segment in state for block in segment.blocks]
    found.say(sum(block.address % MIN_BLOCK > 0 or block.size % MIN_BLOCK > 0 for block in blocks), "block",
              f"not a multiple of {MIN_BLOCK} bytes in address or size, as the allocator's are")
    found.say(sum(block.state != INACTIVE and block.requested > block.size for block in blocks), "block",
              "smaller than what was requested of it")
    found.say(sum(segment.small and not segment.expandable and segment.size != SMALL_SEGMENT for segment in state),
              "segment", f"in the pool of small requests and not {SMALL_SEGMENT:,} bytes large")
    found.say(sum(segment.small and block.state != INACTIVE and block.requested > SMALL_SIZE
                  for segment in state for block in segment.blocks), "block",
              f"in the pool of small requests, for more than {SMALL_SIZE:,} bytes")
    return found.sentences


def of_sums(rows: list[dict[str, Any]]) -> list[str]:
    """The sums that segments carry, against their blocks."""
    found = _Sentences("")
    for key, states in (("allocated_size", ("active_allocated",)),
                        ("active_size", ("active_allocated", "active_pending_free", "active_awaiting_free"))):
        wrong = differ = 0
        for row in rows:
            told = row.get(key)
            if type(told) is not int:
                continue
            total = sum(block["size"] for block in row.get("blocks", ()) if block["state"] in states)
            wrong += told != total
            differ += abs(told - total)
        found.say(wrong, "segment", f"with an {key} that its blocks contradict, by "
                  f"{differ if differ < 1 << 70 else 'very many'} bytes in all")
    return found.sentences


def of_events(device: int, events: Events, state: State) -> list[str]:
    """The history against itself and against the last state."""
    found = _Sentences(f"Device {device}: ")
    alive: dict[int, int] = {}
    requested: set[int] = set()
    twice = unasked = askew = 0
    for action, address, size in zip(events.action, events.address, events.size, strict=True):
        if action == ALLOC:
            twice += address in alive
            alive[address] = size
        elif action == FREE_REQUESTED:
            requested.add(address)
        elif action == FREE_COMPLETED:
            unasked += alive.pop(address, None) is not None and address not in requested
            requested.discard(address)
        askew += action in _PLACED and address % MIN_BLOCK > 0
    found.say(unasked, "free", "completed without having been requested")
    found.say(twice, "alloc", "at an address that the history already holds as allocated")
    found.say(askew, "event", f"with an address that is not a multiple of {MIN_BLOCK}")
    found.say(sum(action == OTHER for action in events.action), "event", "of a kind that kvobs does not know, or without "
              "an address or size")
    if UNKNOWN in events.time_us and len(events):
        untimed = events.time_us.count(UNKNOWN)
        found.say(untimed, "event", "without a time")
    if alive and state:
        found.say(_astray(alive, state), "alloc", "alive at the end of the history, with no such block in the last state")
    return found.sentences


def _astray(alive: dict[int, int], state: State) -> int:
    """Addresses at which the last state has no block in use."""
    starts = [segment.address for segment in state]
    used: dict[int, set[int]] = {}
    missing = 0
    for address in alive:
        index = bisect_right(starts, address) - 1
        if index not in used:
            used[index] = set() if index < 0 else {
                block.address for block in state[index].blocks if block.state != INACTIVE}
        missing += address not in used[index]
    return missing


def _contiguous(start: int, blocks: tuple[Any, ...]) -> bool:
    for block in blocks:
        if block.address != start:
            return False
        start += block.size
    return True


class _Sentences:
    def __init__(self, start: str) -> None:
        self.start = start
        self.sentences: list[str] = []

    def say(self, many: int, what: str, rest: str) -> None:
        """One sentence about ``many`` things; none about none."""
        if many:
            verb = "is" if many == 1 else "are"
            self.sentences.append(f"{self.start}{many:,} {what}{'' if many == 1 else 's'} {verb} {rest}.")
