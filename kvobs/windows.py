"""Pure sliding windows over timed samples, exact; O(1) amortised per sample, O(samples) per reading.

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

    __slots__ = ("_samples", "width_ns")

    def __init__(self, width_ns: int) -> None:
        if width_ns <= 0:
            raise ValueError("A window's width must be a positive number of nanoseconds.")
        self.width_ns = width_ns
        self._samples: deque[tuple[int, int]] = deque()

    def push(self, t_ns: int, value: int) -> None:
        """Add a sample and let those that are too old fall out."""
        samples = self._samples
        if samples and t_ns < samples[-1][0]:
            t_ns = samples[-1][0]
        samples.append((t_ns, value))
        if samples[0][0] <= t_ns - self.width_ns:
            self.advance(t_ns)

    def advance(self, now_ns: int) -> None:
        """Let samples at or before ``now_ns - width_ns`` fall out."""
        samples, edge = self._samples, now_ns - self.width_ns
        while samples and samples[0][0] <= edge:
            samples.popleft()

    def stats(self) -> WindowStats:
        """The window now; all but ``count`` are absent when it is empty. Goes over its samples: once a second."""
        values = [value for _, value in self._samples]
        n = len(values)
        if not n:
            return WindowStats(0, None, None, None, None)
        total = sum(values)
        variance = (n * sum([value * value for value in values]) - total * total) / (n * n) if n > 1 else None
        return WindowStats(n, total / n, variance, min(values), max(values))

    def __len__(self) -> int:
        return len(self._samples)
