"""A share of few cases in words, with what is known of the true one."""

from __future__ import annotations

from kvobs.slo.calibration import interval


def share_of(number: int, cases: int) -> str:
    """``3 of 4 (75 %, 95 % interval 19 to 99 %)``; without cases it is not known."""
    if not cases:
        return "not known (no case)"
    low, high = interval(number, cases)
    return (f"{number:,} of {cases:,} ({100 * number / cases:.0f} %, 95 % interval {100 * low:.0f} to "
            f"{100 * high:.0f} %)")
