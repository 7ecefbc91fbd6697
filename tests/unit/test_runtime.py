"""The composition root when its surroundings fail it: nothing stays hooked, nothing waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from kvobs import model, runtime
from kvobs.config import Config


class Fake:
    """A source that remembers whether it is installed and may block in ``sample``."""

    name = "fake"

    def __init__(self) -> None:
        self.installed = False
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def install(self, emit: model.Emit) -> None:
        self.installed = True

    def uninstall(self) -> None:
        self.installed = False

    def sample(self, now_ns: int) -> Iterable[model.Event]:
        self.entered.set()
        self.go_on.wait(60)
        return ()

    def availability(self) -> Iterable[model.Availability]:
        return ()


def made(source: Fake) -> runtime.Runtime:
    return runtime.Runtime(Config(store=None, prometheus=None, otlp="off"), [source])


def test_no_thread_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the drain thread cannot start, the error passes, every source is uninstalled and the bus is inactive."""
    source = Fake()
    found = made(source)
    start = threading.Thread.start

    def refusing(self: threading.Thread) -> None:
        if self.name == "kvobs-drain":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    with pytest.raises(RuntimeError, match="can't start"):
        found.start()
    assert (source.installed, found.bus.active) == (False, False)
    monkeypatch.setattr(threading.Thread, "start", start)
    found.start()
    assert (source.installed, found.bus.active) == (True, True)
    found.stop()


def test_a_stuck_drain_thread_is_not_waited_for(monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    """While a tick hangs, flush and stop return after their bound, say so, and the source is uninstalled."""
    monkeypatch.setattr(runtime, "STOP_S", 0.05)
    source = Fake()
    found = made(source)
    source.go_on.clear()
    found.start()
    thread: Any = found._thread
    try:
        assert source.entered.wait(60)
        found.flush()
        found.stop()
        assert not source.installed
        assert thread.is_alive()
        assert any("stuck" in record.getMessage() for record in caplog.records)
    finally:
        source.go_on.set()
        thread.join(60)


def test_what_can_be_lost_is_shown_from_the_start() -> None:
    """A new process shows a loss of 0 at every stage, so that the first loss is an increase."""
    found = made(Fake())
    shown = {row.name: points for row, points in found.metrics.collect()}
    assert shown["kvobs.self.events.dropped"] == {("queue",): 0, ("store",): 0, ("otlp",): 0}
