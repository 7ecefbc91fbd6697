"""The CPU allocation probe in front of the real torch: counts, bytes and latencies against what is known beforehand."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvobs.allocator import _build
from kvobs.catalog import LATENCY_BOUNDS_NS as BOUNDS_NS
from kvobs.catalog import SLOW_BUCKET
from kvobs.model import LatencyCounts
from kvobs.sources import _cpu_alloc_native as native
from tests.support import ROOT

pytestmark = pytest.mark.torch
_usable_size = ctypes.CDLL(None).malloc_usable_size
_usable_size.restype, _usable_size.argtypes = ctypes.c_size_t, [ctypes.c_void_p]


@dataclasses.dataclass
class Bench:
    """A probe and the functions of the test's library."""

    probe: native.Probe
    library: Any


@pytest.fixture(scope="module")
def bench() -> Bench:
    """The probe's own source, compiled with a clock that only moves when told and with other allocators."""
    own = native.unit(torch)
    here = ROOT / "tests" / "native"
    unit = own._replace(name="the test's allocators", main="probe_on_a_clock.cpp", sources=(here, *own.sources),
                        flags=(*own.flags, "-I", str(native.SOURCES)))
    try:
        library = _build.library(unit=unit)
    except _build.BuildError as error:
        pytest.skip(str(error))
    library.test_allocator.restype = ctypes.c_uint64
    library.test_takes.argtypes = [ctypes.c_int64]
    return Bench(native.Probe(library), library)


@pytest.fixture
def clocked(bench: Bench) -> Iterator[Bench]:
    """It, with an allocator beneath that moves the clock; torch's own allocator is back afterwards."""
    before = bench.library.test_allocator()
    bench.library.test_put_other()
    assert bench.probe.install(1) == "on top"
    yield bench
    bench.library.test_takes(0)
    bench.library.test_own(0)
    assert bench.probe.remove() == "away"
    bench.library.test_take_other()
    assert bench.library.test_allocator() == before


@pytest.fixture
def probe(bench: Bench) -> Iterator[native.Probe]:
    """The probe as it is shipped, timing everything; torch's own allocator is back afterwards."""
    try:
        made = native.load(torch)
    except _build.BuildError as error:
        pytest.skip(str(error))
    before = bench.library.test_allocator()
    assert made.install(1) == "on top"
    yield made
    made.remove()
    assert bench.library.test_allocator() == before


def since(probe: native.Probe, before: LatencyCounts) -> LatencyCounts:
    """What was counted since."""
    now = probe.read()
    grown = {name: getattr(now, name) - getattr(before, name) for name in (
        "allocations", "frees", "allocated_bytes", "freed_bytes", "sum_ns", "untracked")}
    return LatencyCounts(buckets=tuple(a - b for a, b in zip(now.buckets, before.buckets, strict=True)),
                         sampled_every=now.sampled_every, **grown)


def size_of(tensor: torch.Tensor) -> int:
    """The size that malloc gave the tensor's block, by its own word."""
    return int(_usable_size(tensor.untyped_storage().data_ptr()))


def test_every_allocation_of_every_thread_is_counted(probe: native.Probe) -> None:
    """Four threads that make 300 tensors and drop 200 each are seen to the last one, and all of them are timed."""
    kept: list[torch.Tensor] = []
    lock = threading.Lock()

    def work(seed: int) -> None:
        made = [torch.empty(seed + 17 * number) for number in range(1, 301)]
        with lock:
            kept.extend(made[200:])
        del made

    before = probe.read()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = since(probe, before)
    assert (found.allocations, found.frees, found.untracked, found.timed) == (1200, 800, 0, 1200)
    assert found.allocated_bytes - found.freed_bytes == sum(map(size_of, kept))
    kept.clear()
    found = since(probe, before)
    assert (found.frees, found.freed_bytes) == (1200, found.allocated_bytes)


def test_an_empty_tensor_is_no_allocation(probe: native.Probe) -> None:
    """A tensor of 0 bytes has no memory: nothing is counted for it, neither at its beginning nor at its end."""
    before = probe.read()
    torch.empty(0)
    found = since(probe, before)
    assert (found.allocations, found.frees, found.untracked) == (0, 0, 0)


def programs(*deeds: str) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    return st.lists(st.tuples(st.sampled_from(deeds), st.integers(1, 70_000), st.integers(0, 99)), max_size=40)


# Apart, because torch itself loses an array's memory to the write of a lazy clone, and refuses to clone what grew.
OPERATIONS = st.one_of(programs("make", "drop", "view", "off", "on", "grow", "numpy"),
                       programs("make", "drop", "view", "off", "on", "lazy", "write"))


@given(OPERATIONS)
@settings(max_examples=60)
def test_what_is_alive_is_what_was_allocated_less_what_was_freed(operations: list[tuple[str, int, int]]) -> None:
    """After any program of tensors, views, resizes, lazy clones and arrays, the difference in number and in bytes is
    what malloc says of the blocks that were made while it counted and are still held.
    """
    probe = native.load(torch)
    probe.install(1)
    try:
        _run(probe, operations)
    finally:
        probe.remove()


def _run(probe: native.Probe, operations: list[tuple[str, int, int]]) -> None:
    held: list[Any] = []
    seen: set[int] = set()  # addresses of all blocks that are held
    blocks: set[int] = set()  # and of those that were made while it counted
    counting, before = True, probe.read()
    for what, number, place in operations:
        one = held[place % len(held)] if held else None
        tensor = one if isinstance(one, torch.Tensor) else None
        if what == "make":
            held.append(torch.empty(number, dtype=torch.uint8))
        elif what == "drop" and held:
            del held[place % len(held)]
        elif what == "grow" and tensor is not None:
            storage = tensor.untyped_storage()
            if storage.resizable() and storage.nbytes() < number:
                storage.resize_(number)
            del storage
        elif what == "view" and tensor is not None:
            held.append(tensor[:1])
        elif what == "lazy" and tensor is not None:
            held.append(torch._lazy_clone(tensor))
        elif what == "write" and tensor is not None:
            tensor.fill_(1)  # copies what a lazy clone shares
        elif what == "numpy" and tensor is not None:
            held.append(tensor.numpy())
        elif what in ("off", "on"):
            counting = what == "on"
            probe.pause(not counting)
        del one, tensor
        now = {torch._C._data_address(one) if isinstance(one, torch.Tensor)  # looking copies nothing
               else one.__array_interface__["data"][0] for one in held}
        blocks = (blocks & now) | (now - seen if counting else set())
        seen = now
    found = since(probe, before)
    assert found.allocations - found.frees == len(blocks)
    assert found.allocated_bytes - found.freed_bytes == sum(int(_usable_size(address)) for address in blocks)
    held.clear()
    found = since(probe, before)
    assert (found.frees, found.freed_bytes) == (found.allocations, found.allocated_bytes)


@pytest.mark.parametrize("number", range(len(BOUNDS_NS)))
@pytest.mark.parametrize("more", [0, 1], ids=["at", "above"])
def test_a_latency_is_counted_in_its_bucket(clocked: Bench, number: int, more: int) -> None:
    """Allocations that take exactly a bound are in its bucket and one nanosecond more is in the next; the sum is exact,
    and slow are those above 12 ms.
    """
    before = clocked.probe.read()
    clocked.library.test_takes(BOUNDS_NS[number] + more)
    kept = [torch.empty(10) for _ in range(3)]
    found = since(clocked.probe, before)
    assert [place for place, count in enumerate(found.buckets) if count] == [number + more]
    assert (found.timed, found.sum_ns) == (3, 3 * (BOUNDS_NS[number] + more))
    assert sum(found.buckets[SLOW_BUCKET:]) == (3 if BOUNDS_NS[number] + more > 12_000_000 else 0)
    assert len(kept) == 3


def test_sampling_sees_each_phase_of_a_periodic_program(clocked: Bench) -> None:
    """Of a program in which every 64th allocation is slow, one of 64 timed on average, a share near 1/64 is slow."""
    clocked.probe.install(64)
    before = clocked.probe.read()
    number = 64 * 2_000
    for step in range(number):
        if step % 64 == 0:
            clocked.library.test_takes(20_000_000)
        torch.empty(1)
        if step % 64 == 0:
            clocked.library.test_takes(10)
    found = since(clocked.probe, before)
    assert found.allocations == number
    # A gap is uniform on 1 ... 127: the count of gaps has a deviation of 36.7 / 64 ** 1.5 * sqrt(number) = 26.
    assert abs(found.timed - 2_000) < 6 * 26
    # A binomial share of about 2,000 / 64 = 31, deviation 5.6; a fixed stride would find 0 or 2,000.
    assert 31 - 6 * 5.6 < sum(found.buckets[SLOW_BUCKET:]) < 31 + 6 * 5.6
    assert sum(found.buckets[SLOW_BUCKET:]) > 0


def test_tensors_outlive_the_probe(bench: Bench, probe: native.Probe) -> None:
    """With tensors alive the probe is taken away and torch's own allocator is back; their content and their frees are
    not lost, and what is allocated then is not counted.
    """
    ours = bench.library.test_allocator()
    before = probe.read()
    kept = [torch.arange(1000) for _ in range(5)]
    assert probe.remove() == "away"
    assert bench.library.test_allocator() != ours
    later = torch.empty(1000)
    assert all(int(tensor.sum()) == 499_500 for tensor in kept)
    kept.clear()
    del later
    found = since(probe, before)
    assert (found.frees, found.freed_bytes) == (found.allocations, found.allocated_bytes)


def test_one_that_came_on_top_is_left_there(bench: Bench) -> None:
    """Another allocator installed over the probe is not ripped out: the probe stays beneath, passes on, counts again
    when asked (and does not call itself), and goes once it is on top again.
    """
    probe, library = bench.probe, bench.library
    original = library.test_allocator()
    probe.install(1)
    own = library.test_allocator()
    library.test_put_other()
    top = library.test_allocator()
    assert (probe.place(), probe.remove()) == ("beneath", "beneath")
    assert library.test_allocator() == top
    before = probe.read()
    torch.empty(5)
    assert since(probe, before).allocations == 0
    assert probe.install(1) == "beneath"
    torch.empty(5)
    assert since(probe, before).allocations == 1
    library.test_take_other()
    assert (library.test_allocator(), probe.place()) == (own, "on top")
    assert probe.remove() == "away"
    assert library.test_allocator() == original


def test_it_can_come_again_over_another(bench: Bench) -> None:
    """After it was taken away, an allocator that does not know it may come, and the probe again over that one."""
    probe, library = bench.probe, bench.library
    original = library.test_allocator()
    probe.install(1)
    probe.remove()
    library.test_put_other()
    other = library.test_allocator()
    before = probe.read()
    assert probe.install(1) == "on top"
    torch.empty(5)
    assert probe.remove() == "away"
    assert since(probe, before).allocations == 1
    assert library.test_allocator() == other
    library.test_take_other()
    assert library.test_allocator() == original


def test_what_cannot_be_followed_is_untracked(clocked: Bench) -> None:
    """Memory with a node of its own is counted as untracked: neither its bytes nor its free are made up."""
    clocked.library.test_own(1)
    before = clocked.probe.read()
    kept = torch.empty(100)
    found = since(clocked.probe, before)
    assert (found.allocations, found.allocated_bytes, found.untracked) == (0, 0, 1)
    del kept
    found = since(clocked.probe, before)
    assert (found.frees, found.freed_bytes) == (0, 0)


def test_running_out_of_memory_is_the_host_s_own_error(probe: native.Probe) -> None:
    """A request that no machine can serve raises what it raises without the probe, and is no allocation."""
    with pytest.raises(RuntimeError) as with_probe:
        torch.empty(1 << 60, dtype=torch.uint8)
    before = probe.read()
    with pytest.raises(RuntimeError):
        torch.empty(1 << 60, dtype=torch.uint8)
    found = since(probe, before)
    assert (found.allocations, found.frees, found.untracked) == (0, 0, 0)
    probe.remove()
    with pytest.raises(RuntimeError) as without:
        torch.empty(1 << 60, dtype=torch.uint8)
    first, second = (str(error.value).split("Exception raised from")[0] for error in (with_probe, without))
    assert (type(with_probe.value), first) == (type(without.value), second)


def test_torch_s_profiler_sees_the_same(probe: native.Probe) -> None:
    """torch.profiler records the same memory events with the probe as without, and the probe counts meanwhile."""

    def profiled() -> list[int]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            kept = [torch.empty(1 << 10) for _ in range(10)]
            del kept
        return [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]

    before = probe.read()
    with_probe = profiled()
    found = since(probe, before)
    probe.remove()
    assert with_probe == profiled()
    assert with_probe.count(4096) == with_probe.count(-4096) == 10
    assert found.allocations >= 10
