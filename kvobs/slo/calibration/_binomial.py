"""Tails of the binomial distribution to nearly all of a float's digits, and what follows from them.

Single probabilities are found by C. Loader's saddle-point form ("Fast and Accurate Computation of Binomial
Probabilities", 2000): differences of log-gammas would lose nine of sixteen digits at a million samples. Tails are sums
of them by the ratio of neighbours.
"""

from __future__ import annotations

import math

_NEGLIGIBLE = 1e-18  # of a sum: further terms fall at least geometrically


def pmf(k: int, n: int, p: float) -> float:
    """P(Bin(n, p) = k), for 0 < p < 1."""
    if not 0 <= k <= n:
        return 0.0
    if k == 0:
        return math.exp(n * math.log1p(-p))
    if k == n:
        return math.exp(n * math.log(p))
    exponent = (_stirling_error(n) - _stirling_error(k) - _stirling_error(n - k)
                - _deviance(k, n * p) - _deviance(n - k, n * (1 - p)))
    return math.exp(exponent) * math.sqrt(n / (2 * math.pi * k * (n - k)))


def lower_tail(k: int, n: int, p: float) -> float:
    """P(Bin(n, p) <= k), for 0 < p < 1: the p-value of "the rate is p or more" after k misses in n."""
    if k < 0:
        return 0.0
    if k >= n:
        return 1.0
    if k <= n * p:
        return _sum_down(k, n, p)
    return 1 - _sum_down(n - k - 1, n, 1 - p)  # that many or fewer non-misses


def upper_bound(k: int, n: int, delta: float) -> float:
    """The exact upper bound on a rate at confidence 1 - delta after k misses in n (Clopper and Pearson, 1934).

    It is the p at which P(Bin(n, p) <= k) = delta, so it is at most alpha just where ``lower_tail(k, n, alpha)`` is
    at most delta.
    """
    if k >= n:
        return 1.0
    low, high = 0.0, 1.0
    at = min((k + math.sqrt(k) + 1) / n, (k / n + 1) / 2)
    for _ in range(200):
        tail = lower_tail(k, n, at)
        low, high = (at, high) if tail > delta else (low, at)
        # Newton's step for log(tail), whose derivative is -n P(Bin(n - 1, p) = k) / tail; where it leaves the bracket,
        # the bracket's middle.
        slope = n * pmf(k, n - 1, at)
        step = tail * math.log(tail / delta) / slope if slope and tail else math.inf
        if abs(step) <= 1e-13 * at:
            break
        at += step
        if not low < at < high:
            at = (low + high) / 2
    return at


def interval(k: int, n: int, delta: float = 0.05) -> tuple[float, float]:
    """The exact interval of a rate at confidence 1 - delta after k of n (Clopper and Pearson, 1934). n is not 0."""
    return 1 - upper_bound(n - k, n, delta / 2), upper_bound(k, n, delta / 2)


def needed(k: int, alpha: float, delta: float) -> int:
    """The least n at which k misses still reject "the rate is above alpha" at level delta.

    For k = 0 it is the least n with (1 - alpha)^n <= delta: 59 at alpha = delta = 0.05, 45 at delta = 0.1.
    """
    low, guess = k, int(k / alpha)
    if lower_tail(k, guess, alpha) > delta:
        low = guess
    step = int(math.sqrt(k) / alpha) + 1
    while lower_tail(k, low + step, alpha) > delta:
        low, step = low + step, 2 * step
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if lower_tail(k, middle, alpha) > delta else (low, middle)
    return high


def most_misses(n: int, alpha: float, delta: float) -> int:
    """The most misses in n that still reject "the rate is above alpha" at level delta; -1 where none do."""
    low, high = -1, n  # n misses never reject
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if lower_tail(middle, n, alpha) <= delta else (low, middle)
    return low


def _sum_down(k: int, n: int, p: float) -> float:
    """The sum of the probabilities of 0 to k, where k is at most the mean: terms fall from k downward."""
    term = total = 1.0
    odds = (1 - p) / p
    for i in range(k, 0, -1):
        term *= i / (n - i + 1) * odds
        total += term
        if term < _NEGLIGIBLE * total:
            break
    return min(total * pmf(k, n, p), 1.0)


def _stirling_error(n: int) -> float:
    """log(n!) - log(sqrt(2 pi n) (n/e)^n)."""
    if n < 16:
        return math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi)
    square = n * n
    return (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - 1 / 1188 / square) / square) / square) / square) / n


def _deviance(x: float, mean: float) -> float:
    """The deviance x log(x / mean) + mean - x, without cancellation where the two are close."""
    if abs(x - mean) >= 0.1 * (x + mean):
        return x * math.log(x / mean) + mean - x
    v = (x - mean) / (x + mean)
    total, power = (x - mean) * v, 2 * x * v
    for j in range(1, 1000):
        power *= v * v
        more = total + power / (2 * j + 1)
        if more == total:
            break
        total = more
    return total
