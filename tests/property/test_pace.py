"""How often a process is looked at and committed, against what is promised of it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvobs.pace import Pace

MS = 1_000_000
TICKS = st.lists(st.tuples(st.integers(250, 400), st.booleans()), min_size=1, max_size=120)


def looks(role: str, ticks: list[tuple[int, bool]]) -> tuple[list[int], list[int]]:
    """When it was looked, and when committed (ms), with a tick after each wait; begins with a look at 0."""
    pace, at, looked, committed = Pace(), 0, [], []
    pace.role = role
    for wait, heard in [(0, False), *ticks]:
        at += wait
        if pace.look(at * MS, heard):
            pace.looked(at * MS)
            looked.append(at)
            if pace.commit(at * MS):
                committed.append(at)
    return looked, committed


@given(role=st.sampled_from(["", "llm", "engine_core"]), ticks=TICKS)
def test_whoever_works_is_looked_at_every_second(role: str, ticks: list[tuple[int, bool]]) -> None:
    """Looks are a second apart, and at most a tick more, whether or not something happens."""
    looked, _ = looks(role, ticks)
    assert looked[0] == 0
    assert all(1_000 <= later - early < 1_400 for early, later in itertools.pairwise(looked))
    assert sum(wait for wait, _ in ticks) - looked[-1] < 1_000


@given(role=st.sampled_from(["api_server", "worker"]), ticks=TICKS)
def test_who_rests_is_looked_at_every_four_seconds(role: str, ticks: list[tuple[int, bool]]) -> None:
    """Of a process in which nothing happens looks are four seconds apart; something that happens is seen in one."""
    looked, _ = looks(role, ticks)
    at, heard_at = 0, []
    for wait, heard in ticks:
        at += wait
        heard_at += [at] if heard else []
    for early, later in itertools.pairwise(looked):
        happened = [moment for moment in heard_at if early < moment <= later]
        assert later - early < 4_400
        assert later - early >= (1_000 if happened else 4_000)
    for moment in heard_at:
        assert at - moment < 1_400 or any(moment <= look < moment + 1_400 for look in looked)


@given(role=st.sampled_from(["", "llm", "engine_core", "api_server"]), ticks=TICKS)
def test_what_was_seen_is_committed_soon(role: str, ticks: list[tuple[int, bool]]) -> None:
    """An engine's core commits every second look, everybody else each time."""
    looked, committed = looks(role, ticks)
    if role != "engine_core":
        assert committed == looked
    else:
        assert set(committed) <= set(looked)
        assert all(1_750 <= later - early < 2_800 for early, later in itertools.pairwise(committed))
