"""Verdicts on paged pools, against a pool that is played: every state of every small pool."""

from __future__ import annotations

import itertools
import re

import pytest

from kvobs.allocator.paged import PagedState, paged_verdict


def play(needs: int, used: int, cached: int, free: int, kept: int, found: int) -> tuple[str, int, int]:
    """Admit a request to a pool by vLLM's rule: the verdict, blocks evicted for it, blocks given back before.

    While others run, ``kept`` blocks that nobody holds must be left. What running requests give back is had one block
    after another; free blocks are handed out before cached ones. ``found`` blocks are its own already.
    """
    given_back = 0
    while needs + (kept if used else 0) > cached + free:
        if not used:
            return "CAPACITY", 0, given_back
        used, free, given_back = used - 1, free + 1, given_back + 1
    if given_back:
        return "WAIT", 0, given_back
    evicted = sum(block == "cached" for block in (["free"] * free + ["cached"] * cached)[:needs])
    return ("RECLAIM" if evicted else "SERVED"), evicted, 0


def test_every_small_pool_is_judged_as_it_behaves() -> None:
    """In all pools of up to 7 blocks, with and without a watermark, verdict and numbers are the played pool's."""
    seen = set()
    for used, cached, free, pinned in itertools.product(range(4), range(4), range(4), range(2)):
        if used + cached + free + pinned > 7:
            continue
        state = PagedState(used + cached + free + pinned, used, cached, free, pinned)
        for needs, kept in itertools.product(range(9), range(4) if used else (0,)):
            verdict, sentence = paged_verdict(needs, state, kept=kept)
            expected, evicted, given_back = play(needs, used, cached, free, kept, 0)
            numbers = [int(one) for one in re.findall(r"\d+", sentence)]
            assert verdict == expected, (needs, state, kept)
            assert numbers[0] == needs
            if verdict == "CAPACITY":
                assert numbers[1:] == [used + cached + free]
            elif verdict == "WAIT":
                assert (numbers[2], numbers[3]) == (used, given_back), (needs, state, kept)
            elif verdict == "RECLAIM":
                assert numbers[1:] == [free, evicted]
            else:
                assert numbers[1:] == [free]
            seen.add((verdict, kept > 0))
    assert seen == {(verdict, kept) for verdict in ("SERVED", "RECLAIM", "WAIT") for kept in (False, True)} | {
        ("CAPACITY", False), ("CAPACITY", True)}


@pytest.mark.parametrize(("needs", "found", "verdict"), [(4, 0, "WAIT"), (4, 2, "WAIT"), (4, 3, "CAPACITY")])
def test_a_prefix_that_the_pool_has_takes_part_of_it(needs: int, found: int, verdict: str) -> None:
    """A request of more blocks than the pool is never admitted, however many of them the prefix cache has."""
    assert paged_verdict(needs, PagedState(7, 6 - found, 0, 0, 1), found=found)[0] == verdict


def test_sentences_read_as_english() -> None:
    """One block is not blocks, and the sentences end."""
    assert paged_verdict(1, PagedState(8, 0, 0, 7, 1)) == ("SERVED", "It needs 1 block, and 7 are free.")
    assert paged_verdict(3, PagedState(2000, 0, 1998, 1, 1)) == (
        "RECLAIM", "It needs 3 blocks: 1 free ones and 2 that are evicted from the prefix cache.")
    assert paged_verdict(1200, PagedState(2000, 1000, 900, 99, 1)) == (
        "WAIT", "It needs 1,200 blocks; 999 can be had, so running requests, which hold 1,000, must give back 201.")
    assert paged_verdict(2000, PagedState(2000, 0, 0, 1999, 1)) == (
        "CAPACITY", "It needs 2,000 blocks, and the pool has 1,999 in all: it can never be admitted.")
