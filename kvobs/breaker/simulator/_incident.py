"""A past incident under another policy: what its machine would have decided, and whether trouble came after.

No engine is modelled here. What was recorded happened without these decisions, so their effects are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kvobs.breaker._machine import begin, step
from kvobs.breaker._states import Phase, Policy, Transition
from kvobs.breaker.simulator._recorded import METRICS, Growth, Points, Recorded, Sample, instants
from kvobs.model import Decided

SECOND = 10**9
_MOST_LEVELS = 10  # so that levels of different scopes have different numbers
BURST = 10  # more preemptions than that in 10 s are a burst
UNKNOWN = ("What was recorded happened without these decisions: their effects are unknown, and trouble that a policy "
           "would have prevented counts as having come.")
TROUBLE = {
    "out of memory": ("kvobs.out_of_memory", "kvobs.allocator.out_of_memory"),
    "SLO miss": ("kvobs.slo.events", "kvobs.slo.good"),
    "preemption burst": ("kvobs.kv.preemptions",),
}
WANTED = tuple(dict.fromkeys((*METRICS, *(name for names in TROUBLE.values() for name in names))))


class Trouble(msgspec.Struct, frozen=True):
    """Trouble of a kind, from its first to its last instant (Unix ns), with no pause longer than the horizon."""

    kind: str
    first_ns: int
    last_ns: int


class WouldHave(msgspec.Struct, frozen=True):
    """One process under one policy.

    ``followed`` of the ``opened`` openings saw trouble within the horizon; ``foreseen`` of the ``troubles`` began while
    a level was open, or at most the horizon after one was.
    """

    process: str
    policy: str
    instants: int
    signals: tuple[str, ...]
    transitions: tuple[Transition, ...]
    troubles: tuple[Trouble, ...]
    opened: int
    followed: int
    foreseen: int

    @property
    def precision(self) -> float | None:
        """Share of openings that trouble followed; None where nothing opened."""
        return self.followed / self.opened if self.opened else None

    @property
    def recall(self) -> float | None:
        """Share of troubles that a level was open before; None where there was no trouble."""
        return self.foreseen / len(self.troubles) if self.troubles else None


def replayed(process: str, samples: Mapping[str, Iterable[Sample]], policies: Sequence[Policy],
             horizon_s: float) -> list[WouldHave]:
    """What each policy would have decided on one process's points (by metric, those of ``WANTED``)."""
    past = list(instants(samples))
    recorded, troubles = Recorded(), _troubles(past, horizon_s)
    readings = [(t_ns, recorded.signals(t_ns, found)) for t_ns, found in past]
    told = tuple(dict.fromkeys(name for _, found in readings for name in found))
    made = []
    for policy in policies:
        state = begin(policy, readings[0][0] if readings else 0)
        transitions = []
        for t_ns, signals in readings:
            state, transition = step(policy, state, signals, t_ns)
            if transition is not None:
                transitions.append(transition)
        made.append(judged(process, policy.name, transitions, troubles, horizon_s, len(past), told))
    return made


def hindsight(process: str, decisions: Sequence[Decided], times_ns: Sequence[int],
              samples: Mapping[str, Iterable[Sample]], horizon_s: float) -> WouldHave:
    """What a breaker of the process really decided (in observe mode: would have done), judged by what came after.

    ``times_ns`` are the decisions' Unix times, oldest first; ``samples`` are as in ``replayed``.
    """
    scopes = {scope: number for number, scope in enumerate(dict.fromkeys(one.scope for one in decisions))}
    transitions = [Transition(
        t_ns=t_ns, level=one.level + _MOST_LEVELS * scopes[one.scope], before=Phase(one.before), after=Phase(one.after),
        reason=one.reason, readings=one.readings, rejected=one.rejected, generation=one.generation)
        for one, t_ns in zip(decisions, times_ns, strict=True)]
    past = list(instants(samples))
    return judged(process, decisions[-1].policy if decisions else "", transitions, _troubles(past, horizon_s),
                  horizon_s, len(past), ())


def judged(process: str, policy: str, transitions: Sequence[Transition], troubles: Sequence[Trouble],
           horizon_s: float, count: int, told: tuple[str, ...]) -> WouldHave:
    """Openings against trouble. An opening is a level that was closed and opens."""
    horizon = round(horizon_s * SECOND)
    openings = [one.t_ns for one in transitions if one.before is Phase.CLOSED and one.after is Phase.OPEN]
    followed = sum(any(trouble.first_ns <= t_ns + horizon and trouble.last_ns > t_ns for trouble in troubles)
                   for t_ns in openings)
    spans = _open_spans(transitions)
    foreseen = sum(any(first < trouble.first_ns and trouble.first_ns - horizon <= last for first, last in spans)
                   for trouble in troubles)
    return WouldHave(process, policy, count, told, tuple(transitions), tuple(troubles), len(openings), followed,
                     foreseen)


def _open_spans(transitions: Sequence[Transition]) -> list[tuple[int, int]]:
    """From when to when any level was engaged."""
    engaged: set[int] = set()
    spans: list[tuple[int, int]] = []
    began = 0
    for one in transitions:
        before = bool(engaged)
        (engaged.discard if one.after is Phase.CLOSED else engaged.add)(one.level)
        if engaged and not before:
            began = one.t_ns
        elif before and not engaged:
            spans.append((began, one.t_ns))
    return [*spans, (began, 1 << 62)] if engaged else spans


# -- trouble ---------------------------------------------------------------------------------------------


def _troubles(past: Sequence[tuple[int, dict[str, Points]]], horizon_s: float) -> list[Trouble]:
    found = [trouble for kind, judge in _JUDGES.items() for trouble in _episodes(kind, judge(past), horizon_s)]
    return sorted(found, key=lambda trouble: trouble.first_ns)


def _episodes(kind: str, times: Iterable[int], horizon_s: float) -> list[Trouble]:
    made: list[Trouble] = []
    for t_ns in times:
        if made and t_ns - made[-1].last_ns <= horizon_s * SECOND:
            made[-1] = Trouble(kind, made[-1].first_ns, t_ns)
        else:
            made.append(Trouble(kind, t_ns, t_ns))
    return made


def _errors(past: Sequence[tuple[int, dict[str, Points]]]) -> list[int]:
    return _above(past, lambda grown: sum(grown.values()), TROUBLE["out of memory"], 0, 0)


def _misses(past: Sequence[tuple[int, dict[str, Points]]]) -> list[int]:
    return _above(past, lambda grown: grown["kvobs.slo.events"] - grown["kvobs.slo.good"], TROUBLE["SLO miss"], 0, 0)


def _bursts(past: Sequence[tuple[int, dict[str, Points]]]) -> list[int]:
    return _above(past, lambda grown: sum(grown.values()), TROUBLE["preemption burst"], 10, BURST)


def _above(past: Sequence[tuple[int, dict[str, Points]]], judge: Callable[[dict[str, float]], float],
           metrics: tuple[str, ...], span_s: int, least: float) -> list[int]:
    """Instants at which what grew since ``span_s`` ago (0: since the last instant) is more than ``least``."""
    growth = {name: Growth(span_s) for name in metrics}
    times = []
    for t_ns, found in past:
        grown = {name: sum(value for _, value in growth[name].add(t_ns, found.get(name, []))) for name in metrics}
        if judge(grown) > least:
            times.append(t_ns)
    return times


_JUDGES = {"out of memory": _errors, "SLO miss": _misses, "preemption burst": _bursts}
