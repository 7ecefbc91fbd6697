"""Which decode steps are sampled, over any costs: bursts of three, within the budget, never starving."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")

from kvobs.sources.transformers._cadence import BURST, MOST, Cadence, Place

NS = st.integers(1, 10**9)


def drive(steps: list[tuple[int, int]], budget: float) -> tuple[list[bool], list[int], int]:
    """Run (cost, step) nanoseconds through one cache's cycle: what was sampled, the intervals, the cost paid."""
    cadence, place, paid = Cadence(budget), Place(), 0
    sampled, intervals = [], []
    for cost, step in steps:
        due = place.due(cadence.every)
        if due:
            place.consecutive()
            cadence.took(cost, step)
            paid += cost
        sampled.append(due)
        intervals.append(cadence.every)
    return sampled, intervals, paid


@given(st.lists(st.tuples(NS, NS), max_size=300), st.floats(0.001, 1))
def test_the_first_burst_is_free_and_intervals_are_bounded(steps: list[tuple[int, int]], budget: float) -> None:
    """Whatever it costs, the first three steps are sampled; an interval is never below 1 or above the bound."""
    sampled, intervals, _ = drive(steps, budget)
    assert sampled[:BURST] == [True] * min(BURST, len(steps))
    assert all(1 <= interval <= MOST for interval in intervals)


@given(st.integers(1, 10**7), st.integers(10**5, 10**8), st.floats(0.005, 0.5))
def test_constant_costs_stay_within_the_budget(cost: int, step: int, budget: float) -> None:
    """With constant costs the share of sampling, beyond the free first burst, is at most the budget."""
    sampled, _, paid = drive([(cost, step)] * 3_000, budget)
    assert (paid - BURST * cost) / (3_000 * step) <= budget * 1.01 or sum(sampled) <= 2 * BURST


@given(st.integers(2, 50))
def test_bursts_are_three_running_in_each_cycle(every: int) -> None:
    """With an interval of N three steps running of each 3 N are sampled, and each burst's later two are consecutive."""
    place = Place()
    told = []
    for _ in range(5 * BURST * every):
        due = place.due(every)
        told.append((due, due and place.consecutive()))
    cycle = [(True, False), (True, True), (True, True)] + [(False, False)] * (BURST * every - BURST)
    assert told == cycle * 5


def test_every_step_is_sampled_where_it_costs_nothing() -> None:
    """An interval of 1 samples all steps, each consecutive to the one before."""
    place = Place()
    assert [place.due(1) and place.consecutive() for _ in range(9)] == [False] + [True] * 8


def test_the_interval_rises_at_once_and_falls_slowly() -> None:
    """A costly step raises the interval in that step; cheap ones lower it by at most an eighth each."""
    cadence = Cadence(0.03)
    cadence.took(1_000_000, 100_000_000)
    assert cadence.every == 1
    cadence.took(100_000_000, 100_000_000)
    high = cadence.every
    assert high >= 10
    falls = []
    for _ in range(100):
        before = cadence.every
        cadence.took(1, 100_000_000)
        falls.append(before - cadence.every)
        assert falls[-1] <= max(1, before // 8)
    assert cadence.every == 1
