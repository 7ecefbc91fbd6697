"""A breaker whose policy is replaced at random times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvobs import model
from kvobs.breaker import All, AnyOf, Latch, Leaf, Level, Phase, Policy, begin
from kvobs.breaker._breaker import Breaker
from kvobs.breaker._gate import ACT
from kvobs.breaker._machine import adopt
from tests.property.test_breaker import LEVEL, POLICY, SECOND, A, B, C, Run, moves, without_operators

EAGER = replace(A, above=6.0, release=1.0, for_s=0.0)
POLICIES = (
    POLICY,
    replace(POLICY, name="fewer", transitions=6),
    replace(POLICY, name="eager", transitions=20, escalate_s=0.1, levels=tuple(
        Level(condition=AnyOf((EAGER, C)), open_s=0.5, closed_s=0.5, half_open_s=2.0) for _ in range(3))),
    replace(POLICY, name="turned", levels=(
        Level(condition=C, **LEVEL), Level(condition=AnyOf((A, C)), **LEVEL), Level(condition=All((A, B)), **LEVEL))))
steps = st.lists(st.tuples(moves.map(lambda program: program[:4]), st.sampled_from(range(len(POLICIES)))), max_size=15)


def reloaded(run: Run, policy: Policy) -> None:
    run.state = adopt(run.policy, policy, run.state)
    run.policy = policy


@settings(max_examples=150)
@given(steps)
def test_transitions_stay_bounded_staged_and_single(program: list[tuple[list[tuple[int, Any]], int]]) -> None:
    """In any 30 s there are no more transitions than the largest bound of the policies allows; levels are staged, each
    step changes one at most and tells it; and to replace the policy changes no level.
    """
    run, bound, phases = Run(), POLICY.transitions, [[level.phase for level in begin(POLICY, 0).levels]]
    for part, number in program:
        for ahead, what in without_operators(part):
            run.do(ahead, what)
            phases.append([level.phase for level in run.state.levels])
        before = run.state
        reloaded(run, POLICIES[number])
        assert replace(run.state, latches=before.latches) == before
        bound = max(bound, POLICIES[number].transitions)
    times = [told.t_ns for told in run.told]
    assert all(late - early >= 30 * SECOND for early, late in zip(times, times[bound:], strict=False))
    changes = [sum(old is not new for old, new in zip(early, late, strict=True))
               for early, late in itertools.pairwise(phases)]
    assert max(changes, default=0) <= 1
    assert sum(changes) == len(run.told)
    assert all(higher is Phase.CLOSED or lower is Phase.OPEN for row in phases for lower, higher in
               itertools.pairwise(row))


@given(moves, st.lists(st.integers(0, 120), max_size=10))
def test_the_equal_policy_changes_nothing(program: list[tuple[int, Any]], when: list[int]) -> None:
    """A machine that is given an equal policy again and again goes through the same states as one that is not."""
    plain, other = Run(), Run()
    for index, (ahead, what) in enumerate(program):
        plain.do(ahead, what)
        if index in when:
            reloaded(other, replace(POLICY))
        other.do(ahead, what)
    assert plain.states == other.states
    assert plain.told == other.told


@given(steps)
def test_conditions_that_changed_hold_anew(program: list[tuple[list[tuple[int, Any]], int]]) -> None:
    """Of each level, just those conditions that both policies have there remember; there is one for each new one."""
    run = Run()
    for part, number in program:
        for ahead, what in part:
            run.do(ahead, what)
        old, before = run.policy, run.state
        reloaded(run, POLICIES[number])
        for level in range(3):
            was = dict(zip(_leaves(old, level), before.latches[level], strict=True))
            now = dict(zip(_leaves(run.policy, level), run.state.latches[level], strict=True))
            assert all(latch == was.get(leaf, Latch()) for leaf, latch in now.items())


def _leaves(policy: Policy, level: int) -> tuple[Leaf, ...]:
    condition = policy.levels[level].condition
    return (condition,) if isinstance(condition, Leaf) else condition.conditions  # type: ignore[return-value]


class Hands:
    """An actuator whose actions are in effect from order to order."""

    name = "hands"

    def __init__(self) -> None:
        self.in_effect: set[int] = set()

    def capabilities(self) -> Sequence[model.Capability]:
        return [model.Capability(level, f"action {level}", True, "") for level in (1, 2, 3)]

    def plan(self, kind: str) -> model.Effect:
        return model.Effect(None, None)

    def submit(self, order: model.Order) -> None:
        (self.in_effect.discard if order.undo else self.in_effect.add)(order.level)


def under(thresholds: tuple[float, float, float], **rules: float) -> Policy:
    """A policy that opens its levels above three loads."""
    return Policy(name="load", escalate_s=0.0, transitions=30, levels=tuple(
        Level(condition=Leaf(signal="app.load", above=above), open_s=1.0, closed_s=1.0, half_open_s=2.0, **rules)
        for above in thresholds))


LOADS = (under((1, 2, 3)), under((2, 4, 6)), under((5, 5, 5)), under((0, 0, 9)))
words = st.one_of(st.floats(0, 10).map(lambda load: ("load", load)), st.sampled_from(range(4)).map(
    lambda number: ("policy", number)), st.sampled_from([("hold", None), ("hold", 0), ("hold", 2), ("reset", None)]))


@given(st.lists(words, max_size=60))
def test_what_is_applied_is_what_is_open(program: list[tuple[str, Any]]) -> None:
    """After every tick the actions in effect are those of the levels that some device has open, however the policy was
    replaced in between; in the end none is left.
    """
    hands, now, load = Hands(), 0, 0.0
    breaker = Breaker(LOADS[0], ACT, lambda: [hands])
    for device in ("cuda:0", "cuda:1"):
        breaker.device(device, None, "SERVED", 0)
    for what, how in program:
        if what == "load":
            load = how
        elif what == "policy":
            breaker.adopt(LOADS[how])
        elif what == "hold":
            breaker.hold(how)
        else:
            breaker.reset()
        now += SECOND // 2
        breaker.report("app.load", load, now)
        breaker.tick(now, [])
        open_ = {number for state in breaker.states().values() for number, level in enumerate(state.levels, 1)
                 if level.phase is Phase.OPEN}
        assert hands.in_effect == open_
    breaker.stop(now)
    assert hands.in_effect == set()
