"""Patches: what was there is there again, the very same object."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs import model
from kvobs.sources._patch import Patches


class Base:
    def inherited(self, value: int) -> int:
        """Say the value."""
        return value


class Child(Base):
    def own(self, value: int) -> int:
        return value + 1


def doubling(original: Any) -> Any:
    return lambda *args: 2 * original(*args)


@pytest.fixture
def failures() -> list[model.Event]:
    return []


@pytest.fixture
def patches(failures: list[model.Event]) -> Patches:
    return Patches("test", failures.append)


def test_an_own_attribute_is_restored_by_identity(patches: Patches) -> None:
    """While patched the wrapper answers; after restore the class holds the object that it held."""
    original = vars(Child)["own"]
    patches.wrap(Child, "own", doubling)
    assert Child().own(1) == 4
    assert inspect.signature(Child.own) == inspect.signature(original)
    patches.restore()
    assert vars(Child)["own"] is original
    assert Child().own(1) == 2


def test_an_inherited_attribute_is_shadowed_and_unshadowed(patches: Patches) -> None:
    """Only the named class changes: its base keeps its object, and afterwards the class has no attribute of its own."""
    original = vars(Base)["inherited"]
    patches.wrap(Child, "inherited", doubling)
    assert (Child().inherited(3), Base().inherited(3)) == (6, 3)
    assert Child.inherited.__doc__ == "Say the value."
    patches.restore()
    assert "inherited" not in vars(Child)
    assert vars(Base)["inherited"] is original
    assert Child().inherited(3) == 3


def test_a_module_function_is_restored(patches: Patches) -> None:
    """An owner may be anything with a namespace, such as a module."""
    module = SimpleNamespace(__name__="library", load=len)
    patches.wrap(module, "load", doubling)
    assert module.load("abc") == 6
    patches.restore()
    assert module.load is len


def test_a_second_wrap_of_the_same_place_is_ignored(patches: Patches) -> None:
    """Wrapping twice neither doubles the hook nor loses the original."""
    original = vars(Child)["own"]
    patches.wrap(Child, "own", doubling)
    patches.wrap(Child, "own", doubling)
    assert Child().own(1) == 4
    patches.restore()
    assert vars(Child)["own"] is original


def test_restore_twice_and_wrap_again(patches: Patches) -> None:
    """Restoring is safe to repeat, and a restored place can be patched anew."""
    original = vars(Child)["own"]
    for _ in range(2):
        patches.wrap(Child, "own", doubling)
        assert Child().own(1) == 4
        patches.restore()
        patches.restore()
        assert vars(Child)["own"] is original


def test_a_foreign_wrapper_on_top_stays(patches: Patches) -> None:
    """What somebody put over the hook is theirs: it is not removed, and it still reaches the original through it."""
    original = vars(Child)["own"]
    patches.wrap(Child, "own", doubling)
    ours = vars(Child)["own"]

    def foreign(self: Child, value: int) -> int:
        return -ours(self, value)

    Child.own = foreign  # type: ignore[method-assign]
    try:
        patches.restore()
        assert vars(Child)["own"] is foreign
        assert Child().own(1) == -4
    finally:
        Child.own = original  # type: ignore[method-assign]


def test_a_foreign_wrapper_underneath_is_what_comes_back(patches: Patches) -> None:
    """What was there when kvobs came, foreign or not, is what kvobs leaves."""
    original = vars(Child)["own"]
    Child.own = foreign = lambda self, value: value + 100  # type: ignore[method-assign,assignment]
    try:
        patches.wrap(Child, "own", doubling)
        assert Child().own(1) == 202
        patches.restore()
        assert vars(Child)["own"] is foreign
    finally:
        Child.own = original  # type: ignore[method-assign]


def test_a_place_that_vanished_is_left_alone(patches: Patches) -> None:
    """If somebody deleted the attribute meanwhile, restoring neither raises nor brings it back."""
    class Owner:
        def gone(self) -> None: ...

    patches.wrap(Owner, "gone", doubling)
    del Owner.gone
    patches.restore()
    assert "gone" not in vars(Owner)


def test_a_missing_attribute_changes_nothing(patches: Patches) -> None:
    """Patching what another version of the library does not have raises AttributeError and leaves no patch."""
    before = dict(vars(Child))
    with pytest.raises(AttributeError):
        patches.wrap(Child, "renamed_in_another_version", doubling)
    patches.restore()
    assert dict(vars(Child)) == before


def test_a_failing_hook_is_detached_and_said_once(patches: Patches, failures: list[model.Event],
                                                   caplog: pytest.LogCaptureFixture) -> None:
    """The failed patch goes, the others stay; one warning and one event name it, however often it fails."""
    own, inherited = vars(Child)["own"], vars(Base)["inherited"]
    patches.wrap(Child, "own", doubling)
    patches.wrap(Base, "inherited", doubling)
    with caplog.at_level(logging.WARNING, "kvobs"):
        patches.fail("Child.own", ValueError("no"))
        patches.fail("Child.own", ValueError("again"))
    assert vars(Child)["own"] is own
    assert vars(Base)["inherited"] is not inherited
    assert [record.getMessage() for record in caplog.records] == [
        "kvobs: the hook Child.own of source test raised ValueError: no; it was detached, the process is not affected."]
    assert [(event.source, event.hook, event.error) for event in failures] == [("test", "Child.own", "ValueError: no")]
    patches.restore()
    assert vars(Base)["inherited"] is inherited


def test_classes_of_one_name_do_not_hide_each_other(patches: Patches) -> None:
    """Two owners that share their name are both wrapped, and both restored."""
    first, second = (type("Same", (), {"call": lambda self, n=n: n}) for n in (1, 2))
    originals = [vars(owner)["call"] for owner in (first, second)]
    for owner in (first, second):
        patches.wrap(owner, "call", lambda original: lambda self: 10 * original(self))
    assert (first().call(), second().call()) == (10, 20)
    patches.restore()
    assert [vars(owner)["call"] for owner in (first, second)] == originals
