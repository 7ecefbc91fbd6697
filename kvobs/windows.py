"""Pure sliding windows over timed samples, O(1) amortised per sample and exact.

Sums are Python integers, so a window's mean and variance carry no rounding from what slid out of it: the
textbook formula n·Σx² - (Σx)² is exact here, where floats would cancel.
"""

from __future__ import annotations

from collections import deque

import msgspec


class WindowStats(msgspec.Struct, frozen=True, gc=False):
    """A window's content. ``variance`` is the population variance in squared sample units, absent for one sample."""

    count: int
    mean: float | None
    variance: float | None
    minimum: int | None
    maximum: int | None


class SlidingWindow:
    """The samples of the last ``width_ns`` nanoseconds: those with ``now - width < t <= now``.

    Samples must come in time order; one that is older than the newest is taken at the newest's time, so a
    late sample is counted rather than lost.
    """

    __slots__ = ("_highs", "_lows", "_samples", "_sum", "_sum_squares", "width_ns")

    def __init__(self, width_ns: int) -> None:
        if width_ns <= 0:
            raise ValueError("A window's width must be a positive number of nanoseconds.")
        self.width_ns = width_ns
        self._samples: deque[tuple[int, int]] = deque()
        self._lows: deque[tuple[int, int]] = deque()
        self._highs: deque[tuple[int, int]] = deque()
        self._sum = 0
        self._sum_squares = 0

    def push(self, t_ns: int, value: int) -> None:
        """Add a sample and let those that are too old fall out."""
        samples = self._samples
        if samples and t_ns < samples[-1][0]:
            t_ns = samples[-1][0]
        sample = (t_ns, value)
        samples.append(sample)
        self._sum += value
        self._sum_squares += value * value
        # Monotonic deques: their heads are the window's minimum and maximum.
        lows, highs = self._lows, self._highs
        while lows and lows[-1][1] >= value:
            lows.pop()
        lows.append(sample)
        while highs and highs[-1][1] <= value:
            highs.pop()
        highs.append(sample)
        # The deques hold samples too: while the oldest one is young enough, so is everything.
        if samples[0][0] <= t_ns - self.width_ns:
            self.advance(t_ns)

    def advance(self, now_ns: int) -> None:
        """Let samples at or before ``now_ns - width_ns`` fall out."""
        edge = now_ns - self.width_ns
        samples, lows, highs = self._samples, self._lows, self._highs
        if samples and samples[-1][0] <= edge:  # all at once: the usual case after a pause
            samples.clear()
            lows.clear()
            highs.clear()
            self._sum = self._sum_squares = 0
            return
        while samples and samples[0][0] <= edge:
            _, value = samples.popleft()
            self._sum -= value
            self._sum_squares -= value * value
        while lows and lows[0][0] <= edge:
            lows.popleft()
        while highs and highs[0][0] <= edge:
            highs.popleft()

    def stats(self) -> WindowStats:
        """The window now; all but ``count`` are absent when it is empty."""
        n = len(self._samples)
        if not n:
            return WindowStats(0, None, None, None, None)
        variance = (n * self._sum_squares - self._sum * self._sum) / (n * n) if n > 1 else None
        return WindowStats(n, self._sum / n, variance, self._lows[0][1], self._highs[0][1])

    def __len__(self) -> int:
        return len(self._samples)
