"""The composition root when its surroundings fail it: nothing stays hooked, nothing waits for ever."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from kvobs import model, runtime
from kvobs.config import Config
from tests import events


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


class Slow(Fake):
    """A source whose hooks take half of the engine's time, as far as the bus lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.published = 0

    def install(self, emit: model.Emit) -> None:
        super().install(emit)
        self.emit = emit

    def second(self, found: runtime.Runtime) -> None:
        if found.bus.active:
            self.published += 1
            self.emit(events.step(hook_ns=500_000_000, duration_ns=500_000_000))


def gauges(found: runtime.Runtime) -> dict[str, Any]:
    return {row.name: values for row, values in found.metrics.collect()}


def test_slow_hooks_are_passed_through_and_come_back(caplog: pytest.LogCaptureFixture) -> None:
    """The guard pauses the bus within 5 s, says so as metric, fact and log, hides stale gauges, and resumes later."""
    now, source = [0], Slow()
    found = runtime.Runtime(Config(store=None, prometheus=None, otlp="off"), [source], clock=lambda: now[0])
    found._start_thread = lambda body: None  # type: ignore[method-assign]
    found.start()
    try:
        for _ in range(5):
            source.second(found)
            now[0] += 1_000_000_000
            found.tick(sample=True)
        assert not found.bus.active
        assert found.bus.epoch == 1
        points = gauges(found)
        assert points["kvobs.self.throttle"] == {(): 2}
        assert "kvobs.kv.usage" not in points
        (subject, reason), = [key for key in points["kvobs.availability"] if key[0] == "overhead"]
        assert (points["kvobs.availability"][subject, reason], reason) == (0, found.guard.reason)
        assert [record.getMessage() for record in caplog.records] == [f"kvobs: {found.guard.reason}"]
        seen = source.published
        while not found.bus.active:
            now[0] += 1_000_000_000
            found.tick(sample=True)
        assert source.published == seen
        assert gauges(found)["kvobs.self.paused"][()] == pytest.approx(10, abs=1.5)
    finally:
        found.stop()
    assert not found.bus.active


def test_an_out_of_memory_error_leaves_a_flight_record() -> None:
    """An engine call that ends out of memory is counted and leaves one record with the seconds before it."""
    now, source = [0], Slow()
    found = runtime.Runtime(Config(store=None, prometheus=None, otlp="off"), [source], clock=lambda: now[0])
    found._start_thread = lambda body: None  # type: ignore[method-assign]
    told: list[model.Event] = []
    fold = found.metrics.fold
    found.metrics.fold = lambda batch: told.extend(batch) or fold(batch)  # type: ignore[method-assign, func-returns-value]
    found.start()
    try:
        source.emit(events.step(hook_ns=0))
        now[0] = 1_000_000_000
        found.tick(sample=True)
        source.emit(model.OutOfMemory(1_500_000_000, events.ORIGIN, "anna", "no memory"))
        found.tick()
    finally:
        found.stop()
    (record,) = [event for event in told if isinstance(event, model.FlightRecord)]
    assert json.loads(record.windows)["series"]["kvobs.kv.caches{model=tiny,device=cpu,cache=DynamicCache}"] == [1]
    assert gauges(found)["kvobs.flight.records"] == {("out_of_memory",): 1}
