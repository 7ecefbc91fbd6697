"""Source torch against statistics written by hand after torch's documented schema (this machine has no device)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from kvobs import model
from kvobs.bus import Bus
from kvobs.catalog import BY_NAME
from kvobs.sources import _torch as source_module
from kvobs.sources import _torch_extras as extras
from kvobs.sources._torch import TorchSource
from kvobs.sources._torch_handle import Torch
from tests.fake_torch import FakeGraph, FakeTorch, GiB, MiB, stat, stats, unused

Installed = tuple[TorchSource, FakeTorch]


@pytest.fixture
def installed() -> Iterator[Any]:
    sources: list[TorchSource] = []

    def install(fake: FakeTorch) -> TorchSource:
        source = TorchSource(Bus(64), fake)
        source.install(lambda event: None)
        sources.append(source)
        return source

    yield install
    for source in sources:
        source.uninstall()


def states(source: TorchSource, now_ns: int = 1) -> list[model.AllocatorState]:
    return [event for event in source.sample(now_ns) if isinstance(event, model.AllocatorState)]


def readings(source: TorchSource, now_ns: int = 1) -> dict[tuple[str, tuple[str, ...]], float]:
    polls = [event for event in source.sample(now_ns) if isinstance(event, model.Poll)]
    assert len(polls) <= 1
    return {(name, attributes): value for poll in polls for name, attributes, value in poll.readings}


def facts(source: TorchSource) -> dict[str, tuple[bool, str]]:
    list(source.sample(1))
    return {fact.subject: (fact.available, fact.reason) for fact in source.availability()}


def test_every_documented_figure_is_told(installed: Any) -> None:
    """State and readings equal the figures of the structure, each under its row and attributes of the catalog."""
    source = installed(FakeTorch())
    assert states(source, 9) == [model.AllocatorState(9, "cuda:0", 3 * GiB, 2 * GiB, None)]
    told = readings(source)
    assert told == {
        ("kvobs.allocator.requested", ("cuda:0",)): 2 * GiB - MiB,
        ("kvobs.allocator.active", ("cuda:0",)): 2 * GiB + 64 * MiB,
        ("kvobs.allocator.inactive_split", ("cuda:0",)): 300 * MiB,
        ("kvobs.allocator.segments", ("cuda:0",)): 40,
        ("kvobs.allocator.retries", ("cuda:0",)): 2,
        ("kvobs.allocator.out_of_memory", ("cuda:0",)): 1,
        ("kvobs.allocator.device.operations", ("cuda:0", "allocate")): 7,
        ("kvobs.allocator.device.operations", ("cuda:0", "free")): 3,
    }
    assert all(len(BY_NAME[name].attributes) == len(attributes) for name, attributes in told)


@pytest.mark.parametrize(("family", "row"), [
    ("requested_bytes", "requested"), ("active_bytes", "active"), ("inactive_split_bytes", "inactive_split"),
    ("segment", "segments"), ("num_alloc_retries", "retries"), ("num_ooms", "out_of_memory"),
])
def test_a_missing_key_is_absent_and_not_zero(installed: Any, family: str, row: str) -> None:
    """A back end that lacks one key loses exactly the points of that key."""
    whole = readings(installed(FakeTorch()))
    kept = stats()
    del kept[family]
    fewer = readings(installed(FakeTorch([kept])))
    assert {name for name, _ in whole} - {name for name, _ in fewer} == {f"kvobs.allocator.{row}"}
    assert fewer == {key: value for key, value in whole.items() if key in fewer}


def test_without_bytes_there_is_no_state(installed: Any) -> None:
    """Where the reserved bytes are not told there is no allocator state, rather than one of 0 bytes."""
    kept = stats()
    del kept["reserved_bytes"]
    assert states(installed(FakeTorch([kept]))) == []


def test_families_that_stayed_zero_are_taken_for_not_kept(installed: Any) -> None:
    """Zeros with which a back end fills what it does not count are not shown while memory is in use; true zeros are."""
    idle = stat(0)
    told = readings(installed(FakeTorch([stats(
        requested_bytes=idle, active=idle, active_bytes=idle, segment=idle, inactive_split_bytes=idle,
        num_device_alloc=0, num_device_free=0, num_ooms=0, num_alloc_retries=0)])))
    assert told == {}
    told = readings(installed(FakeTorch([stats(inactive_split_bytes=idle, num_ooms=0)])))
    assert told["kvobs.allocator.inactive_split", ("cuda:0",)] == 0
    assert told["kvobs.allocator.out_of_memory", ("cuda:0",)] == 0


def test_counters_that_the_host_began_anew_are_told_as_zeros(installed: Any) -> None:
    """After the host reset what is summed zeros are told, so that the errors after it are counted from there."""
    told = readings(installed(FakeTorch([stats(reserved_bytes=stat(3 * GiB, allocated=0), num_device_alloc=0,
                                               num_device_free=0, num_ooms=0, num_alloc_retries=0)])))
    assert told["kvobs.allocator.out_of_memory", ("cuda:0",)] == 0
    assert told["kvobs.allocator.retries", ("cuda:0",)] == 0


def test_only_devices_that_this_process_used_are_told(installed: Any) -> None:
    """Of three devices the one that was never used has no points, and one that was emptied again has its zeros."""
    emptied = stats(reserved_bytes=stat(0, 3 * GiB), allocated_bytes=stat(0, 2 * GiB))
    source = installed(FakeTorch([unused(), stats(), emptied]))
    assert [(state.device, state.reserved_bytes) for state in states(source)] == [("cuda:1", 3 * GiB), ("cuda:2", 0)]
    assert {attributes[0] for _, attributes in readings(source)} == {"cuda:1", "cuda:2"}


def test_other_accelerators_go_by_their_own_name(installed: Any) -> None:
    """The device of a back end is its type and index; what its module of torch lacks is absent with the reason."""
    source = installed(FakeTorch(kind="xpu"))
    assert [state.device for state in states(source)] == ["xpu:0"]
    told = facts(source)
    assert told["torch: out-of-memory records"] == (False, "torch.xpu takes no out-of-memory observer.")
    assert told["torch: verdicts"] == (False, "No verdict: torch.xpu does not list its segments and free bytes "
                                       "(memory_snapshot, mem_get_info).")
    assert told["torch: allocation latency"] == (False, "torch.xpu does not tell how long its allocations took.")
    assert told["torch: device copies"] == (False, "torch.xpu does not count its copies between devices.")
    assert told["torch: largest free block"][0] is False


def test_inactive_split_is_absent_with_expandable_segments(installed: Any) -> None:
    """The figure goes with the setting, and stays away when the setting is taken back: those segments remain."""
    fake = FakeTorch(settings="expandable_segments:True,max_split_size_mb:64")
    source = installed(fake)
    row = ("kvobs.allocator.inactive_split", ("cuda:0",))
    assert row not in readings(source)
    assert facts(source)["torch: inactive split blocks"] == (False, source_module.EXPANDABLE)
    fake.conf = "max_split_size_mb:64"
    assert row not in readings(source)
    plain = installed(FakeTorch(settings="expandable_segments:False"))
    assert row in readings(plain)
    assert facts(plain)["torch: inactive split blocks"] == (True, "")


def test_effective_settings_are_one_point_each(installed: Any) -> None:
    """What the allocator says is in effect is told as pairs, and follows a change at run time."""
    fake = FakeTorch(settings="expandable_segments:False, roundup_power2_divisions:[256:1,512:2,>:4]")
    source = installed(fake)

    def told() -> set[tuple[str, ...]]:
        return {attributes for name, attributes in readings(source) if name == "kvobs.allocator.setting"}

    assert told() == {("expandable_segments", "False"), ("roundup_power2_divisions", "[256:1,512:2,>:4]")}
    fake.conf = "garbage_collection_threshold:0.8"
    assert told() == {("garbage_collection_threshold", "0.8")}
    fake.conf = ""
    assert told() == set()


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_an_older_torch_are_the_environments(variable: str, installed: Any,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that does not tell its settings has those of the environment, with a reason that says so."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(variable, "max_split_size_mb:32")
    fake = FakeTorch()
    del fake._C._accelerator_getAllocatorSettings
    source = installed(fake)
    assert readings(source)["kvobs.allocator.setting", ("max_split_size_mb", "32")] == 1
    assert facts(source)["torch: allocator settings"] == (True, source_module.FROM_ENVIRONMENT)


def test_an_older_torch_is_read_through_its_cuda_functions(installed: Any) -> None:
    """Without the functions for any accelerator, the same figures come from those for CUDA."""
    fake = FakeTorch()
    expected = readings(installed(fake))
    fake._C._cuda_memoryStats = fake._C._accelerator_getDeviceStats
    del fake._C._accelerator_getDeviceStats, fake._C._accelerator_isAllocatorInitialized
    assert readings(installed(fake)) == expected


def test_nothing_is_asked_before_the_host_initialised(installed: Any) -> None:
    """Until the host uses the accelerator its allocator is not asked and the reason says so; then it is told."""
    fake = FakeTorch(initialised=False)
    source = installed(fake)
    assert list(source.sample(1)) == []
    assert facts(source) == {"torch": (False, source_module.NOT_YET)}
    assert fake.reads == []
    fake.initialise()
    assert len(states(source)) == 1
    assert facts(source)["torch"] == (True, "")


def test_without_an_accelerator_the_reason_says_so(installed: Any) -> None:
    """A torch that was built for no accelerator has no events and one sentence."""
    source = installed(FakeTorch(kind=None))
    assert list(source.sample(1)) == []
    assert facts(source) == {"torch": (False, source_module.NO_ACCELERATOR)}


def test_a_back_end_without_a_caching_allocator_is_absent(installed: Any) -> None:
    """What torch raises for such a back end becomes a reason that names it, not an error every second."""
    fake = FakeTorch(kind="mps")

    def refuse() -> bool:
        raise RuntimeError("Allocator for mps is not a DeviceAllocator.")

    fake._C._accelerator_isAllocatorInitialized = refuse
    source = installed(fake)
    assert list(source.sample(1)) == []
    available, reason = facts(source)["torch"]
    assert not available
    assert "mps" in reason


def test_the_async_back_end_tells_bytes_only(installed: Any) -> None:
    """With cudaMallocAsync the two sizes are told, its always-zero figures are not, and the reasons say why."""
    zeros = {name: value for name, value in unused().items() if name not in ("reserved_bytes", "allocated_bytes")}
    source = installed(FakeTorch([stats() | zeros], backend="cudaMallocAsync"))
    assert states(source) == [model.AllocatorState(1, "cuda:0", 3 * GiB, 2 * GiB, None)]
    assert readings(source) == {}
    told = facts(source)
    assert told["torch: blocks and counters"] == (False, source_module.ASYNC_ONLY)
    assert told["torch: inactive split blocks"] == (False, source_module.ASYNC_ONLY)
    assert not told["torch: out-of-memory records"][0]


def test_a_pluggable_allocator_is_absent_with_its_name(installed: Any) -> None:
    """An allocator of the host's own is not asked, and the reason names it."""
    fake = FakeTorch(backend="pluggable")
    source = installed(fake)
    assert list(source.sample(1)) == []
    assert facts(source) == {"torch": (False, "The allocator back end pluggable tells no statistics.")}
    assert fake.reads == []


def test_the_largest_free_block_is_absent_with_a_reason(installed: Any) -> None:
    """Statistics do not know it, so no state has one, and the reason is told."""
    source = installed(FakeTorch())
    assert [state.largest_free_bytes for state in states(source)] == [None]
    assert facts(source)["torch: largest free block"] == (False, extras.ONLY_SNAPSHOT)


def test_nothing_is_read_while_a_graph_is_captured(installed: Any) -> None:
    """Between a graph's begin and end the allocator is not asked; a begin that fails, or a lost graph, ends it too."""
    fake = FakeTorch()
    source = installed(fake)
    graph, other = fake.cuda.graphs.CUDAGraph(), fake.cuda.graphs.CUDAGraph()
    assert graph.capture_begin(capture_error_mode="relaxed") == "relaxed"
    other.capture_begin()
    graph.capture_end()
    assert list(source.sample(1)) == []
    assert facts(source) == {"torch": (False, source_module.CAPTURING)}
    assert fake.reads == []
    other.capture_end()
    assert len(states(source)) == 1
    broken = fake.cuda.graphs.CUDAGraph(RuntimeError("no memory for the graph"))
    with pytest.raises(RuntimeError, match="no memory for the graph"):
        broken.capture_begin()
    assert len(states(source)) == 1
    lost = fake.cuda.graphs.CUDAGraph()
    lost.capture_begin()
    del lost
    gc.collect()
    assert len(states(source)) == 1


def test_a_child_of_an_initialised_parent_reads_nothing(installed: Any) -> None:
    """After a fork the accelerator of the parent is never asked; a child whose parent had none may use its own."""
    fake = FakeTorch()
    source = installed(fake)
    fake.forked = True
    source.after_fork_in_child()
    assert list(source.sample(1)) == []
    assert facts(source) == {"torch": (False, source_module.FORKED)}
    assert fake.reads == []
    fresh = FakeTorch(initialised=False)
    source = installed(fresh)
    source.after_fork_in_child()
    fresh.initialise()
    assert len(states(source)) == 1


def test_uninstalling_restores_the_graph_class(installed: Any) -> None:
    """The two methods of the graph class are the very same objects again, and a second uninstall does nothing."""
    fake = FakeTorch()
    before = dict(vars(fake.cuda.graphs.CUDAGraph))
    source = installed(fake)
    assert vars(fake.cuda.graphs.CUDAGraph)["capture_begin"] is not before["capture_begin"]
    source.install(lambda event: None)
    source.uninstall()
    source.uninstall()
    assert all(vars(fake.cuda.graphs.CUDAGraph)[name] is before[name] for name in ("capture_begin", "capture_end"))
    assert before["capture_begin"] is FakeGraph.capture_begin
    assert list(source.sample(1)) == []


def test_a_torch_of_another_shape_does_not_stop_its_import(installed: Any) -> None:
    """A torch that lacks what is hooked is imported as ever; there are no events and a reason."""
    fake = FakeTorch()
    del fake.cuda.graphs
    source = installed(fake)
    assert list(source.sample(1)) == []
    assert facts(source)["torch"][0] is False


def test_the_environment_is_read_only_by_an_older_torch() -> None:
    """What the allocator says wins over the environment, which it may have been changed from."""
    fake = FakeTorch(settings="max_split_size_mb:64")
    assert Torch(fake, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:8"}).settings() == ("max_split_size_mb:64", True)
