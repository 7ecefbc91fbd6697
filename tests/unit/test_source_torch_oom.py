"""The out-of-memory observer: it records what was known, seldom and briefly, and never gets in the error's way."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from kvobs import model
from kvobs.bus import Bus
from kvobs.sources import _torch_listen as listen
from kvobs.sources import _torch_oom as oom
from kvobs.sources._torch import TorchSource
from tests.fake_torch import FakeTorch, GiB, MiB, segment, stat, stats

SECOND = 1_000_000_000


class Setting:
    """An observer on a fake torch, with the test's clock and switches."""

    def __init__(self, fake: FakeTorch) -> None:
        self.fake, self.now_ns = fake, 10 * SECOND
        self.active, self.capturing = True, False
        self.events: list[model.Event] = []
        self.observer = oom.OomObserver(fake, self.events.append, lambda: self.active, lambda: self.capturing,
                                        clock=lambda: self.now_ns)
        self.observer.start()

    def run_out(self, after_s: float = 0, requested: int = 2 * GiB) -> None:
        self.now_ns += int(after_s * SECOND)
        self.fake.run_out(requested=requested)

    def records(self) -> list[model.FlightRecord]:
        return [event for event in self.events if isinstance(event, model.FlightRecord)]


@pytest.fixture(autouse=True)
def _no_trampolines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_attached", [])
    monkeypatch.setattr(listen, "_listening", {})


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting(FakeTorch())
    made.fake.snapshot = [segment((MiB, "active_allocated"), (3 * MiB, "inactive"))]
    yield made
    made.observer.stop()


def test_a_record_says_what_was_asked_and_held(setting: Setting) -> None:
    """One error gives one record: device, bytes asked for, bytes free, and a summary of the segments."""
    setting.run_out(requested=512 * MiB)
    record, = setting.records()
    assert (record.t_ns, record.reason, record.device, record.requested_bytes) == (
        setting.now_ns, "out_of_memory", "cuda:0", 512 * MiB)
    assert record.message == (
        "The allocator of cuda:0 could not get 536870912 bytes; 104857600 bytes of the device were free and this "
        "process may have 85899345920.")
    assert record.windows == ""
    totals = json.loads(record.snapshot)["totals"]
    assert (totals["reserved"], totals["allocated"], totals["free"]) == (4 * MiB, MiB, 3 * MiB)


def test_at_most_one_record_a_second_and_six_a_minute(setting: Setting) -> None:
    """Of an error every 0.1 s for two minutes, 6 + 6 are recorded, a second apart, and every other one is counted."""
    for _ in range(1200):
        setting.run_out(after_s=0.1)
    times = [record.t_ns for record in setting.records()]
    assert len(times) == 12
    assert all(later - earlier >= SECOND for earlier, later in itertools.pairwise(times))
    assert setting.fake.snapshots == 12
    setting.run_out(after_s=61)
    counted = sum(int(record.message.split("At least ")[1].split()[0]) for record in setting.records()
                  if "At least " in record.message)
    assert counted == 1200 - 12


def test_the_trampoline_is_attached_once_per_process(setting: Setting) -> None:
    """torch cannot detach an observer: however often kvobs comes and goes, it has one, and one record is made."""
    setting.observer.stop()
    for _ in range(3):
        again = Setting(setting.fake)
        again.observer.stop()
    last = Setting(setting.fake)
    assert len(setting.fake.observers) == 1
    last.run_out()
    assert len(last.records()) == 1
    assert setting.records() == []
    last.observer.stop()


def test_nothing_is_recorded_after_stop_or_while_inactive(setting: Setting) -> None:
    """While kvobs passes through, and after it has stopped, an error costs no snapshot and makes no record."""
    setting.active = False
    setting.run_out()
    setting.active = True
    setting.observer.stop()
    setting.run_out(after_s=5)
    assert (setting.records(), setting.fake.snapshots) == ([], 0)


def test_the_trampoline_keeps_nothing_alive() -> None:
    """An observer that nobody holds is freed, though torch keeps the trampoline for good."""
    fake = FakeTorch()
    watched = weakref.ref(Setting(fake).observer)
    gc.collect()
    assert watched() is None
    fake.run_out()


def test_it_waits_for_the_host_to_initialise() -> None:
    """Before the host uses CUDA nothing is attached, which would initialise it; then the very first error is seen."""
    made = Setting(FakeTorch(initialised=False))
    assert made.fake.observers == []
    assert made.observer.reason == listen.WAITING
    made.fake.initialise()
    assert made.observer.reason == ""
    made.run_out()
    assert len(made.records()) == 1
    made.observer.stop()


def test_what_waits_is_taken_back() -> None:
    """Stopped before CUDA was initialised, torch's queue holds what it held and nothing is ever attached."""
    fake = FakeTorch(initialised=False)
    before = list(fake.cuda._queued_calls)
    made = Setting(fake)
    assert len(fake.cuda._queued_calls) == len(before) + 1
    made.observer.stop()
    assert fake.cuda._queued_calls == before
    fake.initialise()
    assert fake.observers == []


def test_stopping_while_cuda_is_being_initialised_leaves_the_queue_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch walks its queue under a lock: meanwhile the queue is not changed, and what was queued does nothing."""
    monkeypatch.setattr(listen, "_QUEUE_S", 0.01)
    fake = FakeTorch(initialised=False)
    made = Setting(fake)
    with fake.cuda._initialization_lock:
        before = list(fake.cuda._queued_calls)
        made.observer.stop()
        assert fake.cuda._queued_calls == before
    fake.initialise()
    assert fake.observers == []


def test_an_allocator_that_takes_no_observer_gives_a_reason() -> None:
    """What torch raises at attaching does not reach its initialisation, and is told as a reason."""
    made = Setting(FakeTorch(backend="cudaMallocAsync", initialised=False))
    made.fake.initialise()
    assert made.observer.reason == "The allocator takes no out-of-memory observer (RuntimeError)."
    made.observer.stop()


def crowded(fake: FakeTorch) -> None:
    fake.devices = [stats(active=stat(oom.MOST_BLOCKS // 2)), stats(active=stat(oom.MOST_BLOCKS // 2))]


@pytest.mark.parametrize(("prepare", "why"), [
    (lambda made: setattr(made, "capturing", True), oom.CAPTURING),
    (lambda made: setattr(made.fake, "history", True), oom.HISTORY),
    (lambda made: crowded(made.fake), oom.CROWDED),
])
def test_where_a_snapshot_would_harm_there_is_a_record_without(setting: Setting, prepare: Any, why: str) -> None:
    """During a capture, with a history, or with too many blocks no snapshot is taken; the record says why."""
    prepare(setting)
    setting.run_out()
    record, = setting.records()
    assert (record.snapshot, setting.fake.snapshots) == ("", 0)
    assert record.message.endswith(" " + why)


def test_a_failing_hook_is_told_once_and_detached(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    """A snapshot that raises does not reach the allocator: it is logged once by name, and no later error calls it."""
    setting.fake.snapshot = [{"total_size": "?"}]
    with caplog.at_level(logging.WARNING, logger="kvobs"):
        setting.run_out()
        setting.run_out(after_s=10)
    failure, = setting.events
    assert isinstance(failure, model.HookFailed)
    assert (failure.source, failure.hook) == ("torch", "out_of_memory_observer")
    assert len(caplog.records) == 1
    assert setting.fake.snapshots == 1
    assert setting.observer.reason == "The observer raised TypeError and was detached."


def test_an_error_within_an_error_waits_for_nobody(setting: Setting) -> None:
    """Another thread's error while one is being recorded is counted and passes at once: no thread waits in here."""
    taken = setting.fake.cuda.memory.memory_snapshot

    def snapshot(include_traces: bool = True) -> Any:
        setting.fake.run_out(device=1)  # as if from another thread: the lock is not reentrant
        return taken(include_traces=include_traces)

    setting.fake.cuda.memory.memory_snapshot = snapshot
    setting.run_out()
    assert [record.device for record in setting.records()] == ["cuda:0"]
    setting.fake.cuda.memory.memory_snapshot = taken
    setting.run_out(after_s=2)
    assert "At least 1 errors" in setting.records()[1].message


def test_the_source_listens_from_install_to_uninstall() -> None:
    """Through the source: an error on a used device is published to the bus, and after uninstall none is."""
    fake, events, bus = FakeTorch(), list[model.Event](), Bus(8)
    source = TorchSource(bus, fake)
    source.install(events.append)
    fake.run_out()
    assert [type(event) for event in events] == [model.FlightRecord]
    bus.active = False
    fake.run_out(device=1)
    bus.active = True
    source.uninstall()
    fake.run_out()
    assert len(events) == 1
