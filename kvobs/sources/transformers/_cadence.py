"""Which decode steps are sampled: bursts of three running, in one of N groups of three, N by what sampling costs."""

from __future__ import annotations

import math

BURST = 3  # the article's rule needs three consecutive steps
MOST = 4096
SHARE = 0.6  # of the overhead that is allowed: the rest is for what is always observed
_NEW = 0.3  # weight of the newest step in the running means


class Cadence:
    """The interval of one model. ``budget`` is the share of the step time that sampling may take, 0 to 1.

    The first burst of a model runs before anything is known of its cost, so that short runs see something.
    """

    __slots__ = ("_budget", "_cost_ns", "_step_ns", "every")

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._cost_ns = self._step_ns = 0.0
        self.every = 1

    def took(self, cost_ns: int, step_ns: int) -> None:
        """A sampled step cost ``cost_ns`` beside ``step_ns`` of the model's own; chooses the interval anew.

        Sampling 3 of 3 N steps costs cost / N per step. It rises at once and falls by at most an eighth.
        """
        first = not self._step_ns
        self._cost_ns = cost_ns if first else (1 - _NEW) * self._cost_ns + _NEW * cost_ns
        self._step_ns = step_ns if first else (1 - _NEW) * self._step_ns + _NEW * step_ns
        wanted = min(MOST, max(1, math.ceil(self._cost_ns / (self._budget * max(self._step_ns, 1.0)))))
        self.every = wanted if wanted > self.every else max(wanted, self.every - max(1, self.every // 8))


class Place:
    """Where one cache stands in its cycle of decode steps."""

    __slots__ = ("_position", "_sampled", "steps")

    def __init__(self) -> None:
        self._position = self.steps = 0
        self._sampled = -1

    def due(self, every: int) -> bool:
        """Count a decode step; whether it is sampled."""
        self.steps += 1
        if self._position >= BURST * every:
            self._position = 0
        self._position += 1
        return self._position <= BURST

    def consecutive(self) -> bool:
        """Whether the step before the one that is being sampled was sampled too; remembers this one."""
        before, self._sampled = self._sampled, self.steps
        return before == self.steps - 1
