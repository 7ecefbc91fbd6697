"""The gate and the limits by priority: what a request may have, and that the gate opens when in doubt."""

from __future__ import annotations

import sys
import threading

import pytest

from kvobs.breaker._gate import ACT, OBSERVE, Decision, Gate, wanted
from kvobs.breaker._limits import UNLIMITED, ByPriority, Limits, by_priority
from kvobs.sessions import PRIORITIES

TIGHT = (UNLIMITED, Limits(max_new_tokens=7), Limits(admit=False))


def decision(**changed: object) -> Decision:
    given: dict[str, object] = {"generation": 1, "level": 3, "mode": ACT, "limits": TIGHT, "retry_after_s": 2.0,
                                "expires_ns": 100}
    return Decision(**(given | changed))  # type: ignore[arg-type]


def gate(found: Decision | None, now_ns: int = 0) -> Gate:
    made = Gate(lambda: now_ns)
    made.decision = found
    return made


def test_a_decision_in_force_limits_each_priority() -> None:
    """Each priority has its own limits, and one that nobody knows counts as normal."""
    found = gate(decision(), 99)
    assert tuple(found.limits(priority) for priority in PRIORITIES) == TIGHT
    assert found.limits("urgent") == TIGHT[1]


@pytest.mark.parametrize(("found", "now_ns"), [
    (None, 0), (decision(), 100), (decision(), 10**18), (decision(mode=OBSERVE), 0), (decision(mode="off"), 0),
    (decision(mode="nonsense"), 0)])
def test_the_gate_is_open_in_doubt(found: Decision | None, now_ns: int) -> None:
    """Without a decision, with an expired one, and in every mode but act nobody is limited."""
    assert [gate(found, now_ns).limits(priority) for priority in PRIORITIES] == [UNLIMITED] * 3


def test_what_would_be_done_is_known_in_mode_observe() -> None:
    """In modes observe and act the limits of a decision are told for counting, in others there are none."""
    for mode in (OBSERVE, ACT):
        assert tuple(wanted(decision(mode=mode), priority) for priority in PRIORITIES) == TIGHT
    assert wanted(decision(mode="off"), "sheddable") == wanted(None, "sheddable") == UNLIMITED


def test_a_decision_expires_at_its_time() -> None:
    """The current decision is the one that has not expired."""
    assert gate(decision(), 99).current() == decision()
    assert gate(decision(), 100).current() is None
    assert gate(None).current() is None


def test_every_answer_is_of_one_decision() -> None:
    """While a thread replaces the decision all the time, an answer is always that of one of them."""
    old, new = decision(), decision(limits=(UNLIMITED, Limits(max_new_tokens=8), UNLIMITED))
    found, stop = gate(old), threading.Event()

    def replace() -> None:
        while not stop.is_set():
            found.decision = new
            found.decision = old

    thread = threading.Thread(target=replace)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        seen = {found.limits("normal") for _ in range(20_000)}
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(switch)
    assert seen <= {Limits(max_new_tokens=7), Limits(max_new_tokens=8)}


def test_critical_sessions_are_degraded_last() -> None:
    """By default nobody is limited below level 3, where sheddable sessions are refused, normal ones get fewer tokens
    and critical ones all.
    """
    policy = ByPriority()
    for level in (0, 1, 2):
        assert by_priority(policy, level) == (UNLIMITED,) * 3
    critical, normal, sheddable = by_priority(policy, 3)
    assert critical == UNLIMITED
    assert normal.admit
    assert normal.max_new_tokens is not None
    assert not sheddable.admit


def test_limits_can_be_chosen() -> None:
    """Other limits, from another level on, are taken as they are."""
    policy = ByPriority(normal=Limits(max_new_tokens=9), sheddable=Limits(max_new_tokens=5), from_level=1)
    assert by_priority(policy, 1) == (UNLIMITED, Limits(max_new_tokens=9), Limits(max_new_tokens=5))


@pytest.mark.parametrize("given", [
    {"critical": Limits(admit=False)}, {"critical": Limits(max_new_tokens=10)},
    {"normal": Limits(admit=False), "sheddable": Limits(max_new_tokens=5)},
    {"normal": Limits(history_tokens=5), "sheddable": Limits(history_tokens=6)}])
def test_an_order_that_is_upside_down_is_refused(given: dict[str, Limits]) -> None:
    """Limits that are tighter for a more important priority are refused in one sentence."""
    with pytest.raises(ValueError, match=r"^The limits of (critical|normal) sessions are tighter .*\.$"):
        ByPriority(**given)
