"""The source cpu_alloc: when the probe is made, what is said meanwhile, and that it goes as it came."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType

import pytest

from kvobs import sources
from kvobs.allocator._build import BuildError
from kvobs.bus import Bus
from kvobs.catalog import LATENCY_BOUNDS_NS as BOUNDS_NS
from kvobs.config import Config
from kvobs.model import AllocationLatencies, Availability, Event, LatencyCounts, Poll
from kvobs.sources import _cpu_alloc
from kvobs.sources._cpu_alloc import CpuAllocSource
from tests.support import run_python, wait_until

TORCH = ModuleType("torch")


class FakeProbe:
    """Counts what the test says."""

    def __init__(self) -> None:
        self.allocations, self.frees, self.where, self.known_sizes = 10, 4, "away", True
        self.calls: list[str] = []
        self.answer = "on top"

    def install(self, sampled_every: int) -> str:
        self.calls.append(f"install {sampled_every}")
        self.where = self.answer
        return self.answer

    def remove(self) -> str:
        self.calls.append("remove")
        self.where = "away" if self.where != "beneath" else "beneath"
        return self.where

    def place(self) -> str:
        return self.where

    def pause(self, paused: bool) -> None:
        self.calls.append(f"pause {paused}")

    def sized(self) -> bool:
        return self.known_sizes

    def read(self) -> LatencyCounts:
        buckets = (self.allocations, *(0,) * len(BOUNDS_NS))
        return LatencyCounts(self.allocations, self.frees, 64 * self.allocations, 64 * self.frees, buckets,
                             self.allocations * 100, 8)


@pytest.fixture
def bus() -> Bus:
    return Bus(64)


@pytest.fixture
def fake() -> FakeProbe:
    return FakeProbe()


@pytest.fixture
def source(bus: Bus, fake: FakeProbe) -> Iterator[CpuAllocSource]:
    """Installed, with a torch that is imported and the fake probe."""
    made = CpuAllocSource(bus, torch=lambda: TORCH, load=lambda _: fake, sampled_every=8)  # type: ignore[arg-type,return-value]
    made.install(bus.publish)
    yield made
    made.uninstall()


def settled(source: CpuAllocSource) -> list[Event]:
    """The first sample after the probe was made, or failed to be."""
    assert list(source.sample(0)) == []
    assert source._builder is not None
    source._builder.join()
    return list(source.sample(1))


def facts(source: CpuAllocSource) -> dict[str, tuple[bool, str]]:
    return {fact.subject: (fact.available, fact.reason) for fact in source.availability()}


def test_nothing_is_made_before_torch_is_imported(bus: Bus) -> None:
    """Without torch no thread is started and nothing is compiled; that is the reason told."""

    def load(_: ModuleType) -> FakeProbe:
        raise AssertionError("Nothing was to be made.")

    source = CpuAllocSource(bus, torch=lambda: None, load=load)  # type: ignore[arg-type]
    source.install(bus.publish)
    assert list(source.sample(0)) == []
    assert source._builder is None
    assert list(source.availability()) == [Availability("cpu_alloc", False, "torch is not imported in this process.")]
    source.uninstall()


def test_a_torch_that_is_being_imported_is_left_alone() -> None:
    """In the middle of its import torch counts as not imported; afterwards as imported."""
    code = """
import sys, types
from kvobs.sources._cpu_alloc import imported_torch
torch = types.ModuleType("torch")
torch.__spec__ = types.SimpleNamespace(_initializing=True)
print(imported_torch())
sys.modules["torch"] = torch
print(imported_torch())
torch.__spec__._initializing = False
print(imported_torch() is torch)
"""
    done = run_python(code)
    assert done.stdout.split() == ["None", "None", "True"], done.stderr


def test_counts_are_told_once_a_poll(source: CpuAllocSource, fake: FakeProbe) -> None:
    """What was alive before counts as allocated; then each poll has the counters, and the latencies since the last."""
    (first,) = settled(source)
    assert isinstance(first, Poll)
    assert ("kvobs.alloc.operations", ("cpu", "allocate"), 6) in first.readings
    fake.allocations += 5
    latencies, poll = source.sample(2)
    assert latencies == AllocationLatencies(2, "cpu", (5, *(0,) * len(BOUNDS_NS)), 500)
    assert isinstance(poll, Poll)
    assert ("kvobs.alloc.operations", ("cpu", "allocate"), 11) in poll.readings
    assert ("kvobs.alloc.io", ("cpu", "allocate"), 704) in poll.readings
    assert ("kvobs.alloc.interval", ("cpu",), 8) in poll.readings
    assert facts(source) == {"cpu_alloc": (True, ""), "cpu_alloc: bytes": (True, "")}


def test_without_sizes_there_are_no_bytes(source: CpuAllocSource, fake: FakeProbe) -> None:
    """Where blocks are not glibc's their bytes have no points, and the reason is told."""
    fake.known_sizes = False
    (poll,) = settled(source)
    assert isinstance(poll, Poll)
    assert not [name for name, _, _ in poll.readings if name == "kvobs.alloc.io"]
    assert facts(source)["cpu_alloc: bytes"] == (False, _cpu_alloc.UNSIZED)


def test_nothing_is_counted_while_everything_passes_through(source: CpuAllocSource, fake: FakeProbe, bus: Bus) -> None:
    """When the overhead guard pauses the bus the probe is told so once, and once more when it resumes."""
    settled(source)
    bus.pause()
    list(source.sample(2))
    list(source.sample(3))
    bus.resume()
    list(source.sample(4))
    assert [call for call in fake.calls if call.startswith("pause")] == ["pause True", "pause False"]


@pytest.mark.parametrize(("error", "reason"), [
    (BuildError("There is no C++ compiler (c++) on the PATH."), "There is no C++ compiler (c++) on the PATH."),
    (AttributeError("no such symbol"), "no such symbol"),
], ids=["no compiler", "anything else"])
def test_what_cannot_be_made_is_said_once_and_not_tried_again(bus: Bus, error: Exception, reason: str) -> None:
    """A failure is one sentence of availability which says that the heap is read instead; there is no second try."""
    tries: list[ModuleType] = []

    def load(torch: ModuleType) -> FakeProbe:
        tries.append(torch)
        raise error

    source = CpuAllocSource(bus, torch=lambda: TORCH, load=load)  # type: ignore[arg-type]
    source.install(bus.publish)
    assert settled(source) == []
    list(source.sample(2))
    assert facts(source) == {
        "cpu_alloc": (False, f"Single CPU allocations are not counted, only the heap is read: {reason}")}
    assert tries == [TORCH]
    source.uninstall()


def test_a_probe_that_is_turned_down_is_said(source: CpuAllocSource, fake: FakeProbe) -> None:
    """An allocator of higher priority keeps its place, and that is the reason why nothing is counted."""
    fake.answer = "refused"
    assert settled(source) == []
    assert facts(source) == {"cpu_alloc": (False, _cpu_alloc.REFUSED)}


def test_stopping_while_it_is_compiled_installs_nothing(bus: Bus, fake: FakeProbe,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation that ends after the stop leaves torch's allocator alone, and the stop waits for a bounded time."""
    monkeypatch.setattr(_cpu_alloc, "JOIN_S", 0.01)
    compiled = threading.Event()

    def load(_: ModuleType) -> FakeProbe:
        compiled.wait(30)
        return fake

    source = CpuAllocSource(bus, torch=lambda: TORCH, load=load)  # type: ignore[arg-type]
    source.install(bus.publish)
    list(source.sample(0))
    thread = source._builder
    assert thread is not None
    assert facts(source) == {"cpu_alloc": (False, _cpu_alloc.BUILDING)}
    source.uninstall()
    compiled.set()
    wait_until(lambda: not thread.is_alive(), what="the end of the building thread")
    assert fake.calls == []


def test_one_that_is_over_it_is_said(source: CpuAllocSource, fake: FakeProbe, caplog: pytest.LogCaptureFixture) -> None:
    """While another allocator is over the probe its counts say so, and a stop that has to leave it there is logged."""
    settled(source)
    fake.where = "beneath"
    assert facts(source)["cpu_alloc"] == (True, _cpu_alloc.OVER)
    source.uninstall()
    assert _cpu_alloc.LEFT in caplog.text
    source.uninstall()
    assert fake.calls.count("remove") == 1


def test_a_forked_child_begins_with_what_is_alive(source: CpuAllocSource, fake: FakeProbe) -> None:
    """What the parent counted is not told again by the child, except that what is alive is alive."""
    settled(source)
    fake.allocations, fake.frees = 100, 70
    source.after_fork_in_child()
    (poll,) = source.sample(2)
    assert isinstance(poll, Poll)
    assert ("kvobs.alloc.operations", ("cpu", "allocate"), 30) in poll.readings
    assert ("kvobs.alloc.operations", ("cpu", "free"), 0) in poll.readings


@pytest.mark.parametrize("setting", ["native", "cpu_allocations"])
def test_it_can_be_switched_off(setting: str, bus: Bus) -> None:
    """Either setting keeps the probe from being made, and is named as the reason."""
    wiring = sources.Wiring(Config(**{setting: "off"}), bus, lambda: None)  # type: ignore[arg-type,return-value]
    (made,) = [source for source in (factory(wiring) for factory in sources.factories())
               if isinstance(source, CpuAllocSource)]
    made.install(bus.publish)
    assert list(made.sample(0)) == []
    assert facts(made) == {"cpu_alloc": (False, f"The setting {setting} is off.")}
    made.uninstall()
