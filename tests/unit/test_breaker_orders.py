"""The running breaker: what it orders, tells and takes back, with actuators that only remember."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvobs import model
from kvobs.breaker import Leaf, Level, Policy
from kvobs.breaker._breaker import LIMITS_NS, PATIENCE_NS, Breaker
from kvobs.breaker._gate import ACT, OBSERVE
from tests import events

SECOND = 10**9
RULES = {"open_s": 1.0, "closed_s": 1.0, "half_open_s": 2.0}
POLICY = Policy(name="test", jitter=0.0, escalate_s=1.0, levels=tuple(
    Level(condition=Leaf(signal="app.load", above=float(limit)), **RULES) for limit in (1, 2, 3)))


class Hands:
    """An actuator that remembers its orders, and may fail."""

    def __init__(self, name: str, *, fails: bool = False) -> None:
        self.name, self.fails, self.orders = name, fails, list[model.Order]()

    def capabilities(self) -> Sequence[model.Capability]:
        return [model.Capability(1, "sweep", False, ""), model.Capability(1, "chunk", True, ""),
                model.Capability(2, "offload", True, "")]

    def plan(self, kind: str) -> model.Effect:
        return model.Effect(None, None)

    def submit(self, order: model.Order) -> None:
        if self.fails:
            raise RuntimeError("broken")
        self.orders.append(order)


class Scene:
    """A breaker with two devices, ticked once a second under a load."""

    def __init__(self, mode: str, *hands: Hands) -> None:
        self.breaker, self.hands, self.now = Breaker(POLICY, mode, lambda: hands), hands, 0
        self.told: list[model.Decided] = []
        for name in ("cuda:0", "cuda:1"):
            self.breaker.device(name, None, "SERVED", 0)

    def under(self, load: float, seconds: int) -> None:
        for _ in range(seconds):
            self.now += SECOND
            self.breaker.report("app.load", load, self.now)
            self.told += self.breaker.tick(self.now, [])


def orders(hands: Hands) -> list[tuple[int, str, bool]]:
    return [(one.level, one.kind, one.undo) for one in hands.orders]


def test_levels_are_ordered_from_below_and_taken_back_from_above() -> None:
    """Two devices that open levels together have each action ordered once, of level 1, then of 2; only what can be
    undone is undone, once neither needs it.
    """
    hands = Hands("torch")
    scene = Scene(ACT, hands)
    scene.under(2.5, 4)
    assert scene.breaker.levels() == {"cuda:0": 2, "cuda:1": 2}
    assert orders(hands) == [(1, "sweep", False), (1, "chunk", False), (2, "offload", False)]
    assert all(order.deadline_ns - PATIENCE_NS in range(0, scene.now + 1, SECOND) for order in hands.orders)
    assert all(order.limit_ns == LIMITS_NS[order.level - 1] for order in hands.orders)
    del hands.orders[:]
    scene.under(0.0, 10)
    assert scene.breaker.levels() == {"cuda:0": 0, "cuda:1": 0}
    assert orders(hands) == [(2, "offload", True), (1, "chunk", True)]
    assert [one.generation for one in hands.orders] == sorted({one.generation for one in hands.orders})


def test_every_decision_is_told_with_its_readings() -> None:
    """Level, phases, policy, mode, the sentence and the signal's value at that moment."""
    scene = Scene(ACT, Hands("torch"))
    scene.under(1.5, 1)
    first = scene.told[0]
    assert (first.scope, first.policy, first.mode, first.level, first.before, first.after) == (
        "cuda:0", "test", "act", 1, "closed", "open")
    assert first.readings == (("app.load", 1.5),)
    assert first.reason == "Level 1 (reorganise) is open: its condition holds."


def test_observing_decides_the_same_and_orders_nothing() -> None:
    """In mode observe the same transitions are told at the same times, and no actuator hears of it."""
    hands, quiet = Hands("torch"), Hands("torch")
    acting, observing = Scene(ACT, hands), Scene(OBSERVE, quiet)
    for load, seconds in ((2.5, 4), (0.0, 10), (9.0, 5)):
        acting.under(load, seconds)
        observing.under(load, seconds)
    assert hands.orders
    assert quiet.orders == []
    decided = [(one.t_ns, one.scope, one.level, one.after) for one in acting.told]
    assert decided == [(one.t_ns, one.scope, one.level, one.after) for one in observing.told]
    assert {one.mode for one in observing.told} == {"observe"}


def test_an_actuator_that_raises_is_named_once_and_the_others_are_served(caplog: pytest.LogCaptureFixture) -> None:
    """The breaker goes on; the log has one line for each actuator that failed."""
    broken, sound = Hands("broken", fails=True), Hands("sound")
    scene = Scene(ACT, broken, sound)
    scene.under(2.5, 4)
    assert orders(sound)[-1] == (2, "offload", False)
    assert caplog.text.count("actuator broken failed") == 1


def test_operators_hold_and_reset() -> None:
    """A level that is held stays whatever the load; a reset closes everything and undoes what was ordered."""
    hands = Hands("torch")
    scene = Scene(ACT, hands)
    scene.under(0.0, 1)
    scene.breaker.hold(2)
    scene.under(0.0, 3)
    assert set(scene.breaker.levels().values()) == {2}
    scene.breaker.hold(None)
    del hands.orders[:]
    scene.breaker.reset()
    scene.under(0.0, 1)
    assert set(scene.breaker.levels().values()) == {0}
    assert orders(hands) == [(2, "offload", True), (1, "chunk", True)]
    with pytest.raises(ValueError, match="There is no level 4; allowed are 0 to 3"):
        scene.breaker.hold(4)


def test_a_level_that_is_held_is_held_in_scopes_that_come_later() -> None:
    """A device that is first heard of while an operator holds level 0 stays there under any load, until the hold ends;
    one that is first heard of while level 1 is held is ordered nothing above it.
    """
    hands = Hands("torch")
    scene = Scene(ACT, hands)
    for held in (0, 1):
        scene.breaker.hold(held)
        scene.breaker.device(f"cuda:{2 + held}", None, "SERVED", scene.now)
        scene.under(9.0, 6)
        assert set(scene.breaker.levels().values()) == {held}
        assert {one.level for one in hands.orders} == set(range(1, held + 1))
    scene.breaker.hold(None)
    scene.under(9.0, 6)
    assert set(scene.breaker.levels().values()) == {3}


def test_a_scope_that_opens_a_level_later_has_its_actions_ordered_too() -> None:
    """What freed a device's memory a moment ago says nothing of the other device's."""
    hands = Hands("torch")
    scene = Scene(ACT, hands)
    scene.under(1.5, 3)
    before = len(hands.orders)
    scene.breaker.device("cuda:2", None, "SERVED", scene.now)
    scene.under(1.5, 1)
    assert orders(hands)[before:] == [(1, "sweep", False), (1, "chunk", False)]


def test_stopping_leaves_nothing_applied() -> None:
    """At the end of observation what was ordered and can be undone is undone; in mode observe there is nothing."""
    hands, quiet = Hands("torch"), Hands("torch")
    for mode, one in ((ACT, hands), (OBSERVE, quiet)):
        scene = Scene(mode, one)
        scene.under(2.5, 4)
        del one.orders[:]
        scene.breaker.stop(scene.now)
    assert orders(hands) == [(2, "offload", True), (1, "chunk", True)]
    assert quiet.orders == []


def test_events_of_the_process_reach_the_machine() -> None:
    """An out-of-memory error, folded as any event, opens what asks for it, in the scope of the pool that is known."""
    policy = Policy(name="x", levels=tuple(Level(condition=Leaf(signal="out_of_memory", above=0.0)) for _ in range(3)))
    breaker = Breaker(policy, OBSERVE, list)
    breaker.fold([events.blocks(), model.OutOfMemory(SECOND, None, "", "")])
    told, = breaker.tick(SECOND, [])
    assert (told.scope, told.level, told.readings) == ("tiny@cpu", 1, (("out_of_memory", 1.0),))


class Again(Hands):
    """Its offload acts on what is there: ``idle`` bytes, which its plan tells."""

    idle = 0
    waiting = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[str] = []

    def capabilities(self) -> Sequence[model.Capability]:
        return [model.Capability(1, "chunk", True, ""), model.Capability(2, "offload", True, "", again=True)]

    def plan(self, kind: str) -> model.Effect:
        self.asked.append(kind)
        return model.Effect(self.idle, None)


def test_what_acts_on_what_is_there_is_ordered_again_while_its_level_is_open() -> None:
    """Once a second while its plan gives something back, with newer generations; not in observe, not once it closed."""
    hands = Again("caches")
    scene = Scene(ACT, hands)
    scene.under(2.5, 4)
    before = orders(hands)
    scene.under(2.5, 5)
    assert orders(hands) == before  # nothing is idle
    hands.idle = 7
    scene.under(2.5, 3)
    assert orders(hands)[len(before):] == 3 * [(2, "offload", False)]
    fresh = [one.generation for one in hands.orders[len(before):]]
    assert fresh == sorted(set(fresh))
    assert all("still open" in str(scene.breaker.causes[one]) for one in fresh)
    scene.under(0.0, 12)
    closed = len(hands.orders)
    assert orders(hands)[-2:] == [(2, "offload", True), (1, "chunk", True)]
    scene.under(0.0, 5)
    assert len(hands.orders) == closed
    watched = Again("watched")
    watched.idle = 7
    Scene(OBSERVE, watched).under(2.5, 9)
    assert watched.orders == []


def test_who_has_an_order_waiting_is_not_given_another_again() -> None:
    """While an engine makes a long pass its order stays the newest; only plans of the open level are asked for."""
    hands = Again("caches")
    scene = Scene(ACT, hands)
    scene.under(2.5, 4)
    hands.idle, hands.waiting, before = 7, True, len(hands.orders)
    hands.asked.clear()
    scene.under(2.5, 4)
    assert (len(hands.orders), hands.asked) == (before, [])
    hands.waiting = False
    scene.under(2.5, 2)
    assert orders(hands)[before:] == 2 * [(2, "offload", False)]
    assert hands.asked == ["offload", "offload"]


def test_a_plan_that_fails_is_said_once_and_the_others_are_ordered_again() -> None:
    """An actuator whose plan raises costs nobody else its orders."""
    class Broken(Again):
        def plan(self, kind: str) -> model.Effect:
            raise RuntimeError("broken")

    broken, whole = Broken("broken"), Again("whole")
    whole.idle = 7
    scene = Scene(ACT, broken, whole)
    scene.under(2.5, 8)
    assert orders(whole).count((2, "offload", False)) > orders(broken).count((2, "offload", False)) > 0
