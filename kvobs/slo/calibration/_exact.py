"""Two exact tests: Fisher's of a 2 x 2 table, and the two-sample test of Kolmogorov and Smirnov."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_NEGLIGIBLE = 1e-40  # relative to the likeliest table
_TIE = 1 + 1e-7  # tables whose probabilities differ by rounding alone are equally likely
MOST_CELLS = 1_000_000  # of the lattice of an exact Kolmogorov-Smirnov test; beyond it the limit law is used


class Distance(NamedTuple):
    """The largest distance of two distribution functions, its p-value, and whether that is exact or the limit's."""

    distance: float
    p_value: float
    exact: bool


def fisher_two_sided(misses: tuple[int, int], samples: tuple[int, int]) -> float:
    """The probability, given the margins, of a table that is no likelier than the one seen (Fisher's exact test).

    Args:
        misses: in the first and in the second group.
        samples: the size of either group.
    """
    lowest, chances = _hypergeometric(sum(samples), sum(misses), samples[0])
    at = misses[0] - lowest
    seen = chances[at] if 0 <= at < len(chances) else 0.0
    return min(math.fsum(chance for chance in chances if chance <= seen * _TIE), 1.0)


def fisher_greater(both: int, first: int, second: int, total: int) -> float:
    """The probability, given the margins, of ``both`` or more joint hits, of ``first`` and ``second`` hits in total."""
    lowest, chances = _hypergeometric(total, first, second)
    return min(math.fsum(chances[max(both - lowest, 0):]), 1.0)


def kolmogorov_smirnov(first: Sequence[float], second: Sequence[float]) -> Distance:
    """Whether two samples come from one distribution, from the distance of their empirical distribution functions.

    The exact p-value counts lattice paths (J. L. Hodges, "The significance probability of the Smirnov two-sample
    test", 1957), the limit is Kolmogorov's law (N. Smirnov, 1948). Ties make either an upper bound.
    """
    n, m = len(first), len(second)
    a, b = sorted(first), sorted(second)
    i = j = widest = 0
    while i < n and j < m:
        value = min(a[i], b[j])
        while i < n and a[i] == value:
            i += 1
        while j < m and b[j] == value:
            j += 1
        widest = max(widest, abs(i * m - j * n))
    distance = widest / (n * m)
    if n * m <= MOST_CELLS:
        return Distance(distance, _touching(n, m, widest), True)
    return Distance(distance, _kolmogorov(distance * math.sqrt(n * m / (n + m))), False)


def _hypergeometric(total: int, marked: int, drawn: int) -> tuple[int, list[float]]:
    """The chances of drawing a number of marked ones, from the first number whose chance is not negligible."""
    least, most = max(0, drawn + marked - total), min(drawn, marked)
    mode = min(max((drawn + 1) * (marked + 1) // (total + 2), least), most)
    rest = total - marked - drawn
    below, term = [], 1.0
    for x in range(mode, least, -1):
        term *= x * (rest + x) / ((marked - x + 1) * (drawn - x + 1))
        if term < _NEGLIGIBLE:
            break
        below.append(term)
    above, term = [], 1.0
    for x in range(mode, most):
        term *= (marked - x) * (drawn - x) / ((x + 1) * (rest + x + 1))
        if term < _NEGLIGIBLE:
            break
        above.append(term)
    weights = [*reversed(below), 1.0, *above]
    whole = math.fsum(weights)
    return mode - len(below), [weight / whole for weight in weights]


def _touching(n: int, m: int, widest: int) -> float:
    """The share of lattice paths from (0, 0) to (n, m) that reach a point (i, j) with abs(i m - j n) >= widest."""
    if not widest:
        return 1.0
    column = [float(j * n >= widest) for j in range(m + 1)]
    for j in range(1, m + 1):
        column[j] = max(column[j], column[j - 1])
    for i in range(1, n + 1):
        column[0] = 1.0 if i * m >= widest else column[0]
        for j in range(1, m + 1):
            if abs(i * m - j * n) >= widest:
                column[j] = 1.0
            else:
                column[j] = (column[j] * i + column[j - 1] * j) / (i + j)
    return min(column[m], 1.0)


def _kolmogorov(x: float) -> float:
    """P(K > x) of Kolmogorov's law; for small x by the form that converges there (Jacobi's theta function)."""
    if x < 0.2:
        return 1.0  # within 1e-12
    if x < 1.0:
        return 1 - math.sqrt(2 * math.pi) / x * math.fsum(
            math.exp(-((2 * k - 1) * math.pi / x) ** 2 / 8) for k in range(1, 6))
    return 2 * math.fsum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 8))
