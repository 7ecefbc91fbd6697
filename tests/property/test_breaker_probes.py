"""Probes through gates: a breaker that is loaded and relieved, gates on whose tickets requests pass, and outcomes that
come whenever they come.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.breaker import (
    Leaf,
    Level,
    Phase,
    Policy,
    Probe,
    Reading,
    State,
    begin,
    begin_probe,
    end_probe,
    step,
)
from kvobs.breaker._breaker import Breaker
from kvobs.breaker._gate import OBSERVE, Probation
from kvobs.breaker._trial import Trial, Trials

SECOND = 10**9
HALF_OPEN_S = 4.0


def policy(probes: int) -> Policy:
    return Policy(name="load", escalate_s=0.0, transitions=200, levels=tuple(
        Level(condition=Leaf(signal="app.load", above=above), open_s=0.5, closed_s=0.2, longest_open_s=1.0,
              half_open_s=HALF_OPEN_S, probes=probes, probes_needed=3, probe_every_s=0.1) for above in (1, 2, 3)))


class World:
    """One breaker, two gates. ``deaf``: it is not told what has become of probes of generations that are over."""

    def __init__(self, probes: int, *, deaf: bool) -> None:
        self.probes, self.deaf = probes, deaf
        self.breaker = Breaker(policy(probes), OBSERVE, list)
        self.gates = (Trials(), Trials())
        self.out: list[tuple[int, Trial, int]] = []  # gate, probe, and the generation that it was admitted under
        self.now = 0
        self.load = 0.0
        self.states: list[State] = []
        for _ in range(4):  # to level 3 at once
            self.tick(9.0, SECOND // 4)

    @property
    def state(self) -> State:
        return self.breaker.states()["process"]

    @property
    def probation(self) -> Probation | None:
        return self.breaker.probing.of("one", self.breaker.policy, self.breaker.states(), None)

    def tick(self, load: float, ahead: int) -> None:
        self.now += ahead
        self.breaker.report("app.load", load, self.now)
        self.breaker.tick(self.now, [])
        self.states.append(self.state)

    def do(self, what: str, how: Any) -> None:
        if what == "load":
            self.load = how
        elif what == "come" and self.probation is not None:
            trial = self.gates[how].begin(self.probation, lambda: self.now)
            if trial is not None:
                self.out.append((how, trial, self.state.levels[2].generation))
        elif what == "end" and self.out:
            which, good = how
            gate, trial, generation = self.out.pop(which % len(self.out))
            self.gates[gate].end(trial)
            if not self.deaf or generation == self.state.levels[2].generation:
                self.breaker.probing.told(trial.ticket, good)
        self.tick(self.load, SECOND // 4)


moves = st.lists(st.one_of(
    st.tuples(st.just("load"), st.sampled_from([0.0, 0.0, 9.0])), st.tuples(st.just("come"), st.integers(0, 1)),
    st.tuples(st.just("end"), st.tuples(st.integers(0, 40), st.sampled_from([True, False, None]))),
    st.tuples(st.just("wait"), st.none())), max_size=80)


@settings(max_examples=150)
@given(st.integers(1, 3), moves)
def test_probes_in_flight_and_probations_are_bounded(probes: int, program: list[tuple[str, Any]]) -> None:
    """No gate ever has more than so many probes in flight, whenever they were admitted; the breaker has no more tickets
    out, and none unless level 3 is half-open; a half-open level ends within 4 s, whatever its probes do.
    """
    world = World(probes, deaf=False)
    seen: set[tuple[int, int]] = set()
    for what, how in program:
        world.do(what, how)
        assert all(len(gate.in_flight) <= probes for gate in world.gates)
        level, found = world.state.levels[2], world.probation
        assert len(level.in_flight) <= probes
        assert (found is not None) == (level.phase is Phase.HALF_OPEN)
        assert found is None or len(found.tickets) == len(level.in_flight)
        if level.phase is Phase.HALF_OPEN:
            assert world.now - level.since_ns < HALF_OPEN_S * SECOND
    for gate, trial, _ in world.out:
        assert (gate, trial.ticket) not in seen
        seen.add((gate, trial.ticket))


@settings(max_examples=150)
@given(st.integers(1, 3), moves)
def test_outcomes_of_generations_that_are_over_change_nothing(probes: int, program: list[tuple[str, Any]]) -> None:
    """A breaker that is told of them goes through the same states as one that is not."""
    told, deaf = World(probes, deaf=False), World(probes, deaf=True)
    for what, how in program:
        told.do(what, how)
        deaf.do(what, how)
    assert told.states == deaf.states


def test_the_same_number_of_another_generation_is_another_probe() -> None:
    """Probe 0 of the first probation says nothing of probe 0 of the second, which is out and whose own word counts."""
    rules, now = policy(1), 0
    state, told = begin(rules, now), list[Probe]()
    while len(told) < 2:
        now += SECOND // 2
        load = 0.0 if not told or state.levels[2].generation == told[0].generation + 1 else 9.0
        load = 9.0 if state.engaged < 3 else load
        state, _ = step(rules, state, {"app.load": Reading(load, now)}, now)
        if not told or state.levels[2].generation > told[0].generation:
            state, probe = begin_probe(rules, state, 3, now)
            told += [probe] if probe is not None else []
    first, second = told
    assert (first.number, second.number) == (0, 0)
    assert first.generation < second.generation == state.levels[2].generation
    for good in (True, False, None):
        assert end_probe(state, first, good=good) is state
    assert end_probe(state, second, good=False).levels[2].failed


def relieved(probes: int) -> World:
    """A world whose level 3 has just become half-open."""
    world = World(probes, deaf=False)
    while world.probation is None:
        world.do("load", 0.0)
    return world


@given(st.integers(1, 3), st.lists(st.sampled_from([True, None]), max_size=3))
def test_three_good_probes_close_the_level_before_its_time(probes: int, others: list[bool | None]) -> None:
    """With three that ended well the level is closed long before 4 s are over; those that say nothing do not count."""
    world = relieved(probes)
    began, told = world.now, 0
    for good in [None] * others.count(None) + [True] * 3:
        while not world.out:
            world.do("come", 0)
        assert world.state.levels[2].phase is Phase.HALF_OPEN
        world.do("end", (0, good))
        told += good is True
    assert told == 3
    assert world.state.levels[2].phase is Phase.CLOSED
    assert world.now - began < HALF_OPEN_S * SECOND


@given(st.integers(1, 3))
def test_one_bad_probe_opens_the_level_again(probes: int) -> None:
    """At the next tick level 3 is open, and for longer than before: there are no probes any more."""
    world = relieved(probes)
    failures = world.state.levels[2].failures
    while not world.out:
        world.do("come", 0)
    world.do("end", (0, False))
    level = world.state.levels[2]
    assert (level.phase, level.failures, world.probation) == (Phase.OPEN, failures + 1, None)


def test_probes_that_never_tell_make_room_for_others_and_time_ends_it() -> None:
    """With one probe that hangs at one gate, another gate, which has used that ticket too, gets a new one after 2 s;
    after 4 s the level is closed.
    """
    world = relieved(1)
    began = world.now
    while not world.out:
        world.do("come", 0)
    assert world.probation is not None
    same = world.gates[1].begin(world.probation, lambda: world.now)
    assert same is not None
    world.gates[1].end(same)
    first = world.out[0][1].ticket
    while len(world.out) < 2:
        world.do("come", 1)
        assert world.now - began < 3 * SECOND
    assert world.out[1][1].ticket > first
    assert world.now - began >= HALF_OPEN_S / 2 * SECOND
    while world.state.levels[2].phase is Phase.HALF_OPEN:
        world.do("come", 0)
    assert world.state.levels[2].phase is Phase.CLOSED
    assert world.now - began == HALF_OPEN_S * SECOND
    assert len(world.gates[0].in_flight) == 1
