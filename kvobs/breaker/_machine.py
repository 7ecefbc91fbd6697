"""The breaker's machine: ``step(policy, state, signals, now)`` is pure, and decides at most one transition.

Levels open from below, one at a time, and close from above. A level wants to be open while its own condition or that
of a higher level holds. A level that rested on a signal which is lost closes at once. Every engaged level keeps one
transition of the bound in hand, so that closing is never forbidden by it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from msgspec.structs import replace

from kvobs.breaker._conditions import Latch, Signals, follow, holds, leaves, usable
from kvobs.breaker._states import LEVELS, SECOND, Level, LevelState, Phase, Policy, Probe, State, Transition

Wish = tuple[int, Phase, str]  # a level (from 1), the phase it should have, why


def begin(policy: Policy, now_ns: int) -> State:
    """A machine at rest; every level may open at once."""
    return State(now_ns=now_ns, levels=tuple(LevelState(since_ns=now_ns, until_ns=now_ns) for _ in policy.levels),
                 latches=tuple(tuple(Latch() for _ in leaves(level.condition)) for level in policy.levels))


def step(policy: Policy, state: State, signals: Signals, now_ns: int) -> tuple[State, Transition | None]:
    """The state at ``now_ns`` (monotonic), and the transition that was made, if any."""
    back = now_ns < state.now_ns
    now = max(now_ns, state.now_ns)
    latches = state.latches
    if now - state.now_ns > policy.gap_s * SECOND:
        latches = tuple(tuple(replace(latch, beyond_ns=None) for latch in row) for row in latches)
    kept = tuple(tuple(follow(leaf, latch, signals.get(leaf.signal), now)
                       for leaf, latch in zip(leaves(level.condition), row, strict=True))
                 for level, row in zip(policy.levels, latches, strict=True))
    held = [holds(level.condition, iter([latch.held for latch in row]))
            for level, row in zip(policy.levels, kept, strict=True)]
    levels = state.levels
    if any(level.in_flight for level in levels):
        levels = tuple(_patient(rules, level, now) for rules, level in zip(policy.levels, levels, strict=True))
    recent = tuple(t_ns for t_ns in state.recent_ns if now - t_ns < policy.within_s * SECOND)
    state = replace(state, now_ns=now, levels=levels, latches=kept, recent_ns=recent,
                    clock_steps=state.clock_steps + back)
    wish, rejected = _wish(policy, state, held, signals)
    if wish is None:
        return state, None
    return _apply(policy, state, wish, signals, rejected)


def override(state: State, level: int | None) -> State:
    """Hold a level (0 to 3) from now on whatever the signals say; None gives the machine its way again."""
    if level is not None and not 0 <= level <= len(state.levels):
        raise ValueError(f"There is no level {level}; allowed are 0 to {len(state.levels)}.")
    return replace(state, override=level)


def reset(policy: Policy, state: State) -> State:
    """All levels closed, no failures remembered, no override; outcomes that are still out will not count."""
    fresh = begin(policy, state.now_ns)
    return replace(fresh, recent_ns=state.recent_ns, clock_steps=state.clock_steps, levels=tuple(
        replace(level, generation=old.generation + 1) for level, old in zip(fresh.levels, state.levels, strict=True)))


def adopt(old: Policy, new: Policy, state: State) -> State:
    """The machine as it is, under another policy from now on.

    Levels keep their phases, times, generations and probations, and what was ordered stays so. A condition on a signal
    that is the same in both remembers what it did; one that changed has to hold anew.

    Raises:
        ValueError: the policies have not as many levels.
    """
    rows = []
    for before, after, row in zip(old.levels, new.levels, state.latches, strict=True):
        known = dict(zip(leaves(before.condition), row, strict=True))
        rows.append(tuple(known.get(leaf, Latch()) for leaf in leaves(after.condition)))
    return replace(state, latches=tuple(rows))


# -- what should be done ---------------------------------------------------------------------------------


def _wish(policy: Policy, state: State, held: Sequence[bool], signals: Signals) -> tuple[Wish | None, list[str]]:
    """The transition that is due first, and why others are not."""
    if state.override is not None:
        return _forced(state), []
    rejected: list[str] = []
    room = policy.transitions - len(state.recent_ns) - state.engaged
    for number in range(len(state.levels), 0, -1):  # what is engaged, from above
        level = state.levels[number - 1]
        if level.phase is not Phase.CLOSED:
            due = _engaged(policy.levels[number - 1], state, number, held, signals, room, rejected)
            if due is not None:
                return due, rejected
    return _opening(policy, state, held, room, rejected), rejected


def _wants(held: Sequence[bool], number: int) -> bool:
    return any(held[number - 1:])


def _engaged(rules: Level, state: State, number: int, held: Sequence[bool], signals: Signals, room: int,
             rejected: list[str]) -> Wish | None:
    level, now = state.levels[number - 1], state.now_ns
    top = all(one.phase is Phase.CLOSED for one in state.levels[number:])
    wants = _wants(held, number)
    if not wants and top and any(latch.lost for latch in state.latches[number - 1]):
        return number, Phase.CLOSED, f"fails open: {_unknown(rules, signals, now)}"
    if level.phase is Phase.HALF_OPEN:
        if wants or level.failed:
            if room >= 1:
                return number, Phase.OPEN, "its condition holds again" if wants else "a probe failed"
            rejected.append(f"level {number} is not opened again: too many transitions")
        if level.passed >= rules.probes_needed and not wants and not level.failed and top:
            return number, Phase.CLOSED, f"{level.passed} probes were good"
        if now >= level.since_ns + rules.half_open_s * SECOND and top:
            return number, Phase.CLOSED, "its probation is over"
        return None
    if wants or not top:
        return None
    if now < level.until_ns:
        rejected.append(f"level {number} is not lifted before {(level.until_ns - now) / SECOND:.1f} s")
    elif room < 1:
        rejected.append(f"level {number} is not lifted on probation: too many transitions")
    else:
        return number, Phase.HALF_OPEN, "its condition does not hold any more"
    return None


def _opening(policy: Policy, state: State, held: Sequence[bool], room: int, rejected: list[str]) -> Wish | None:
    now = state.now_ns
    for number, level in enumerate(state.levels, 1):
        if level.phase is Phase.OPEN:
            continue
        if level.phase is Phase.HALF_OPEN or not _wants(held, number):
            return None
        below = state.levels[number - 2] if number > 1 else None
        if below is not None and now - below.since_ns < policy.escalate_s * SECOND:
            rejected.append(f"level {number} does not follow before {policy.escalate_s:g} s of level {number - 1}")
        elif now < level.until_ns:
            rejected.append(f"level {number} stays closed for another {(level.until_ns - now) / SECOND:.1f} s")
        elif room < 2:
            rejected.append(f"level {number} is not opened: too many transitions")
        else:
            own = held[number - 1]
            return number, Phase.OPEN, "its condition holds" if own else "a higher level's condition holds"
        return None
    return None


def _forced(state: State) -> Wish | None:
    assert state.override is not None
    for number in range(len(state.levels), 0, -1):
        if number > state.override and state.levels[number - 1].phase is not Phase.CLOSED:
            return number, Phase.CLOSED, f"an operator holds level {state.override}"
    for number, level in enumerate(state.levels, 1):
        if number <= state.override and level.phase is not Phase.OPEN:
            return number, Phase.OPEN, f"an operator holds level {state.override}"
    return None


def _unknown(rules: Level, signals: Signals, now: int) -> str:
    clauses = [clause for leaf in leaves(rules.condition) if (clause := usable(leaf, signals.get(leaf.signal), now))]
    return "; ".join(clauses[:3])


# -- doing it --------------------------------------------------------------------------------------------


def _apply(policy: Policy, state: State, wish: Wish, signals: Signals, rejected: list[str]) -> tuple[State, Transition]:
    number, phase, reason = wish
    rules, level, now = policy.levels[number - 1], state.levels[number - 1], state.now_ns
    failures = level.failures
    if phase is Phase.OPEN:
        failures = failures + 1 if level.phase is Phase.HALF_OPEN else 0
        least = min(rules.open_s * 2**min(failures, 30), rules.longest_open_s)
    else:
        least = rules.closed_s if phase is Phase.CLOSED else 0.0
        failures = 0 if phase is Phase.CLOSED else failures
    generation = level.generation + 1
    least *= 1 + policy.jitter * _jitter(policy.seed, number, generation, 0)
    changed = LevelState(phase=phase, since_ns=now, until_ns=now + round(least * SECOND), generation=generation,
                         failures=failures, probe_ns=now)
    names = dict.fromkeys(leaf.signal for rule in policy.levels for leaf in leaves(rule.condition))
    told = Transition(
        t_ns=now, level=number, before=level.phase, after=phase,
        reason=f"Level {number} ({LEVELS[number]}) is {phase.value}: {reason}.",
        readings=tuple((name, signals[name].value) for name in names if name in signals),
        rejected=tuple(rejected), generation=generation)
    levels = (*state.levels[:number - 1], changed, *state.levels[number:])
    latches = state.latches
    if phase is Phase.CLOSED:  # what was lost has had its effect
        row = tuple(replace(latch, lost=False) for latch in latches[number - 1])
        latches = (*latches[:number - 1], row, *latches[number:])
    return replace(state, levels=levels, latches=latches, recent_ns=(*state.recent_ns, now)), told


def _jitter(seed: int, *what: int) -> float:
    """A number from 0 to 1 that is the same each time: machines with other seeds do not act in step."""
    return zlib.crc32(repr((seed, *what)).encode()) / 2**32


# -- probation -------------------------------------------------------------------------------------------


def _patient(rules: Level, level: LevelState, now: int) -> LevelState:
    """Forget the probes that are out for too long."""
    oldest = now - rules.half_open_s * SECOND / 2
    return replace(level, in_flight=tuple((number, since) for number, since in level.in_flight if since > oldest))


def begin_probe(policy: Policy, state: State, number: int, now_ns: int) -> tuple[State, Probe | None]:
    """Let one request through a level on probation, if it may have one more in flight; its outcome must be told."""
    rules, level = policy.levels[number - 1], state.levels[number - 1]
    now = max(now_ns, state.now_ns)
    may = level.phase is Phase.HALF_OPEN and not level.failed
    if not may or len(level.in_flight) >= rules.probes or now < level.probe_ns:
        return state, None
    wait = rules.probe_every_s * (1 + policy.jitter * _jitter(policy.seed, number, level.generation, level.sent + 1))
    changed = replace(level, in_flight=(*level.in_flight, (level.sent, now)), sent=level.sent + 1,
                      probe_ns=now + round(wait * SECOND))
    return _with(state, number, changed), Probe(number, level.generation, level.sent)


def end_probe(state: State, probe: Probe, *, good: bool | None) -> State:
    """Take a probe's outcome (None: it ended and says nothing); one of another generation, one that was forgotten or
    one that was told before changes nothing.
    """
    if not in_flight(state, probe):
        return state
    level = state.levels[probe.level - 1]
    return _with(state, probe.level, replace(
        level, in_flight=tuple(one for one in level.in_flight if one[0] != probe.number),
        passed=level.passed + (good is True), failed=level.failed or good is False))


def in_flight(state: State, probe: Probe) -> bool:
    """Whether a probe's outcome would still count."""
    level = state.levels[probe.level - 1]
    return probe.generation == level.generation and any(number == probe.number for number, _ in level.in_flight)


def _with(state: State, number: int, level: LevelState) -> State:
    return replace(state, levels=(*state.levels[:number - 1], level, *state.levels[number:]))
