"""Phases of requests on one axis of time, those that ended and those that are open. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvobs.model import Preemption, RequestStates
from kvobs.store import Stored

SPANS = 1_500  # drawn at once, whatever happens


class Phase(NamedTuple):
    """A phase of a request, in Unix nanoseconds; ``end_ns`` of an open one is when it was last told of."""

    request: str
    session: str
    phase: str
    begin_ns: int
    end_ns: int
    outcome: str
    blocks: int
    open: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Timeline:
    """What is drawn: phases and preemptions of ``requests`` (the newest first) from ``begin_ns`` to ``end_ns``.

    ``left_out`` counts the other requests that were told of within this time.
    """

    begin_ns: int
    end_ns: int
    phases: list[Phase]
    marks: list[Stored[Preemption]]
    requests: list[str]
    left_out: int


def timeline(ended: Sequence[Phase], states: Stored[RequestStates] | None, preemptions: Sequence[Stored[Preemption]],
             begin_ns: int, end_ns: int, most: int, most_phases: int = SPANS) -> Timeline:
    """The requests that were active last, at most ``most``, in the order in which they began.

    An open phase of ``states`` counts unless the request's later phases ended meanwhile. Where there are more than
    ``most_phases``, the time begins later.
    """
    found = sorted([*ended, *_open(ended, states)], key=lambda one: one.end_ns)
    found = [one for one in found if one.end_ns >= begin_ns]
    last = {one.request: one.end_ns for one in found}  # in order of time: the last one counts
    chosen = set(sorted(last, key=lambda request: -last[request])[:most])
    shown = [one for one in found if one.request in chosen]
    if len(shown) > most_phases:
        begin_ns = max(begin_ns, shown[-most_phases - 1].end_ns)
        shown = shown[-most_phases:]
    first: dict[str, int] = {}
    for one in shown:
        first[one.request] = min(first.get(one.request, one.begin_ns), one.begin_ns)
    marks = [one for one in preemptions if one.record.request in first and begin_ns <= one.wall_ns <= end_ns]
    return Timeline(begin_ns, end_ns, shown, marks, sorted(first, key=lambda request: (-first[request], request)),
                    len(last) - len(chosen))


def _open(ended: Sequence[Phase], states: Stored[RequestStates] | None) -> list[Phase]:
    if states is None:
        return []
    last: dict[str, int] = {}
    for one in ended:
        last[one.request] = max(last.get(one.request, 0), one.end_ns)
    return [Phase(row.request, row.session, row.phase, row.since_ns, max(states.wall_ns, row.since_ns), "", row.blocks,
                  True, row.reason)
            for row in states.record.rows if row.since_ns is not None and last.get(row.request, 0) <= row.since_ns]
