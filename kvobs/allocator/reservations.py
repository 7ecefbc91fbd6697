"""Which mapped ranges belong to the same expandable segment; a snapshot does not tell."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from kvobs.allocator.settings import LARGE_SEGMENT
from kvobs.allocator.state import Segment, State

FARTHEST = 1 << 40  # bytes: no expandable segment reserves more than 1.125 times the memory of its device


class Pages(NamedTuple):
    """Pages that were mapped or unmapped at some time."""

    address: int
    stream: int
    small: bool


def reservations(state: State, pages: Iterable[Pages] = (),
                 large_page: int = LARGE_SEGMENT) -> list[tuple[int, list[Segment]]]:
    """Segments with the address where their reservation begins; those of one expandable segment together.

    Mapped ranges of one stream, pool and kind with nothing else between them are taken for one expandable segment;
    ``pages`` of that kind in front of its first range, whole ones away from it, for its beginning.
    """
    ordered = sorted(state, key=lambda one: one.address)
    starts = [segment.address for segment in ordered]
    chains: list[list[Segment]] = []
    open_chains: dict[tuple[int, int, bool], list[Segment]] = {}
    for segment in ordered:
        key = segment.stream, segment.pool, segment.small
        chain = open_chains.get(key)
        if (segment.expandable and chain is not None and segment.address - chain[0].address < FARTHEST
                and starts[bisect_right(starts, chain[-1].address)] == segment.address):
            chain.append(segment)
            continue
        chains.append([segment])
        if segment.expandable:
            open_chains[key] = chains[-1]
    bases = {chain[0].address: chain[0].address for chain in chains}
    for page in pages:
        following = bisect_right(starts, page.address)
        if following == len(ordered):
            continue
        first = ordered[following]
        away = first.address - page.address
        if (first.expandable and (first.stream, first.small) == (page.stream, page.small) and first.address in bases
                and away < FARTHEST and (page.small or away % large_page == 0)
                and (not following or _beyond(ordered[following - 1], page.address, away))):
            bases[first.address] = min(bases[first.address], page.address)
    return [(bases[chain[0].address], chain) for chain in chains]


def _beyond(segment: Segment, address: int, away: int) -> bool:
    """Whether an address lies behind the reservation of a segment in front of it, which has as many addresses as the
    one that begins ``away`` bytes or more before its own first segment.
    """
    ends = segment.address + segment.size <= address
    return ends and (not segment.expandable or address - segment.address > away)
