"""The overhead guard: decides, once a second, how much kvobs may do. Pure: time and sums come in as values.

Level 0 observes all that is configured, level 1 leaves out deep sampling, level 2 lets everything pass through
unobserved. A budget that is exceeded twice running, each time over the last three seconds, costs a level, so that
of hooks that take half of the time nothing is left on the engine's threads after 5 s of work, deep sampling or not.
What is taken away comes back for a trial after a while that doubles each time the trial fails.
"""

from __future__ import annotations

from collections import deque

SECOND_NS = 1_000_000_000
STRIKES = 2
SMOOTHING = 3  # seconds: bursts of deep sampling are uneven by design
CALM_NS = 10 * SECOND_NS  # within the budget for so long counts as calm
FIRST_WAIT_NS, LONGEST_WAIT_NS = 10 * SECOND_NS, 320 * SECOND_NS
LEAST_ENGINE_S = 0.05  # less work than this in an interval says nothing about shares
OBSERVING, SHALLOW, PASSING = 0, 1, 2


class Guard:
    """One process's guard. ``budget`` is the share of the engine's time that the hooks may take, 0 to 1."""

    def __init__(self, budget: float, *, deep: bool) -> None:
        self.budget = budget
        self._deep = deep
        self.level = OBSERVING
        self.overhead: float | None = None
        self._seconds: deque[tuple[float, float]] = deque(maxlen=SMOOTHING + 1)
        self._strikes = 0
        self._calm_since_ns: int | None = None
        self._wait_ns = FIRST_WAIT_NS
        self._until_ns = 0
        self._trial = False

    def observe(self, now_ns: int, hook_s: float, engine_s: float) -> int:
        """Take the seconds so far of hooks and of forward passes; returns the level from now on."""
        share = self._share(hook_s, engine_s)
        if self.level == PASSING:
            self.overhead = None
            if now_ns >= self._until_ns:
                self._to(SHALLOW if self._deep else OBSERVING, trial=True)
        elif share is not None:
            self.overhead = share
            if share > self.budget:
                self._calm_since_ns = None
                self._strikes += 1
                if self._strikes >= (1 if self._trial else STRIKES):
                    self._punish(now_ns)
            else:
                self._calm(now_ns)
        else:
            self.overhead = None
        return self.level

    @property
    def reason(self) -> str:
        """Why less than everything is observed, as a whole sentence; empty at level 0."""
        if self.level == OBSERVING:
            return ""
        what = "deep sampling is off" if self.level == SHALLOW else "everything passes through unobserved"
        return (f"The hooks took more than {self.budget:.2%} of the engine's time (overhead_percent), so {what} for a "
                "while.")

    def _share(self, hook_s: float, engine_s: float) -> float | None:
        seconds = self._seconds
        seconds.append((hook_s, engine_s))
        if len(seconds) < 2 or sum(seconds[-1]) - sum(seconds[-2]) < LEAST_ENGINE_S:
            return None
        hooks, engine = hook_s - seconds[0][0], engine_s - seconds[0][1]
        return hooks / (hooks + engine)

    def _punish(self, now_ns: int) -> None:
        self._until_ns = now_ns + self._wait_ns
        self._wait_ns = min(2 * self._wait_ns, LONGEST_WAIT_NS)
        self._to(SHALLOW if self.level == OBSERVING and self._deep else PASSING)

    def _calm(self, now_ns: int) -> None:
        self._strikes = 0
        if self._calm_since_ns is None:
            self._calm_since_ns = now_ns
        if now_ns - self._calm_since_ns < CALM_NS:
            return
        self._trial = False
        if self.level == OBSERVING:
            self._wait_ns = FIRST_WAIT_NS
        elif now_ns >= self._until_ns:
            self._to(OBSERVING)

    def _to(self, level: int, *, trial: bool = False) -> None:
        self.level, self._trial, self._strikes, self._calm_since_ns = level, trial, 0, None
        while len(self._seconds) > 1:  # what was taken away must not count against the rest
            self._seconds.popleft()
