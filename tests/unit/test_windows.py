"""Sliding windows: edges and closed forms (tests/property compares them with a naive recomputation)."""

from __future__ import annotations

import pytest

from kvobs.windows import SlidingWindow, WindowStats


def test_an_empty_window_has_no_values() -> None:
    """Nothing seen is a count of 0 and no mean, variance, minimum or maximum."""
    assert SlidingWindow(10).stats() == WindowStats(0, None, None, None, None)


@pytest.mark.parametrize("width", [0, -1])
def test_a_window_needs_a_width(width: int) -> None:
    """A width that is not positive is refused in one sentence."""
    with pytest.raises(ValueError, match=r"^A window's width must be a positive number of nanoseconds\.$"):
        SlidingWindow(width)


def test_the_edges_of_a_window() -> None:
    """A sample counts while it is younger than the width, and no longer when it is exactly as old."""
    window = SlidingWindow(10)
    window.push(100, 7)
    window.advance(109)
    assert len(window) == 1
    window.advance(110)
    assert window.stats() == WindowStats(0, None, None, None, None)


def test_the_values_one_to_n() -> None:
    """The integers 1..n have mean (n + 1) / 2 and population variance (n² - 1) / 12."""
    window = SlidingWindow(1_000)
    for value in range(1, 102):
        window.push(value, value)
    assert window.stats() == WindowStats(101, 51.0, (101**2 - 1) / 12, 1, 101)


def test_a_small_variance_on_a_large_mean_is_exact() -> None:
    """Values 10¹⁵ + {0, 1} have variance 1/4, which float sums would lose, also after larger ones slid out."""
    window = SlidingWindow(10)
    window.push(0, 10**18)
    window.push(15, 10**15)
    window.push(16, 10**15 + 1)
    assert window.stats().variance == 0.25


def test_a_late_sample_counts_at_the_newest_time() -> None:
    """A sample older than the newest is neither lost nor able to leave before it."""
    window = SlidingWindow(10)
    window.push(100, 1)
    window.push(50, 3)
    window.advance(109)
    assert window.stats() == WindowStats(2, 2.0, 1.0, 1, 3)
    window.advance(110)
    assert len(window) == 0
