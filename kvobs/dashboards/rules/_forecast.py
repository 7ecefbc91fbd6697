"""When a share that is left will be used up: a robust line, a band around it, and a second trend that must agree.

The line is J. W. Tukey's resistant line (Exploratory Data Analysis, 1977) over the last 15 minutes, cut into thirds of
5 minutes. R and L are the medians of the last and of the first third, 10 minutes apart, so that a third of each may be
wrong without moving it:

    slope     = (R - L) / 600 s
    line      = R + 150 s x slope     the line's value now, half a third after R
    forecast  = R + 1050 s x slope    its value in 15 minutes

``excess`` is what a sample was above the line of its time. Its 84th percentile over 15 minutes, at least 0, is the
upper standard deviation s of a normal noise. It is one-sided because only values above the line speak against a
forecast of too little: samples below it, as at the beginning of a fall, must not widen the band. A median of n values
has the variance pi / 2n of their variance; so the forecast R + k (R - L), k = 1.75, n = 10, and one sample around it
have together

    band      = 2 s x sqrt(1 + ((1 + k)^2 + k^2) x pi / 2n)     the 97.7th percentile, 3.27 s

The alert holds while forecast + band <= 0 and the straight line of least squares through the last 5 minutes
(``predict_linear``) is at or below 0 in 15 minutes too. A noise that remembers itself is underestimated; the second
trend and the 4.5 minutes of waiting stand against that. They are as long because a drop that has ended looks like a
fall until the last 5 minutes are flat: one from 90 to 10 % within 4 minutes for 240 s, a slower one for longer. Nothing
is said until there are 27 of the 30 samples of the window, and 10 of ``excess``: after about 20 minutes.
"""

from __future__ import annotations

import math

STEP_S = 30
THIRD_S = 300
WINDOW_S = 3 * THIRD_S
HORIZON_S = 900
WAIT = "4m30s"
MOST_SAMPLES = WINDOW_S // STEP_S
LEAST_SAMPLES = MOST_SAMPLES * 9 // 10
LEAST_EXCESS = THIRD_S // STEP_S
_APART_S = 2 * THIRD_S
_BAND = 2 * math.sqrt(1 + (((1 + (k := (THIRD_S / 2 + HORIZON_S) / _APART_S)) ** 2 + k**2)
                           * math.pi / 2 / (THIRD_S // STEP_S)))


def recorded(series: str) -> list[tuple[str, str]]:
    """The rules that the forecast of ``series`` (``a:b:ratio``, recorded every 30 s) needs, in this order."""
    stem = series.rpartition(":")[0]
    return [(f"{stem}:line", _at(series, 0)),
            (f"{stem}:excess", f"{series} - {stem}:line"),
            (f"{stem}:forecast15m", _at(series, HORIZON_S)),
            (f"{stem}:band15m", f"{_BAND:.4g} * clamp_min(\n"
             f"  quantile_over_time(0.8413, {stem}:excess[15m]), 0\n"
             f") and count_over_time({stem}:excess[15m]) >= {LEAST_EXCESS}")]


def exhaustion(series: str) -> str:
    """What is left now, while it is forecast to be used up within 15 minutes."""
    stem = series.rpartition(":")[0]
    return (f"{series}\nand {stem}:forecast15m + {stem}:band15m <= 0\n"
            f"and predict_linear({series}[5m], {HORIZON_S}) <= 0")


def _at(series: str, ahead_s: int) -> str:
    """The resistant line ``ahead_s`` from now; absent while the series is younger than its window."""
    last = f"quantile_over_time(0.5, {series}[5m])"
    first = f"quantile_over_time(0.5, {series}[5m] offset 10m)"
    weight = (THIRD_S / 2 + ahead_s) / _APART_S
    return (f"({1 + weight:g} * {last}\n  - {weight:g} * {first})\n"
            f"and count_over_time({series}[15m]) >= {LEAST_SAMPLES}")
