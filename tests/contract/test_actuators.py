"""Every actuator of kvobs keeps the contract: the queue alone, torch, continuous batching, transformers."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from kvobs.model import Capability, Effect
from kvobs.sources._safe_point import MOST_WAITING, Action, Result, SafePoint
from tests.contract.actuators import (
    Answers,
    CachesContract,
    Engine,
    PagedContract,
    QueueContract,
    TorchContract,
)
from tests.support import wait_until


class TestQueue(QueueContract):
    """The queue alone."""


class TestTorch(TorchContract):
    """torch without an accelerator, and the C heap."""

    @pytest.fixture(autouse=True)
    def needs(self) -> None:
        pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")


class TestPaged(PagedContract):
    """The pool of continuous batching."""

    @pytest.fixture(autouse=True)
    def needs(self) -> None:
        pytest.importorskip("transformers.generation.continuous_batching.cache_allocators",
                            reason="This transformers is older than 5.18.")


class TestCaches(CachesContract):
    """Caches of transformers on the CPU."""

    @pytest.fixture(autouse=True)
    def needs(self) -> None:
        pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings it.")


def _order(kind: str, generation: int = 1, *, undo: bool = False, level: int = 1) -> Any:
    from kvobs.model import Order

    return Order(level, kind, generation, 1 << 62, undo)


def test_an_action_that_raises_is_rolled_back_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """What failed half way is undone at once, answered as not done, and said once in the log, however often."""
    engine, answers = Engine(), Answers()
    point = SafePoint("engine", engine.actions(), answers.append)
    for generation in (1, 2, 3):
        point.submit(_order("broken", generation))
        point.run()
    assert [taken.done for taken in answers.taken()] == [False] * 3
    assert not engine.half
    assert point.in_effect() == ()
    assert sum("broken" in record.message for record in caplog.records) == 1
    assert "nobody knows" in point.plan("broken").reason
    point.close()


def test_an_interrupt_passes_and_is_answered() -> None:
    """An interrupt of the host that falls into an action reaches the host, and the order is answered all the same."""
    answers = Answers()

    def interrupted(_: int) -> Result:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(30)
        return Result(True)

    point = SafePoint("engine", (Action(Capability(1, "wait", False, "Wait."), lambda: Effect(0, None), interrupted),),
                      answers.append)
    point.submit(_order("wait"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            point.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [taken.done for taken in answers.taken()] == [False]
    point.submit(_order("none"))
    point.run()
    assert len(answers.taken()) == 1
    point.close()


def test_closing_undoes_and_answers() -> None:
    """At the end what is in effect is undone and what waits is answered; what comes later is refused at once."""
    engine, answers = Engine(), Answers()
    point = SafePoint("engine", engine.actions(), answers.append)
    point.submit(_order("flag", level=2))
    point.run()
    assert engine.flag
    point.submit(_order("free"))
    point.close()
    point.submit(_order("free", 2))
    assert not engine.flag
    assert engine.held == 100
    assert [taken.done for taken in answers.taken()] == [True, False, False]


def test_the_queue_is_bounded() -> None:
    """Of more orders than may wait, the rest is refused at once and the first ones are carried out."""
    engine, answers = Engine(), Answers()
    point = SafePoint("engine", engine.actions(), answers.append)
    for _ in range(MOST_WAITING + 3):
        point.submit(_order("free"))
    assert [taken.done for taken in answers.taken()] == [False] * 3
    point.run()
    assert [taken.done for taken in answers.taken()] == [True] * MOST_WAITING
    point.close()


def test_an_idle_engine_is_not_waited_for() -> None:
    """Where the engine says that it is idle, orders are carried out without a safe point; else they only expire."""
    idle = threading.Event()
    engine, answers = Engine(), Answers()
    point = SafePoint("engine", engine.actions(), answers.append, idle=idle.is_set)
    point.submit(_order("free"))
    idle.set()
    wait_until(lambda: engine.held == 0, what="an idle engine's order")
    wait_until(lambda: answers, what="its answer")
    idle.clear()
    from kvobs.model import Order

    point.submit(Order(1, "free", 1, 1, False))
    wait_until(lambda: len(answers) == 2, what="the answer to an overdue order")
    assert [taken.done for taken in answers.taken()] == [True, False]
    point.close()


def test_guests_ride_along() -> None:
    """What belongs to no engine is carried out at the safe point of an engine of the process, on its thread."""
    threads: list[int] = []

    def note(_: int) -> Result:
        threads.append(threading.get_ident())
        return Result(True)

    answers = Answers()
    guest = SafePoint("guest", (Action(Capability(1, "note", False, "Note."), lambda: Effect(0, None), note),),
                      answers.append, guest=True)
    host = SafePoint("engine", Engine().actions(), answers.append)
    guest.submit(_order("note"))
    assert host.waiting
    host.run()
    assert threads == [threading.get_ident()]
    assert not host.waiting
    guest.close()
    host.close()


def test_a_forked_child_answers_nothing_of_its_parent() -> None:
    """What waited at a fork is answered by the parent alone, and the child can be given orders of its own."""
    engine, answers = Engine(), Answers()
    point = SafePoint("engine", engine.actions(), answers.append)
    point.submit(_order("free"))
    child = os.fork()
    if child == 0:
        point.after_fork_in_child()
        point.run()
        point.submit(_order("flag", level=2))
        point.run()
        os._exit(0 if [taken.kind for taken in answers.taken()] == ["flag"] and engine.held == 100 else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    point.run()
    assert [taken.kind for taken in answers.taken()] == ["free"]
    point.close()
