"""Source torch on a registered accelerator (``vgpu``): as fully as on CUDA, and what only a virtual GPU tells."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs import model
from kvobs.allocator.settings import MIB
from kvobs.allocator.verdict import Verdict
from kvobs.bus import Bus
from kvobs.catalog import LATENCY_BUCKETS
from kvobs.metrics import Metrics
from kvobs.sources import _torch_extras as extras
from kvobs.sources import _torch_listen as listen
from kvobs.sources._torch import TorchSource
from kvobs.sources.transformers._demand import forecast
from tests.accelerator import Accelerator
from tests.fake_torch import FakeTorch, GiB, MiB, segment, stats, timed

ROW = 64 * 1024
BUCKETS = len(LATENCY_BUCKETS) + 1


@pytest.fixture(autouse=True)
def _no_trampolines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_attached", [])
    monkeypatch.setattr(listen, "_listening", {})


class Setting:
    """Sources on fake torches and what they emitted."""

    def __init__(self) -> None:
        self.events: list[model.Event] = []
        self.sources: list[TorchSource] = []
        self.caches: list[Any] = []

    def on(self, fake: FakeTorch) -> TorchSource:
        source = TorchSource(Bus(8), fake)
        source.foresee(lambda: forecast(self.caches))
        source.install(self.events.append)
        self.sources.append(source)
        return source

    def records(self) -> list[model.FlightRecord]:
        return [event for event in self.events if isinstance(event, model.FlightRecord)]


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting()
    yield made
    for source in made.sources:
        source.uninstall()


def virtual(devices: list[dict[str, Any]] | None = None) -> FakeTorch:
    """A build for the CPU on which a virtual GPU is registered already."""
    return FakeTorch(devices, kind="vgpu").without_cuda()


def facts(source: TorchSource) -> dict[str, tuple[bool, str]]:
    return {fact.subject: (fact.available, fact.reason) for fact in source.availability()}


def readings(source: TorchSource, name: str) -> dict[tuple[str, ...], float]:
    return {attributes: value for event in source.sample(1) if isinstance(event, model.Poll)
            for found, attributes, value in event.readings if found == name}


def test_everything_of_a_virtual_gpu_is_available(setting: Setting) -> None:
    """With all functions there no fact of the source has a reason, and the state has its largest free block."""
    fake = virtual([stats(), stats()])
    fake.largest = {0: 300 * MiB, 1: 7 * MiB}
    source = setting.on(fake)
    assert [event for event in source.sample(9) if isinstance(event, model.AllocatorState)] == [
        model.AllocatorState(9, "vgpu:0", 3 * GiB, 2 * GiB, 300 * MiB),
        model.AllocatorState(9, "vgpu:1", 3 * GiB, 2 * GiB, 7 * MiB)]
    told = facts(source)
    assert set(told.values()) == {(True, "")}
    assert {"torch: out-of-memory records", "torch: verdicts", "torch: largest free block",
            "torch: allocation latency", "torch: device copies"} <= told.keys()


def test_the_largest_free_block_reaches_its_window(setting: Setting) -> None:
    """The window's point is the smallest of what was polled in it, per device."""
    fake, metrics = virtual(), Metrics()
    source = setting.on(fake)
    for now_ns, size in ((1, 5 * MiB), (2, 3 * MiB), (3, 9 * MiB)):
        fake.largest[0] = size
        metrics.fold(source.sample(now_ns))
    metrics.refresh(3)
    assert {row.name: found for row, found in metrics.collect()}["kvobs.window.largest_free"] == {
        ("vgpu:0",): 3 * MiB}


@pytest.mark.parametrize("first", ["the accelerator", "kvobs"])
def test_errors_are_recorded_whoever_came_first(setting: Setting, first: str) -> None:
    """Registered before kvobs looks, or later and seen at its next sample: the error's record names the device."""
    fake = FakeTorch(kind=None).without_cuda()
    if first == "the accelerator":
        fake.register()
    source = setting.on(fake)
    if first == "kvobs":
        list(source.sample(1))
        fake.register()
        list(source.sample(2))
    fake.snapshot = [segment((MiB, "active_allocated"), device=1)]
    fake.run_out(device=1)
    record, = setting.records()
    assert record.device == "vgpu:1"
    assert record.message.startswith("The allocator of vgpu:1 could not get ")
    list(source.sample(3))
    assert len(fake.virtual_observers) == 1


def test_the_observer_is_detached_exactly(setting: Setting) -> None:
    """After uninstall the accelerator has the host's observer and no other; what comes again is attached again."""
    fake, called = virtual(), list[int]()
    host: Callable[..., None] = lambda *told: called.append(told[0])  # noqa: E731
    fake.vgpu.attach_out_of_memory_observer(host)
    source = setting.on(fake)
    assert len(fake.virtual_observers) == 2
    source.uninstall()
    source.uninstall()
    assert fake.virtual_observers == [host]
    assert (listen._attached, listen._listening) == ([], {})
    setting.on(fake)
    fake.run_out()
    assert (len(setting.records()), called) == (1, [0])


def test_who_stops_does_not_detach_who_listens_now(setting: Setting) -> None:
    """Of two sources the later one listens; the earlier one's end changes nothing, the later one's detaches."""
    fake = virtual()
    earlier, later = setting.on(fake), setting.on(fake)
    earlier.uninstall()
    fake.run_out()
    assert (len(setting.records()), len(fake.virtual_observers)) == (1, 1)
    later.uninstall()
    assert fake.virtual_observers == []


def test_a_sample_after_the_end_attaches_nothing(setting: Setting) -> None:
    """A drain thread that samples once more after uninstall leaves no observer behind."""
    fake = FakeTorch(kind=None).without_cuda()
    source = setting.on(fake)
    source.uninstall()
    fake.register()
    assert list(source.sample(1)) == []
    assert fake.virtual_observers == []


def test_an_accelerator_that_cannot_detach_is_attached_once(setting: Setting) -> None:
    """Without a function to detach, as with CUDA, one trampoline per process serves whoever listens."""
    fake = virtual()
    del fake.vgpu.detach_out_of_memory_observer
    for _ in range(3):
        setting.on(fake).uninstall()
    fake.run_out()
    assert (len(fake.virtual_observers), setting.records()) == (1, [])
    setting.on(fake)
    fake.run_out()
    assert (len(fake.virtual_observers), len(setting.records())) == (1, 1)


def test_cuda_beside_a_virtual_gpu_has_its_own_observer(setting: Setting) -> None:
    """On a build for CUDA both kinds are listened to, and each record names the kind that ran out."""
    fake = FakeTorch()
    setting.on(fake)
    fake.register()
    list(setting.sources[0].sample(1))
    fake.run_out()
    fake.kind = "cuda"
    fake.run_out(device=3)
    assert [record.device for record in setting.records()] == ["vgpu:0", "cuda:3"]


def test_a_verdict_of_a_virtual_gpu_is_that_of_cuda(setting: Setting) -> None:
    """The same cache in the same allocator is judged the same by both names, as the allocator then does."""
    told = {}
    for kind in ("cuda", "vgpu"):
        fake = Accelerator(256 * MIB, kind=kind)
        setting.caches = [fake.cache(5, 320, ROW)]
        found, = setting.on(fake).verdict()
        done, _ = fake.step(setting.caches)
        assert done[found.index or 0] is found.verdict is Verdict.RECLAIM
        told[found.device] = (found.verdict, found.index, found.requests, found.requested_bytes, found.evidence)
    assert told.keys() == {"cuda:0", "vgpu:0"}
    assert told["cuda:0"] == told["vgpu:0"]


def test_a_memory_fraction_of_a_virtual_gpu_is_respected(setting: Setting) -> None:
    """With half of 160 MiB allowed and 40 in use, a request of more than the 40 that are left has no room."""
    fake = Accelerator(160 * MIB, kind="vgpu")
    fake.share = 0.5
    setting.caches = [fake.cache(1, 640, ROW)]  # two of 40 MiB: nothing is left of 80
    told, = setting.on(fake).verdict("vgpu:0")
    assert told.evidence is not None
    assert (told.verdict, told.evidence.allowed_left_bytes) == (Verdict.CAPACITY, 0)


def test_a_history_of_a_virtual_gpu_costs_no_verdict(setting: Setting) -> None:
    """Its snapshot leaves the traces out and has stacks of Python only, so that it is taken all the same."""
    fake = Accelerator(256 * MIB, kind="vgpu")
    setting.caches = [fake.cache(1, 320, ROW)]
    fake.history = True
    told, = setting.on(fake).verdict()
    assert told.verdict is Verdict.GROW


def test_an_accelerator_that_hides_its_history_is_not_asked_for_a_snapshot(setting: Setting) -> None:
    """Where neither a history is told nor traces can be left out, there is no verdict, and the reason says so."""
    fake = Accelerator(256 * MIB, kind="vgpu")
    setting.caches = [fake.cache(1, 320, ROW)]
    del fake.vgpu.is_history_enabled
    fake.vgpu.memory_snapshot = lambda mempool_id=None: pytest.fail("A snapshot was taken.")
    source = setting.on(fake)
    told, = source.verdict()
    assert told.verdict is None
    assert "does not tell whether a memory history is recorded" in told.sentence
    assert facts(source)["torch: verdicts"] == (False, told.sentence)


def failed(setting: Setting, fake: FakeTorch, requested: int) -> dict[str, Any]:
    """The verdict of the record of a failure beside a free block of 127 MiB on another stream, with 100 MiB free."""
    fake.snapshot = [segment((127 * MiB, "inactive"), (MiB, "active_allocated"), stream=7)]
    setting.on(fake)
    fake.run_out(requested=requested)
    found: dict[str, Any] = json.loads(setting.records()[-1].snapshot)["verdict"]
    return found


def test_a_virtual_gpu_s_record_judges_the_request_itself(setting: Setting) -> None:
    """126.5 MiB would fit on the other stream; CUDA tells only of 128, for which 127 and 100 elsewhere are pieces."""
    exact = failed(setting, virtual(), 126 * MiB + MiB // 2)
    assert (exact["verdict"], exact["request"]["least_bytes"], exact["request"]["most_bytes"]) == (
        "WRONG_POOL", 126 * MiB + MiB // 2, 126 * MiB + MiB // 2)
    ranged = failed(setting, FakeTorch(), 128 * MiB)
    assert ranged["verdict"] is None
    assert set(ranged["between"]) == {"WRONG_POOL", "FRAGMENTED"}


def test_the_stream_of_the_failing_thread_is_judged(setting: Setting) -> None:
    """The current stream's number, as torch.Stream has it, is that of the request."""
    fake = virtual()
    fake.snapshot, fake.stream = [segment((MiB, "active_allocated"))], 7
    setting.on(fake)
    fake.run_out()
    assert json.loads(setting.records()[0].snapshot)["verdict"]["request"]["stream"] == 7


def test_latencies_are_told_as_they_grow(setting: Setting) -> None:
    """The events of all polls add up to what the accelerator counted; one without growth is not told."""
    fake = virtual()
    source, total, told = setting.on(fake), [0] * BUCKETS, list[model.AllocationLatencies]()
    for bucket, number in ((0, 5), (3, 2), (BUCKETS - 1, 1), (3, 0), (0, 4)):
        total[bucket] += number
        fake.timed[0] = timed(total, sum_ns=1000 * sum(total), frees=3)
        told += [event for event in source.sample(1) if isinstance(event, model.AllocationLatencies)]
    assert [sum(event.counts) for event in told] == [5, 2, 1, 4]
    assert [sum(column) for column in zip(*(event.counts for event in told), strict=True)] == total
    assert (sum(event.sum_ns for event in told), {event.device for event in told}) == (12_000, {"vgpu:0"})
    assert readings(source, "kvobs.alloc.operations")["vgpu:0", "allocate"] == 12
    assert readings(source, "kvobs.alloc.operations")["vgpu:0", "free"] == 3
    assert readings(source, "kvobs.alloc.interval") == {("vgpu:0",): 1}


def test_the_histogram_has_the_accelerator_s_buckets(setting: Setting) -> None:
    """Folded, kvobs.alloc.latency of the device holds bucket by bucket what was counted, and its sum."""
    fake, metrics = virtual(), Metrics()
    counts = list(range(BUCKETS))
    fake.timed[0] = timed(counts, sum_ns=2_000_000_000)
    metrics.fold(setting.on(fake).sample(1))
    histogram: Any = {row.name: found for row, found in metrics.collect()}["kvobs.alloc.latency"]["vgpu:0",]
    assert list(histogram.counts) == counts
    assert histogram.total == 2.0


def test_modelled_latencies_are_said_to_be(setting: Setting) -> None:
    """A profile is told as a setting and beside the latencies' fact; without one neither says so."""
    fake = virtual()
    source = setting.on(fake)
    assert readings(source, "kvobs.allocator.setting") == {}
    assert facts(source)["torch: allocation latency"] == (True, "")
    fake.profile = "A100"
    assert readings(source, "kvobs.allocator.setting") == {("device_latency", "modelled: A100 profile"): 1}
    assert facts(source)["torch: allocation latency"] == (
        True, "The time that calls for device memory take is modelled (A100 profile).")


def test_copies_are_counted_per_pair(setting: Setting) -> None:
    """Number and bytes of the copies of each pair of devices are counters, which add what came since."""
    fake, metrics = virtual(), Metrics()
    source = setting.on(fake)
    fake.copied = {("cpu", "vgpu:0"): (3, 3 * MiB)}
    metrics.fold(source.sample(1))
    fake.copied = {("cpu", "vgpu:0"): (5, 4 * MiB), ("vgpu:0", "vgpu:1"): (1, 7)}
    metrics.fold(source.sample(2))
    points = {row.name: found for row, found in metrics.collect()}
    assert points["kvobs.device.copy.operations"] == {("cpu", "vgpu:0"): 5, ("vgpu:0", "vgpu:1"): 1}
    assert points["kvobs.device.copy.io"] == {("cpu", "vgpu:0"): 4 * MiB, ("vgpu:0", "vgpu:1"): 7}


@pytest.mark.parametrize(("function", "subject"), [
    ("largest_free", extras.LARGEST), ("allocation_latencies", extras.LATENCY), ("copies", extras.COPIES)])
def test_a_function_that_fails_costs_its_own_points(setting: Setting, function: str, subject: str) -> None:
    """It is absent with its name and error while it fails, everything else is told, and it comes back."""
    fake = virtual()
    answer = getattr(fake.vgpu, function)

    def broken(*_: object) -> None:
        raise OSError("?")

    setattr(fake.vgpu, function, broken)
    source = setting.on(fake)
    assert any(isinstance(event, model.AllocatorState) for event in source.sample(1))
    assert facts(source)[subject] == (False, f"torch.vgpu.{function} failed (OSError).")
    assert {found for name, (found, _) in facts(source).items() if name != subject} == {True}
    setattr(fake.vgpu, function, answer)
    list(source.sample(2))
    assert facts(source)[subject] == (True, "")


def test_latencies_of_another_shape_are_refused(setting: Setting) -> None:
    """What lacks a field, or has another number of buckets than before, is a reason and not a wrong histogram."""
    fake = virtual()
    source = setting.on(fake)
    fake.timed[0] = {"buckets": (1, 2)}
    assert not any(isinstance(event, model.AllocationLatencies) for event in source.sample(1))
    assert facts(source)[extras.LATENCY] == (False, "torch.vgpu.allocation_latencies failed (ValidationError).")
    fake.timed[0] = timed([1] * BUCKETS)
    assert any(isinstance(event, model.AllocationLatencies) for event in source.sample(2))
    fake.timed[0] = timed([2] * (BUCKETS - 1))
    assert not any(isinstance(event, model.AllocationLatencies) for event in source.sample(3))
    assert facts(source)[extras.LATENCY] == (False, "torch.vgpu.allocation_latencies failed (ValueError).")


def test_a_forked_child_neither_reads_nor_attaches(setting: Setting) -> None:
    """In a child of a process that had an accelerator nothing of it is asked, and the reason says why."""
    fake = virtual()
    source = setting.on(fake)
    source.after_fork_in_child()
    assert list(source.sample(1)) == []
    assert (fake.reads, fake.snapshots, len(fake.virtual_observers)) == ([], 0, 1)
    assert facts(source)["torch"][0] is False


@pytest.mark.parametrize("usable", [True, False])
def test_an_accelerator_may_say_that_its_children_can_use_it(setting: Setting, usable: bool) -> None:
    """A child reads one that is in no bad fork, without what its parent had counted, and nothing of one that is."""
    fake, way = virtual(), ("vgpu:0", "cpu")
    fake.vgpu._is_in_bad_fork = lambda: not usable
    fake.timed[0], fake.copied = timed([1] * BUCKETS, frees=BUCKETS - 2), {way: (4, 400)}
    source = setting.on(fake)
    list(source.sample(1))
    source.after_fork_in_child()
    assert not any(isinstance(event, model.AllocationLatencies) for event in source.sample(2))
    fake.timed[0], fake.copied = timed([3] * BUCKETS, frees=BUCKETS), {way: (5, 440)}
    seen = list(source.sample(3))
    assert [sum(event.counts) for event in seen if isinstance(event, model.AllocationLatencies)] == [
        2 * BUCKETS] * usable
    assert facts(source)["torch"][0] is usable
    if usable:
        calls = readings(source, "kvobs.alloc.operations")
        # Two were alive at the fork, and are so here; what was freed since was the child's.
        assert (calls["vgpu:0", "allocate"], calls["vgpu:0", "free"]) == (2 + 2 * BUCKETS, 2)
        assert readings(source, "kvobs.device.copy.operations") == {way: 1}
        assert readings(source, "kvobs.device.copy.io") == {way: 40}


def test_latencies_are_understood_in_any_form(setting: Setting) -> None:
    """A named tuple and an object with the fields are as good as a mapping."""
    fake = virtual()
    fields = timed([2] * BUCKETS)
    source = setting.on(fake)
    for now_ns, form in enumerate((namedtuple("Counts", fields)(**fields), SimpleNamespace(**fields))):
        fake.timed[0] = form  # type: ignore[assignment]
        list(source.sample(now_ns))
        assert readings(source, "kvobs.alloc.operations")["vgpu:0", "allocate"] == 2 * BUCKETS
        assert facts(source)[extras.LATENCY] == (True, "")
