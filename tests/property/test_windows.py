"""Sliding windows against a naive recomputation in exact fractions."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from kvobs.windows import SlidingWindow, WindowStats

TIMES = st.integers(-50, 400)
VALUES = st.integers(-(10**12), 10**12) | st.integers(0, 3)
PUSH = st.tuples(st.just("push"), TIMES, VALUES)
ADVANCE = st.tuples(st.just("advance"), TIMES, st.just(0))


def naive(samples: list[tuple[int, int]], now: int, width: int) -> WindowStats:
    """Every figure from its definition, over the samples with now - width < t."""
    values = [Fraction(value) for t, value in samples if t > now - width]
    if not values:
        return WindowStats(0, None, None, None, None)
    mean = sum(values, Fraction(0)) / len(values)
    variance = sum(((value - mean) ** 2 for value in values), Fraction(0)) / len(values)
    spread = float(variance) if len(values) > 1 else None
    return WindowStats(len(values), float(mean), spread, int(min(values)), int(max(values)))


@given(st.integers(1, 120), st.lists(PUSH | ADVANCE, max_size=60))
def test_a_window_equals_its_definition(width: int, program: list[tuple[str, int, int]]) -> None:
    """After every push and advance, out of order or not, all five figures equal the exact recomputation."""
    window = SlidingWindow(width)
    samples: list[tuple[int, int]] = []
    for what, t, value in program:
        if what == "push":
            window.push(t, value)
            # A late sample counts, at the newest sample's time.
            now = max([t, *(time for time, _ in samples)])
            samples.append((now, value))
        else:
            window.advance(t)
            now = t
        samples = [sample for sample in samples if sample[0] > now - width]  # what fell out never comes back
        assert window.stats() == naive(samples, now, width)
        assert len(window) == len(samples)


@given(st.lists(st.tuples(st.integers(0, 5), VALUES), min_size=1, max_size=200), st.integers(1, 40))
def test_a_window_holds_no_more_than_its_samples(steps: list[tuple[int, int]], width: int) -> None:
    """After every push exactly the samples younger than the width are kept, so memory follows the window."""
    window, times = SlidingWindow(width), []
    for gap, value in steps:
        times.append((times[-1] if times else 0) + gap)
        window.push(times[-1], value)
        assert len(window) == sum(time > times[-1] - width for time in times)
