"""The breaker's machine under programs of readings, pauses, clock steps, probes and operators."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.breaker import (
    All,
    AnyOf,
    Latch,
    Leaf,
    Level,
    Phase,
    Policy,
    Probe,
    Reading,
    State,
    Transition,
    begin,
    begin_probe,
    end_probe,
    override,
    reset,
    step,
)
from kvobs.breaker._conditions import follow

SECOND = 10**9
NAN = float("nan")
A = Leaf(signal="a", above=10.0, release=5.0, for_s=1.0, max_age_s=3.0)
B = Leaf(signal="b", below=0.2, release=0.4, min_samples=2, max_age_s=3.0)
C = Leaf(signal="c", one_of=("BAD", "WORSE"), max_age_s=3.0)
LEVEL = {"open_s": 2.0, "closed_s": 3.0, "longest_open_s": 10.0, "half_open_s": 4.0, "probes": 2, "probes_needed": 2,
         "probe_every_s": 0.5}
POLICY = Policy(name="test", transitions=12, within_s=30.0, escalate_s=1.0, gap_s=5.0, levels=(
    Level(condition=AnyOf((A, C)), **LEVEL), Level(condition=All((A, B)), **LEVEL), Level(condition=C, **LEVEL)))
BOUND_S = 4.0  # of a probation

values = {"a": st.sampled_from([0.0, 5.0, 6.0, 10.0, 11.0, 99.0, NAN, float("inf")]),
          "b": st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.4, 0.9, NAN]),
          "c": st.sampled_from(["GOOD", "BAD", "WORSE", 3.0])}
reading = st.sampled_from("abc").flatmap(lambda name: st.tuples(st.just(name), values[name], st.integers(1, 3)))
# Time goes on (now and then by a pause, or back), then something happens.
moves = st.lists(st.tuples(
    st.one_of(st.integers(0, 2 * SECOND), st.sampled_from([100_000_000, -SECOND, 8 * SECOND])),
    st.one_of(reading, st.just("refresh"), st.sampled_from(["probe", "good", "bad", "reset"]),
              st.tuples(st.just("hold"), st.sampled_from([None, 0, 1, 2, 3])))), max_size=120)


class Run:
    """A machine that follows a program and remembers what it did."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.policy = policy
        self.now = 0
        self.state = begin(policy, 0)
        self.signals: dict[str, Reading] = {}
        self.told: list[Transition] = []
        self.states: list[State] = []
        self.out: list[Probe] = []
        self.since: dict[Probe, int] = {}  # when each went out
        self.steps: list[tuple[int, dict[str, Reading]]] = []
        self.half_open_since: dict[int, int] = {}

    def do(self, ahead: int, what: Any) -> None:
        self.now += ahead
        if isinstance(what, tuple) and what[0] == "hold":
            self.state = override(self.state, what[1])
        elif isinstance(what, tuple):
            self.signals[what[0]] = Reading(what[1], self.now, what[2])
        elif what == "refresh":
            self.signals = {name: Reading(one.value, self.now, one.samples) for name, one in self.signals.items()}
        elif what == "reset":
            self.state = reset(self.policy, self.state)
        elif what == "probe":
            for number in (1, 2, 3):
                self.state, probe = begin_probe(self.policy, self.state, number, self.now)
                if probe is not None:
                    self.out.append(probe)
                    self.since[probe] = max(self.now, self.state.now_ns)
        elif self.out:
            self.state = end_probe(self.state, self.out.pop(0), good=what == "good")
        self.step()

    def step(self) -> None:
        self.steps.append((max(self.now, self.state.now_ns), dict(self.signals)))
        self.state, told = step(self.policy, self.state, self.signals, self.now)
        self.told += [told] if told is not None else []
        self.states.append(self.state)


def run(program: list[tuple[int, Any]]) -> Run:
    done = Run()
    for ahead, what in program:
        done.do(ahead, what)
    return done


def without_operators(program: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    return [(ahead, what) for ahead, what in program
            if what != "reset" and not (isinstance(what, tuple) and what[0] == "hold")]


@settings(max_examples=300)
@given(moves)
def test_transitions_are_bounded_staged_and_single(program: list[tuple[int, Any]]) -> None:
    """At most 12 transitions in any 30 s; a level is open or on probation only above open ones; each step changes at
    most one level's phase, and that is told.
    """
    done = run(without_operators(program))
    times = [told.t_ns for told in done.told]
    assert all(late - early >= 30 * SECOND for early, late in zip(times, times[12:], strict=False))
    for before, after in itertools.pairwise([begin(POLICY, 0), *done.states]):
        changed = [number for number, (old, new) in enumerate(zip(before.levels, after.levels, strict=True), 1)
                   if old.phase is not new.phase]
        assert len(changed) <= 1
        phases = [level.phase for level in after.levels]
        for lower, higher in itertools.pairwise(phases):
            assert higher is Phase.CLOSED or lower is Phase.OPEN
    assert len(done.told) == sum(old.levels[i].phase is not new.levels[i].phase for old, new in itertools.pairwise(
        [begin(POLICY, 0), *done.states]) for i in range(3))


@settings(max_examples=200)
@given(moves)
def test_time_only_goes_on(program: list[tuple[int, Any]]) -> None:
    """The machine's time never goes back, whatever the clock does, and every step back is counted."""
    done = run(program)
    assert all(early.now_ns <= late.now_ns for early, late in itertools.pairwise(done.states))
    seen, back = 0, 0
    now = 0
    for ahead, _ in program:
        now += ahead
        back += now < seen
        seen = max(seen, now)
    if not any(what == "reset" for _, what in program):
        assert done.state.clock_steps == back


@settings(max_examples=200)
@given(moves)
def test_probes_and_probations_are_bounded(program: list[tuple[int, Any]]) -> None:
    """At most two probes are out per level and none unless it is on probation; just those are out that went out less
    than 2 s ago and have told nothing; a probation that is stepped ends within 4 s and a step.
    """
    done = Run()
    for ahead, what in without_operators(program):
        done.do(ahead, what)
        for number, level in enumerate(done.state.levels, 1):
            assert len(level.in_flight) <= 2
            assert not level.in_flight or level.phase is Phase.HALF_OPEN
            if level.phase is Phase.HALF_OPEN:
                assert done.state.now_ns - level.since_ns < BOUND_S * SECOND
            out = sum(probe.level == number and probe.generation == level.generation
                      and done.state.now_ns - done.since[probe] < BOUND_S / 2 * SECOND for probe in done.out)
            assert out == len(level.in_flight)


@settings(max_examples=200)
@given(moves)
def test_without_readings_everything_is_closed(program: list[tuple[int, Any]]) -> None:
    """Once all signals are stale, three steps later no level is engaged: the breaker fails open."""
    done = run(without_operators(program))
    done.now = max(done.now, done.state.now_ns) + 4 * SECOND
    lost = [any(latch.lost or latch.held for latch in row) for row in done.state.latches]
    held = [level.phase is not Phase.CLOSED for level in done.state.levels]
    for _ in range(3):
        done.step()
    if all(was_lost for was_lost, engaged in zip(lost, held, strict=True) if engaged):
        assert done.state.engaged == 0
    for _ in range(100):  # what was released before its signal was lost ends by its own times
        done.now += SECOND
        done.step()
    assert done.state.engaged == 0


band = st.tuples(st.sampled_from([5.1, 6.0, 9.9, 10.0]), st.sampled_from([0.2, 0.25, 0.39]))


@given(st.integers(0, 2), st.lists(st.tuples(st.integers(0, 2 * SECOND), band), min_size=1, max_size=60))
def test_nothing_changes_inside_the_band(level: int, readings: list[tuple[int, tuple[float, float]]]) -> None:
    """Between thresholds and releases, closed levels stay closed and open ones open, however long it takes."""
    done = Run()
    for _ in range(40 * bool(level)):  # far beyond both thresholds, or one
        done.now += SECOND // 10
        done.signals = {"a": Reading(99.0, done.now), "b": Reading(0.0 if level == 2 else 0.9, done.now, 2)}
        done.step()
    assert done.state.level == level
    before = len(done.told)
    if level == 1:
        readings = [(ahead, (a, 0.9)) for ahead, (a, _) in readings]
    for ahead, (a, b) in readings:
        done.now += ahead
        done.signals = {"a": Reading(a, done.now), "b": Reading(b, done.now, 2)}
        done.step()
    assert len(done.told) == before


@settings(max_examples=200)
@given(moves)
def test_what_opens_has_a_condition_that_holds(program: list[tuple[int, Any]]) -> None:
    """A second account that goes over the whole past of each signal says that the condition, or a higher level's,
    holds whenever a closed level opens; and no level is lifted on probation while it does.
    """
    done = run(without_operators(program))
    moments = {t_ns: index for index, (t_ns, _) in enumerate(done.steps)}
    for told in done.told:
        index = next(i for i, state in enumerate(done.states) if state.levels[told.level - 1].generation
                     == told.generation)
        assert moments[told.t_ns] >= index
        past = done.steps[:index + 1]
        held = {leaf.signal: _held(leaf, past) for leaf in (A, B, C)}
        wanted = [held["a"] or held["c"], held["a"] and held["b"], held["c"]]
        if told.after is Phase.OPEN and told.before is Phase.CLOSED:
            assert any(wanted[told.level - 1:])
        if told.after is Phase.HALF_OPEN:
            assert not any(wanted[told.level - 1:])


def _held(leaf: Leaf, past: list[tuple[int, dict[str, Reading]]]) -> bool:
    """Whether a leaf holds after these steps: was it beyond for long enough since it was last released or unusable?"""
    sides = [(t_ns, _side(leaf, signals.get(leaf.signal), t_ns)) for t_ns, signals in past]
    start = max((index + 1 for index, (_, side) in enumerate(sides) if side < 0), default=0)
    runs: list[list[int]] = [[]]
    previous = None
    for t_ns, side in sides[start:]:
        if side == 0 or (previous is not None and t_ns - previous > POLICY.gap_s * SECOND):
            runs.append([])
        if side > 0:
            runs[-1].append(t_ns)
        previous = t_ns
    return any(run and run[-1] - run[0] >= leaf.for_s * SECOND for run in runs)


def _side(leaf: Leaf, one: Reading | None, t_ns: int) -> int:
    """1 beyond, 0 between, -1 released or of no use; written out per signal."""
    if one is None or t_ns - one.t_ns > 3 * SECOND or one.value != one.value or one.value == float("inf"):
        return -1
    if leaf.signal == "c":
        return 1 if one.value in ("BAD", "WORSE") else -1
    if leaf.signal == "b" and one.samples < 2:
        return -1
    value = float(one.value)
    if leaf.signal == "a":
        return 1 if value > 10 else -1 if value <= 5 else 0
    return 1 if value < 0.2 else -1 if value >= 0.4 else 0


@given(st.sampled_from([0, 1, 2, 3]), moves)
def test_an_operator_s_level_holds(level: int, program: list[tuple[int, Any]]) -> None:
    """Three steps after an operator chose a level it is applied, and stays so whatever the signals say."""
    done = run(without_operators(program))
    done.do(0, ("hold", level))
    for _ in range(3):
        done.step()
    for ahead, what in without_operators(program):
        assert [one.phase for one in done.state.levels] == [Phase.OPEN] * level + [Phase.CLOSED] * (3 - level)
        done.do(ahead, what)


@given(moves)
def test_old_outcomes_do_not_count(program: list[tuple[int, Any]]) -> None:
    """After a reset, no outcome of a probe that was sent before changes the state."""
    done = run(program)
    after = reset(POLICY, done.state)
    assert all(end_probe(after, probe, good=good) is after for probe in done.out for good in (True, False))


def test_probations_that_fail_double_the_next_time() -> None:
    """Open for 2 s, then 4, 8 and 10 at most (jitter 0): each failed probe costs; a good probation forgives."""
    policy = Policy(name="x", levels=tuple(Level(condition=A, **LEVEL) for _ in range(3)), transitions=100, jitter=0.0,
                    escalate_s=1000.0)
    state, now = begin(policy, 0), 0
    lasted, opened = [], 0

    def until(phase: Phase, value: float) -> int:
        nonlocal state, now
        while state.levels[0].phase is not phase:
            now += SECOND // 10
            state, _ = step(policy, state, {"a": Reading(value, now)}, now)
        return now

    opened = until(Phase.OPEN, 99.0)
    for good in (False, False, False, False, True):
        lasted.append(round((until(Phase.HALF_OPEN, 0.0) - opened) / SECOND, 1))
        for _ in range(1 + good):
            now += SECOND
            state, probe = begin_probe(policy, state, 1, now)
            assert probe is not None
            state = end_probe(state, probe, good=good)
        opened = until(Phase.CLOSED if good else Phase.OPEN, 0.0)
    assert lasted == [2.0, 4.0, 8.0, 10.0, 10.0]
    opened = until(Phase.OPEN, 99.0)
    assert round((until(Phase.HALF_OPEN, 0.0) - opened) / SECOND, 1) == 2.0


def test_a_stopped_process_has_not_waited() -> None:
    """A signal that was beyond its threshold before a pause of 8 s has to hold anew after it."""
    leaf, now = Leaf(signal="a", above=1.0, for_s=1.0, max_age_s=60.0), 0
    policy = Policy(name="x", levels=tuple(Level(condition=leaf) for _ in range(3)))
    state, told = step(policy, begin(policy, 0), {"a": Reading(2.0, now)}, now)
    now += 8 * SECOND
    state, told = step(policy, state, {"a": Reading(2.0, now)}, now)
    assert told is None
    now += SECOND
    _, told = step(policy, state, {"a": Reading(2.0, now)}, now)
    assert told is not None
    assert follow(leaf, Latch(), Reading(2.0, now), now) == Latch(False, now)
