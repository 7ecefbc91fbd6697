"""What every ``kvobs.model.Actuator`` promises, as tests.

Subclass ``ActuatorContract`` under a name that your test runner collects, and define ``rig``. Nothing here needs
pytest: each test is a method without arguments that raises AssertionError.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec

from kvobs.model import ActionTaken, Actuator, Capability, Effect, Order

SECOND_NS = 1_000_000_000
PATIENCE_S = 30.0
LEVELS = (1, 2, 3)


class Rig(msgspec.Struct, frozen=True):
    """An actuator on an engine that can be driven. ``reach`` takes the engine through a safe point; ``answers`` tells
    and forgets what was answered so far; ``state`` is what must be equal again after everything was undone.
    """

    actuator: Actuator
    reach: Callable[[], None]
    answers: Callable[[], list[ActionTaken]]
    state: Callable[[], object]


class ActuatorContract:
    """The suite. Where ``acts`` names kinds, these must be carried out on the rig, not refused."""

    acts: tuple[str, ...] = ()

    def rig(self) -> AbstractContextManager[Rig]:
        """A fresh engine with its actuator, taken down at the end."""
        raise NotImplementedError

    # -- what it says ----------------------------------------------------------------------------------

    def test_capabilities_are_told_apart(self) -> None:
        """Kinds are named once, with a level from 1 to 3 and a sentence that says what they do."""
        with self.rig() as rig:
            found = rig.actuator.capabilities()
            assert found, "It can do nothing."
            assert len({one.kind for one in found}) == len(found)
            for one in found:
                assert one.level in LEVELS, one
                assert one.kind.isidentifier(), one
                _sentence(one.meaning)
            assert set(self.acts) <= {one.kind for one in found}

    def test_plans_change_nothing(self) -> None:
        """Every kind has a plan: bytes, or a sentence that says why not; the engine stays as it is."""
        with self.rig() as rig:
            before = rig.state()
            for one in rig.actuator.capabilities():
                effect: Effect = rig.actuator.plan(one.kind)
                assert effect.bytes is None or effect.bytes >= 0, effect
                assert effect.bytes is not None or effect.reason, effect
                if effect.reason:
                    _sentence(effect.reason)
            assert rig.state() == before
            assert rig.answers() == []

    def test_unknown_kinds(self) -> None:
        """What it cannot do has no plan, and an order for it is answered as refused."""
        with self.rig() as rig:
            assert "no_such_kind" in _refusal(rig.actuator, "no_such_kind")
            taken, = _ordered(rig, _order(1, "no_such_kind", 1))
            assert not taken.done
            _sentence(taken.reason)

    # -- what it does ----------------------------------------------------------------------------------

    def test_orders_are_answered_once_and_in_their_order(self) -> None:
        """Each order gets one answer with its own fields, in the order of submission; a refusal says why."""
        with self.rig() as rig:
            orders = [_order(one.level, one.kind, 1) for one in _by_level(rig)]
            answers = _ordered(rig, *orders)
            assert [_named(taken) for taken in answers] == [_named(order) for order in orders]
            for taken in answers:
                assert taken.actuator == rig.actuator.name
                assert not taken.late, taken
                assert taken.duration_ns >= 0
                assert taken.bytes >= 0
                if not taken.done:
                    assert not taken.bytes, taken
                    assert taken.kind not in self.acts, taken
                    _sentence(taken.reason)
            assert not _later(rig), "Something was answered twice."

    def test_what_is_so_already_is_done_again_for_nothing(self) -> None:
        """A second time, what was done is done with 0 bytes, and what was refused is refused."""
        with self.rig() as rig:
            for one in rig.actuator.capabilities():
                first, = _ordered(rig, _order(one.level, one.kind, 1))
                second, = _ordered(rig, _order(one.level, one.kind, 1))
                assert second.done == first.done, (first, second)
                if one.reversible:
                    assert second.bytes == 0, second

    def test_undoing_puts_everything_back(self) -> None:
        """Everything that can be undone is done and undone, the latest first: the state is what it was."""
        with self.rig() as rig:
            before = rig.state()
            kinds = [one for one in rig.actuator.capabilities() if one.reversible]
            done = [one for one in kinds if _ordered(rig, _order(one.level, one.kind, 1))[0].done]
            assert {one.kind for one in done} >= {one.kind for one in kinds if one.kind in self.acts}
            for one in reversed(done):
                taken, = _ordered(rig, _order(one.level, one.kind, 2, undo=True))
                assert taken.done, taken
            assert rig.state() == before

    def test_undoing_what_was_not_done(self) -> None:
        """To undo what is not in effect changes nothing and is done; what cannot be undone is refused."""
        with self.rig() as rig:
            before = rig.state()
            for one in rig.actuator.capabilities():
                taken, = _ordered(rig, _order(one.level, one.kind, 1, undo=True))
                assert taken.done == one.reversible, taken
                assert taken.bytes == 0
            assert rig.state() == before

    # -- what it does not do ---------------------------------------------------------------------------

    def test_overdue_orders(self) -> None:
        """What should have ended before it could begin is answered and not carried out; to undo is never too late."""
        with self.rig() as rig:
            before = rig.state()
            for one in rig.actuator.capabilities():
                taken, = _ordered(rig, _order(one.level, one.kind, 1, deadline_ns=1))
                assert not taken.done, taken
                assert "deadline" in taken.reason
            assert rig.state() == before
            for one in rig.actuator.capabilities():
                if one.reversible and _ordered(rig, _order(one.level, one.kind, 2))[0].done:
                    taken, = _ordered(rig, _order(one.level, one.kind, 3, undo=True, deadline_ns=1))
                    assert taken.done, taken
                    assert taken.late
            assert rig.state() == before

    def test_outdated_orders(self) -> None:
        """An order older than the newest one of its level is answered and not carried out, whichever came first."""
        with self.rig() as rig:
            before = rig.state()
            for one in rig.actuator.capabilities():
                assert _ordered(rig, _order(one.level, one.kind, 9, undo=True))
                taken, = _ordered(rig, _order(one.level, one.kind, 8))
                assert not taken.done, taken
                _sentence(taken.reason)
            assert rig.state() == before

    def test_orders_from_many_threads(self) -> None:
        """Orders from several threads at once are answered once each."""
        with self.rig() as rig:
            kinds = list(rig.actuator.capabilities())

            def submit(first: int) -> None:
                for one in kinds:
                    rig.actuator.submit(_order(one.level, one.kind, first))

            threads = [threading.Thread(target=submit, args=(number,)) for number in range(1, 5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wanted = sorted((one.kind, number) for one in kinds for number in range(1, 5))
            assert sorted((taken.kind, taken.generation) for taken in _answered(rig, len(wanted))) == wanted
            assert not _later(rig)


def _refusal(actuator: Actuator, kind: str) -> str:
    try:
        actuator.plan(kind)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"A plan for {kind} raised nothing.")


def _order(level: int, kind: str, generation: int, *, undo: bool = False, deadline_ns: int | None = None) -> Order:
    soon = time.monotonic_ns() + 60 * SECOND_NS
    return Order(level, kind, generation, soon if deadline_ns is None else deadline_ns, undo)


def _ordered(rig: Rig, *orders: Order) -> list[ActionTaken]:
    """Submit, and drive the engine until everything is answered."""
    for order in orders:
        rig.actuator.submit(order)
    return _answered(rig, len(orders))


def _answered(rig: Rig, number: int) -> list[ActionTaken]:
    found: list[ActionTaken] = []
    until = time.monotonic() + PATIENCE_S
    while len(found) < number:
        assert time.monotonic() < until, f"{number - len(found)} of {number} orders were not answered."
        rig.reach()
        found += rig.answers()
    return found


def _later(rig: Rig) -> list[ActionTaken]:
    for _ in range(3):
        rig.reach()
    return rig.answers()


def _by_level(rig: Rig) -> list[Capability]:
    return sorted(rig.actuator.capabilities(), key=lambda one: one.level)


def _named(one: Order | ActionTaken) -> tuple[int, str, int, bool]:
    return one.level, one.kind, one.generation, one.undo


def _sentence(text: str) -> None:
    assert text[:1].strip(), text
    assert text.endswith("."), text
