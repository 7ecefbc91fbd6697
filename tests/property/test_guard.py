"""The overhead guard, driven second by second over simulated engines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.guard import FIRST_WAIT_NS, LONGEST_WAIT_NS, OBSERVING, PASSING, SHALLOW, Guard

SECOND = 1_000_000_000


class Engine:
    """Works a whole second per second; its hooks take ``share`` of it while anything is observed."""

    def __init__(self, guard: Guard) -> None:
        self.guard, self.now = guard, 0
        self.hooks = self.steps = 0.0
        guard.observe(0, 0.0, 0.0)

    def second(self, share: float, deep_share: float = 0.0, busy: float = 1.0) -> int:
        self.now += SECOND
        if self.guard.level != PASSING:
            taken = share + (deep_share if self.guard.level == OBSERVING else 0.0)
            self.hooks += busy * taken
            self.steps += busy * (1 - taken)
        return self.guard.observe(self.now, self.hooks, self.steps)


@pytest.mark.parametrize("deep", [False, True])
def test_a_slow_hook_is_gone_within_five_seconds(deep: bool) -> None:
    """Hooks that take half of the time are passed through after at most 5 s; deep sampling goes first."""
    engine = Engine(Guard(0.05, deep=deep))
    levels = [engine.second(0.5) for _ in range(5)]
    assert levels[-1] == PASSING
    assert levels == sorted(levels)
    assert (SHALLOW in levels) == deep


def test_only_deep_sampling_is_taken_where_that_is_enough() -> None:
    """When the hooks alone are within the budget, the guard stops at level 1 and says which part is off."""
    engine = Engine(Guard(0.05, deep=True))
    levels = [engine.second(0.01, 0.2) for _ in range(8)]
    assert levels[-1] == SHALLOW
    assert max(levels) == SHALLOW
    assert engine.guard.reason == ("The hooks took more than 5.00% of the engine's time (overhead_percent), so deep "
                                   "sampling is off for a while.")


@pytest.mark.parametrize("deep", [False, True])
def test_it_recovers_once_the_hooks_are_fast_again(deep: bool) -> None:
    """After the cause is gone everything is observed again, and the first wait is the shortest again."""
    engine = Engine(Guard(0.05, deep=deep))
    while engine.second(0.5) != PASSING:
        pass
    levels = [engine.second(0.01) for _ in range(60)]
    assert levels[-1] == OBSERVING
    assert engine.guard.reason == ""
    began = engine.now
    while engine.second(0.5) != PASSING:
        pass
    while engine.guard.level == PASSING:
        engine.second(0.5)
    assert engine.now - began <= FIRST_WAIT_NS * (2 if deep else 1) + 6 * SECOND


def test_trials_become_rarer_while_they_fail() -> None:
    """A hook that stays slow is tried again after ever longer waits, up to the longest, and costs one second each."""
    engine = Engine(Guard(0.05, deep=False))
    trials = []
    for _ in range(3_000):
        before = engine.guard.level
        if before == PASSING and engine.second(0.9) == OBSERVING:
            trials.append(engine.now)
            engine.second(0.9)
            assert engine.guard.level == PASSING
        elif before != PASSING:
            engine.second(0.9)
    waits = [later - earlier for earlier, later in itertools.pairwise(trials)]
    assert waits == sorted(waits)
    assert LONGEST_WAIT_NS <= waits[-1] <= LONGEST_WAIT_NS + 2 * SECOND


@given(st.lists(st.tuples(st.floats(0, 0.049), st.floats(0, 1)), max_size=80), st.booleans())
def test_within_the_budget_nothing_is_taken_away(seconds: list[tuple[float, float]], deep: bool) -> None:
    """However the work comes and goes, hooks within the budget never cost a level."""
    engine = Engine(Guard(0.05, deep=deep))
    assert all(engine.second(share, busy=busy) == OBSERVING for share, busy in seconds)


@given(st.lists(st.tuples(st.floats(0, 0.99), st.floats(0, 1)), max_size=200), st.booleans(), st.floats(0.001, 0.5))
def test_the_hooks_time_is_bounded(seconds: list[tuple[float, float]], deep: bool, budget: float) -> None:
    """Over any history, hooks beyond the budget take at most 5 s, and per further 10 s one trial of 5."""
    engine = Engine(Guard(budget, deep=deep))
    over = 0
    for share, busy in seconds:
        observing = engine.guard.level != PASSING
        engine.second(share, busy=busy)
        over += observing and busy >= 0.1 and share > budget and engine.guard.level == PASSING
        assert engine.guard.level in (OBSERVING, SHALLOW, PASSING)
        assert deep or engine.guard.level != SHALLOW
        assert (engine.guard.overhead is None) or 0 <= engine.guard.overhead <= 1
    assert over <= 1 + len(seconds) / 10


def test_an_idle_engine_says_nothing() -> None:
    """Seconds without forward passes have no overhead: absent, not zero, and no strike."""
    engine = Engine(Guard(0.05, deep=False))
    assert engine.second(0.5) == OBSERVING
    assert engine.guard.overhead == pytest.approx(0.5)
    for _ in range(10):
        assert engine.second(0.0, busy=0.0) == OBSERVING
        assert engine.guard.overhead is None
