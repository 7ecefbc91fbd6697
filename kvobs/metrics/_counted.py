"""Values that stand for ones which were only counted by bucket and summed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

_ABOVE = 1 + 1e-9  # a bucket's lower bound itself belongs to the one below


def representatives(bounds: Sequence[float], counts: Sequence[int], total: float) -> Iterator[tuple[float, int]]:
    """One (value, times) per bucket that counts something: it lies in its bucket, and all together add up to ``total``.

    They lie at one common share of the way through each bucket's width; what is above the last bound takes the rest.
    Where ``total`` contradicts the counts (a reading that was torn by a running thread), the sum is as near as it gets.
    """
    finite = [(low, high, times) for low, high, times in zip((0.0, *bounds), bounds, counts, strict=False) if times]
    beyond, last = counts[len(bounds)], bounds[-1]
    least = math.fsum(low * times for low, _, times in finite)
    width = math.fsum((high - low) * times for low, high, times in finite)
    if beyond:
        share = min(0.5, (total - least - beyond * last * _ABOVE) / width) if width else 0.5
    else:
        share = (total - least) / width if width else 0.5
    share = min(1.0, max(share, _ABOVE - 1))
    for low, high, times in finite:
        yield min(high, low + share * (high - low)), times
    if beyond:
        yield max(last * _ABOVE, (total - least - share * width) / beyond), beyond
