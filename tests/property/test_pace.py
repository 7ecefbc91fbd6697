"""How often everything of a process is looked at, against what is promised of it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvobs.pace import Pace

MS = 1_000_000
TICKS = st.lists(st.tuples(st.integers(250, 400), st.booleans()), min_size=1, max_size=120)


def looks(role: str, ticks: list[tuple[int, bool]], *, decides: bool = False) -> list[int]:
    """When it was looked (ms), with a tick after each wait; begins with a look at 0."""
    pace, at, looked = Pace(decides=decides), 0, []
    pace.role = role
    for wait, heard in [(0, False), *ticks]:
        at += wait
        if pace.due(at * MS, heard):
            pace.looked(at * MS)
            looked.append(at)
    return looked


@given(role=st.sampled_from(["", "llm", "engine_core"]), ticks=TICKS)
def test_whoever_works_is_looked_at_whatever_happens(role: str, ticks: list[tuple[int, bool]]) -> None:
    """Looks are a second apart, two in an engine's core, and at most a tick more, whether or not something happens."""
    looked, every = looks(role, ticks), 2_000 if role == "engine_core" else 1_000
    assert looked[0] == 0
    assert all(every <= later - early < every + 400 for early, later in itertools.pairwise(looked))
    assert sum(wait for wait, _ in ticks) - looked[-1] < every


@given(role=st.sampled_from(["api_server", "worker"]), ticks=TICKS)
def test_who_rests_is_looked_at_every_four_seconds(role: str, ticks: list[tuple[int, bool]]) -> None:
    """Of a process in which nothing happens looks are four seconds apart; something that happens is seen in one."""
    looked = looks(role, ticks)
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


@given(role=st.sampled_from(["", "llm", "engine_core", "api_server", "worker"]), ticks=TICKS)
def test_a_breaker_decides_on_what_is_a_second_old_at_most(role: str, ticks: list[tuple[int, bool]]) -> None:
    """Where a breaker decides, looks are a second apart in every process."""
    assert all(later - early < 1_400 for early, later in itertools.pairwise(looks(role, ticks, decides=True)))
