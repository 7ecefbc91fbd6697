"""Admission: whose turn it is, bounds and deadlines, and when who was refused should come back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.breaker._admission import JITTER, LEAST_RETRY_S, MOST_RETRY_S, Admission, Stand, Ticket, retry_after_s
from kvobs.sessions import PRIORITIES

SECOND = 10**9
FAR = 10**15


def order(admission: Admission, names: dict[int, str]) -> list[str]:
    """Who is let in one after the other, as places become free one by one."""
    found = []
    while admission.waiting:
        (ticket,) = admission.settle(0, admission.active + 1)
        found.append(names[id(ticket)])
    return found


def line_up(admission: Admission, arrivals: list[tuple[str, str]]) -> list[str]:
    """The order of those who wait, named by session and number."""
    tickets = [(session, admission.arrive(session, priority, FAR, 0)) for session, priority in arrivals]
    count: dict[str, int] = {}
    names = {}
    for session, ticket in tickets:
        count[session] = count.get(session, 0) + 1
        names[id(ticket)] = f"{session}{count[session]}"
    return order(admission, names)


def test_sessions_take_turns() -> None:
    """A session with five requests lets one with two and one with one in between, and each keeps its own order."""
    arrivals = [("a", "normal")] * 5 + [("b", "normal")] * 2 + [("c", "normal")]
    assert line_up(Admission(0), arrivals) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4", "a5"]


def test_the_most_important_go_first() -> None:
    """Critical requests go before normal and these before sheddable ones, whenever they came."""
    arrivals = [("s", "sheddable"), ("n", "normal"), ("c", "critical"), ("s", "sheddable"), ("c", "critical")]
    assert line_up(Admission(0), arrivals) == ["c1", "c2", "n1", "s1", "s2"]


def test_nobody_overtakes_who_waits() -> None:
    """While somebody waits a newcomer gets in line even where a place is free; without a line it is let in."""
    admission = Admission(0)
    assert admission.arrive("a", "normal", FAR, 1).stand is Stand.ACTIVE
    waits = admission.arrive("b", "normal", FAR, 1)
    assert admission.arrive("c", "normal", FAR, 2).stand is Stand.WAITING
    assert admission.settle(0, 2) == [waits]
    assert (admission.active, admission.waiting) == (2, 1)


def test_lines_are_bounded() -> None:
    """A session may have so many waiting, a priority so many in all; others are refused at once, and leave no trace."""
    admission = Admission(0, queued=5, per_session=2)
    stands = [admission.arrive(session, "normal", FAR, 0).stand for session in "aaabbbccc"]
    assert [stand is Stand.WAITING for stand in stands] == [True, True, False, True, True, False, True, False, False]
    assert admission.arrive("a", "sheddable", FAR, 0).stand is Stand.WAITING
    assert admission.waiting == 6
    assert Admission(0, queued=0).arrive("a", "normal", FAR, 1).stand is Stand.ACTIVE
    assert Admission(0, queued=0).arrive("a", "normal", FAR, 0).stand is Stand.FULL


def test_nobody_waits_beyond_the_deadline() -> None:
    """At its deadline a request is refused, also if a place becomes free in that moment; one later is not."""
    admission = Admission(0)
    early, late = admission.arrive("a", "normal", 10, 0), admission.arrive("b", "normal", 11, 0)
    assert admission.expire(9) == []
    assert admission.settle(10, 2) == [early, late]
    assert (early.stand, late.stand) == (Stand.LATE, Stand.ACTIVE)
    other = admission.arrive("c", "normal", 20, 0)
    assert admission.expire(20) == [other]
    assert (other.stand, admission.waiting, admission.active) == (Stand.LATE, 0, 1)


def test_a_place_is_given_back_once() -> None:
    """Leaving twice, or after a refusal, changes nothing."""
    admission = Admission(0, queued=1)
    active, waits, full = (admission.arrive(session, "normal", FAR, 1) for session in "abc")
    assert [admission.leave(one, 0) for one in (active, active, waits, waits, full)] == [True, False, True, False,
                                                                                        False]
    assert (admission.active, admission.waiting) == (0, 0)


def test_the_drain_rate_is_ends_over_time() -> None:
    """It is the number of ends within 30 s over 30 s, or over the time since the beginning where that is shorter."""
    admission = Admission(0)
    assert admission.drain_rate(SECOND) == 0.0
    for second in range(1, 11):  # one a second, for 10 s
        admission.leave(admission.enter("a", "normal"), second * SECOND)
    assert admission.drain_rate(10 * SECOND) == pytest.approx(10 / 10)
    assert admission.drain_rate(20 * SECOND) == pytest.approx(10 / 20)
    assert admission.drain_rate(35 * SECOND) == pytest.approx(6 / 30)  # those of seconds 5 to 10
    assert admission.drain_rate(41 * SECOND) == 0.0


def test_the_drain_rate_of_many_ends_is_bounded_and_right() -> None:
    """A thousand ends per second are as many though fewer are remembered."""
    admission = Admission(0)
    for number in range(5_000):
        admission.leave(admission.enter("a", "normal"), number * SECOND // 1_000)
    assert admission.drain_rate(4_999 * SECOND // 1_000) == pytest.approx(1_000, rel=0.01)


def test_who_waits_without_being_served_does_not_count_as_drained() -> None:
    """A request that gives up while it waits is no end."""
    admission = Admission(0)
    admission.leave(admission.arrive("a", "normal", FAR, 0), SECOND)
    assert admission.drain_rate(2 * SECOND) == 0.0


@given(waiting=st.integers(0, 10_000), rate=st.floats(0, 1e4), least=st.floats(0, 1e4), drawn=st.floats(0, 1))
def test_retry_after_is_the_closed_form(waiting: int, rate: float, least: float, drawn: float) -> None:
    """It is the time in which all who wait and one more end, at least the breaker's own, within 1 s and 60 s, and up
    to half more by the draw.
    """
    found = retry_after_s(waiting, rate, least, drawn)
    drain = (waiting + 1) / rate if rate else 0.0
    plain = sorted([1.0, max(drain, least), 40.0])[1]
    assert found == pytest.approx(plain * (1 + drawn / 2))
    assert LEAST_RETRY_S <= found <= MOST_RETRY_S + 1e-9


def test_retry_after_spreads_and_bears_nonsense() -> None:
    """Draws from 0 to 1 spread those who were refused together over half the time; what is not finite is left out."""
    admission = Admission(0)
    for second in range(1, 5):
        admission.leave(admission.enter("a", "normal"), second * SECOND)
    for _ in range(7):
        admission.arrive("a", "normal", FAR, 0)
    found = [admission.retry_after_s(4 * SECOND, 0.0, drawn) for drawn in (0.0, 0.5, 1.0)]
    assert found == pytest.approx([8.0, 10.0, 12.0])  # 7 wait and one more, one a second
    assert retry_after_s(0, 0.0, math.nan, 0.0) == retry_after_s(0, 0.0, math.inf, 0.0) == 1.0
    assert JITTER == 0.5


# -- against a plain second implementation ---------------------------------------------------------------

PLACES = 3
moves = st.lists(st.one_of(
    st.tuples(st.just("arrive"), st.sampled_from("abcd"), st.sampled_from(PRIORITIES), st.integers(1, 6)),
    st.tuples(st.just("enter"), st.sampled_from("abcd"), st.sampled_from(PRIORITIES), st.just(0)),
    st.tuples(st.sampled_from(["leave", "tick"]), st.just(""), st.just(""), st.integers(0, 50)),
), max_size=80)


class Plain:
    """Rotations written down as lists, searched from their beginning each time."""

    def __init__(self) -> None:
        self.turns: dict[str, list[str]] = {priority: [] for priority in PRIORITIES}
        self.waiting: list[tuple[int, str, str, int]] = []  # number, session, priority, deadline
        self.active: set[int] = set()
        self.late: set[int] = set()

    def arrive(self, number: int, session: str, priority: str, deadline: int) -> None:
        if session not in self.turns[priority]:
            self.turns[priority].append(session)
        self.waiting.append((number, session, priority, deadline))

    def forget(self) -> None:
        for priority, turns in self.turns.items():
            turns[:] = [one for one in turns if any(w[1:3] == (one, priority) for w in self.waiting)]

    def settle(self, now: int) -> None:
        while self.waiting and len(self.active) < PLACES:
            priority = next(p for p in PRIORITIES if any(w[2] == p for w in self.waiting))
            session = self.turns[priority].pop(0)
            first = next(w for w in self.waiting if w[1:3] == (session, priority))
            self.waiting.remove(first)
            self.turns[priority].append(session)
            self.forget()
            (self.late if now >= first[3] else self.active).add(first[0])


@given(program=moves)
def test_a_plain_implementation_lets_in_the_same(program: list[tuple[str, str, str, int]]) -> None:
    """Under any program the same requests are active, wait and are late, each is settled once, and while somebody
    waits all places are taken.
    """
    admission, plain, now = Admission(0, queued=1_000, per_session=1_000), Plain(), 0
    tickets: list[Ticket] = []
    for what, session, priority, number in program:
        if what == "arrive":
            plain.arrive(len(tickets), session, priority, now + number)
            tickets.append(admission.arrive(session, priority, now + number, PLACES))
        elif what == "enter":
            plain.active.add(len(tickets))
            tickets.append(admission.enter(session, priority))
        elif what == "leave" and tickets:
            gone = number % len(tickets)
            known = gone in plain.active or any(w[0] == gone for w in plain.waiting)
            assert admission.leave(tickets[gone], now) is known
            plain.active.discard(gone)
            plain.late.discard(gone)
            plain.waiting = [w for w in plain.waiting if w[0] != gone]
            plain.forget()
        elif what == "tick":
            now += number % 4
            late = [w for w in plain.waiting if now >= w[3]]
            assert {id(t) for t in admission.expire(now)} == {id(tickets[w[0]]) for w in late}
            plain.waiting = [w for w in plain.waiting if w not in late]
            plain.late |= {w[0] for w in late}
            plain.forget()
        before = {i for i, t in enumerate(tickets) if t.stand is not Stand.WAITING}
        settled = admission.settle(now, PLACES)
        plain.settle(now)
        assert not before & {tickets.index(t) for t in settled}
        for stand, numbers in ((Stand.ACTIVE, plain.active), (Stand.LATE, plain.late),
                               (Stand.WAITING, {w[0] for w in plain.waiting})):
            assert {i for i, t in enumerate(tickets) if t.stand is stand} == numbers
        assert admission.active == len(plain.active)
        assert not admission.waiting or admission.active >= PLACES
