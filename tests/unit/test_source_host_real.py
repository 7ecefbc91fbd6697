"""The host source on the real machine, beside a second reader of the same facts."""

from __future__ import annotations

import itertools
import os
import resource
import threading
from pathlib import Path

import pytest

from kvobs.catalog import BY_NAME
from kvobs.sources import _host
from kvobs.sources._host import HostSource
from kvobs.sources._tree import Tree
from tests.unit.test_source_host import PAGE, SECOND, SUBJECTS, TICK, KiB, MiB, Values, real, reasons, told


def sampled(source: HostSource, at: int) -> Values:
    return told(source.sample(at * SECOND))


@real
def test_the_real_process_agrees_with_getrusage() -> None:
    """Between two calls of getrusage, each counter lies between their answers (CPU time to its tick)."""
    source = HostSource(cpu=lambda: 0)
    source.install(lambda _: None)
    before = resource.getrusage(resource.RUSAGE_SELF)
    values = sampled(source, 1)
    after = resource.getrusage(resource.RUSAGE_SELF)
    for key, field in ((("process.paging.faults", "minor"), "ru_minflt"),
                       (("process.paging.faults", "major"), "ru_majflt"),
                       (("process.context_switches", "voluntary"), "ru_nvcsw"),
                       (("process.context_switches", "involuntary"), "ru_nivcsw")):
        assert getattr(before, field) <= values[key] <= getattr(after, field)
    for mode, field in (("user", "ru_utime"), ("system", "ru_stime")):
        assert getattr(before, field) - 1 / TICK <= values["process.cpu.time", mode] <= getattr(after, field) + 1 / TICK


@real
def test_the_context_switches_of_threads_that_ended_count() -> None:
    """A thread that waited 50 times and ended has raised the process's count by 50 or more."""
    source = HostSource(cpu=lambda: 0)
    source.install(lambda _: None)
    before = sampled(source, 1)["process.context_switches", "voluntary"]
    here, there = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(50):
            there.acquire()
            here.release()

    thread = threading.Thread(target=answer)
    thread.start()
    for _ in range(50):
        there.release()
        here.acquire()
    thread.join()
    assert sampled(source, 2)["process.context_switches", "voluntary"] - before >= 50


@real
def test_threads_and_touched_memory_are_seen() -> None:
    """One more thread is one more; 64 MiB that were touched are 64 MiB more of resident memory and 16,384 faults."""
    import mmap

    source = HostSource(cpu=lambda: 0)
    source.install(lambda _: None)
    before = sampled(source, 1)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    with mmap.mmap(-1, 64 * MiB) as block:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            block.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, 64 * MiB, PAGE):
            block[at] = 1
        after = sampled(source, 2)
    stop.set()
    thread.join()
    assert after["process.thread.count",] == before["process.thread.count",] + 1
    for name in ("process.memory.usage", "process.memory.virtual"):
        assert after[name,] - before[name,] == pytest.approx(64 * MiB, abs=16 * MiB)
    faults = after["process.paging.faults", "minor"] - before["process.paging.faults", "minor"]
    assert faults >= 64 * MiB // PAGE


@real
def test_a_huge_page_of_the_process_is_seen() -> None:
    """Memory that asked for huge pages and was touched is counted, as much as the kernel says of that mapping."""
    import mmap

    if not hasattr(mmap, "MADV_HUGEPAGE") or _host.transparent(Tree(Path("/")))[0] == []:
        pytest.skip("This kernel does not count huge pages per process.")
    mode = _host.transparent(Tree(Path("/")))[0][0][1][0]
    before = _host.transparent(Tree(Path("/")))[0][0][2]
    with mmap.mmap(-1, 32 * MiB) as block:
        block.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, 32 * MiB, PAGE):
            block[at] = 1
        after = _host.transparent(Tree(Path("/")))[0][0][2]
        maps = Path("/proc/self/smaps").read_text()
    granted = sum(int(line.split()[1]) for line in maps.splitlines() if line.startswith("AnonHugePages:")) * KiB
    if mode == "never":
        assert after == before
    else:
        assert after == granted


@real
def test_the_real_machine_is_told() -> None:
    """The machine's memory is sysconf's, and what a NUMA node uses and has free is what the kernel says it has."""
    source = HostSource(cpu=lambda: 0)
    source.install(lambda _: None)
    values = sampled(source, 1)
    assert values["system.memory.limit",] == os.sysconf("SC_PHYS_PAGES") * PAGE
    for path in Path("/sys/devices/system/node").glob("node*/meminfo"):
        total = next(line for line in path.read_text().splitlines() if "MemTotal" in line)
        node = path.parent.name[4:]
        assert sum(values["kvobs.host.numa.usage", node, state] for state in ("used", "free")) == (
            int(total.split()[-2]) * KiB)
    assert reasons(source.availability()).keys() == SUBJECTS


@real
def test_counters_only_grow() -> None:
    """In ten polls in a row no counter is smaller than before."""
    source = HostSource(cpu=lambda: 0)
    source.install(lambda _: None)
    polls = [sampled(source, at) for at in range(1, 11)]
    for first, second in itertools.pairwise(polls):
        for key, value in first.items():
            if BY_NAME[key[0]].kind == "counter":
                assert second[key] >= value, key


@real
def test_a_forked_child_tells_of_itself() -> None:
    """In a forked child the values are the child's: the parent's ballast is in neither its faults nor its CPU time."""
    source = HostSource(cpu=lambda: 0)
    source.install(lambda _: None)
    parent = sampled(source, 1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            source.after_fork_in_child()
            values = sampled(source, 2)
            text = (f"{values['process.paging.faults', 'minor']} {resource.getrusage(resource.RUSAGE_SELF).ru_minflt} "
                    f"{values['process.thread.count',]}")
            os.write(writing, text.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        faults, rusage, threads = map(int, pipe.read().split())
    os.waitpid(child, 0)
    assert threads == 1
    assert faults <= rusage < parent["process.paging.faults", "minor"]
