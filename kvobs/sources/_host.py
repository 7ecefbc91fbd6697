"""Source: this process and its machine as the Linux kernel tells them, polled once a second."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kvobs.model import Availability, Emit, Event, Poll
from kvobs.sources import _host_parse as parse
from kvobs.sources._cgroup import Cgroup, Readings
from kvobs.sources._tree import Tree, misunderstood, unreadable

SOURCE = "host"
PRESSURE, NUMA, CGROUP, HUGE, THP = (f"{SOURCE}.{part}" for part in (
    "pressure", "numa", "cgroup", "hugepages", "thp"))
STAT, STATM, MEMINFO, ROLLUP = "/proc/self/stat", "/proc/self/statm", "/proc/meminfo", "/proc/self/smaps_rollup"
HUGE_PAGES, NODES = "/sys/kernel/mm/hugepages", "/sys/devices/system/node"
THP_MODE = "/sys/kernel/mm/transparent_hugepage/enabled"
# Together the files that are read each time cost 0.4 ms, and thrice that where the processor's caches are cold: reading
# them may take half a thousandth of the time. Metrics forget what is older than 5 s.
INTERVAL_PER_COST, OLDEST_NS = 2000, 4_000_000_000
# Every file costs 12 to 25 us, there are many per page size and per node, and they change slowly.
RARE_NS = 10_000_000_000
# The kernel walks all pages of the process: 0.2 ms for a small one, 8 ms with torch, 28 ms with 2 GB. A 2,500th of the
# time leaves the rest of this source its share of 1 ms a second.
ROLLUP_INTERVAL_PER_COST, ROLLUP_OLDEST_NS, ROLLUP_DEAREST_NS = 2500, 60_000_000_000, 300_000_000
TOO_LARGE = "This process has so many pages that counting the huge ones takes more than 300 ms, so nobody counts them."
_STATES = (("total", "nr"), ("free", "free"), ("reserved", "resv"), ("surplus", "surplus"))
_NUMASTAT = (("hit", "numa_hit"), ("miss", "numa_miss"), ("foreign", "numa_foreign"),
             ("interleave", "interleave_hit"), ("local", "local_node"), ("other", "other_node"))
_MICROSECOND = 1e-6
_NEVER_NS = 1 << 63

Part = tuple[Readings, str]


class HostSource:
    """Polls /proc and /sys below ``root``; ``usage`` is getrusage and ``cpu`` a clock of CPU time in ns."""

    name = SOURCE

    def __init__(self, root: Path = Path("/"),
                 usage: Callable[[int], resource.struct_rusage] = resource.getrusage,
                 cpu: Callable[[], int] = time.thread_time_ns) -> None:
        self._tree, self._usage, self._cpu = Tree(root), usage, cpu
        self._installed = False
        self._forget()

    def _forget(self) -> None:
        self._facts: list[Availability] = []
        self._cgroup = Cgroup()
        self._kept: dict[str, Part] = {}
        self._next_ns: dict[str, int] = {}
        self._due_ns: int | None = None

    def install(self, emit: Emit) -> None:
        """Nothing is hooked."""
        self._installed = True

    def uninstall(self) -> None:
        """Read no more."""
        self._installed = False
        self._forget()

    def after_fork_in_child(self) -> None:
        """What was read is the parent's."""
        self._forget()

    def sample(self, now_ns: int) -> Iterable[Event]:
        """Everything that can be read now; what cannot has its reason in ``availability``."""
        if not self._installed or (self._due_ns is not None and now_ns < self._due_ns):
            return ()
        began = time.perf_counter_ns()
        self._read_rarely(now_ns)
        spent = self._cpu()
        parts = {SOURCE: self._own(), PRESSURE: pressure(self._tree), CGROUP: self._cgroup.read(self._tree),
                 **self._kept}
        self._due_ns = now_ns + min(INTERVAL_PER_COST * (self._cpu() - spent), OLDEST_NS)
        self._facts = [Availability(subject, bool(readings), reason) for subject, (readings, reason) in parts.items()]
        readings = tuple(reading for part, _ in parts.values() for reading in part)
        return (Poll(now_ns, SOURCE, time.perf_counter_ns() - began, readings),) if readings else ()

    def availability(self) -> Iterable[Availability]:
        """What the last sample could see and what not."""
        return self._facts

    def _own(self) -> Part:
        readings, reason = process(self._tree)
        if readings:
            # All threads, those that ended too, where /proc/self/status tells of the main thread only.
            usage = self._usage(resource.RUSAGE_SELF)
            readings.append(("process.context_switches", ("voluntary",), usage.ru_nvcsw))
            readings.append(("process.context_switches", ("involuntary",), usage.ru_nivcsw))
        machine, why = memory(self._tree)
        return readings + machine, " ".join(filter(None, (reason, why)))

    def _read_rarely(self, now_ns: int) -> None:
        """What costs more is kept for a while, by which it may be old; the more the rollup costs the longer."""
        for subject, read in ((NUMA, numa), (HUGE, huge_pages), (THP, transparent)):
            if now_ns < self._next_ns.get(subject, now_ns):
                continue
            began = self._cpu()
            self._kept[subject] = read(self._tree)
            cost = self._cpu() - began
            self._next_ns[subject] = now_ns + (
                min(ROLLUP_INTERVAL_PER_COST * cost, ROLLUP_OLDEST_NS) if subject == THP else RARE_NS)
            if subject == THP and cost > ROLLUP_DEAREST_NS:
                self._kept[subject], self._next_ns[subject] = ([], TOO_LARGE), _NEVER_NS


def process(tree: Tree) -> Part:
    """Memory, CPU time, page faults and threads of this process."""
    readings: Readings = []
    reasons = []
    for path, parsed in ((STATM, _pages), (STAT, _stat)):
        try:
            found = parsed(tree.read(path))
        except OSError as error:
            reasons.append(unreadable(path, error))
            continue
        readings += found
        if not found:
            reasons.append(misunderstood(path))
    return readings, " ".join(reasons)


def _pages(text: str) -> Readings:
    sizes, page = parse.pages(text), os.sysconf("SC_PAGE_SIZE")
    return [] if sizes is None else [("process.memory.virtual", (), sizes[0] * page),
                                     ("process.memory.usage", (), sizes[1] * page)]


def _stat(text: str) -> Readings:
    stat, tick = parse.stat(text), os.sysconf("SC_CLK_TCK")
    return [] if stat is None else [
        ("process.cpu.time", ("user",), stat.user_ticks / tick),
        ("process.cpu.time", ("system",), stat.system_ticks / tick),
        ("process.paging.faults", ("minor",), stat.minor_faults),
        ("process.paging.faults", ("major",), stat.major_faults),
        ("process.thread.count", (), stat.threads)]


def memory(tree: Tree) -> Part:
    """The machine's memory by state: the states add up to its limit."""
    try:
        found = parse.sizes(tree.read(MEMINFO))
    except OSError as error:
        return [], unreadable(MEMINFO, error)
    states = {"free": found.get("MemFree"), "buffers": found.get("Buffers"), "cached": found.get("Cached")}
    known = {state: value for state, value in states.items() if value is not None}
    total = found.get("MemTotal")
    if total is None or len(known) < len(states) or sum(known.values()) > total:
        return [], misunderstood(MEMINFO)
    known["used"] = total - sum(known.values())
    return [("system.memory.limit", (), total),
            *(("system.memory.usage", (state,), value) for state, value in known.items())], ""


def pressure(tree: Tree) -> Part:
    """Seconds in which tasks of this machine were stalled (PSI)."""
    readings: Readings = []
    reasons = []
    for kind in ("cpu", "memory", "io"):
        path = f"/proc/pressure/{kind}"
        try:
            found = parse.pressure(tree.read(path))
        except OSError as error:
            reasons.append(unreadable(path, error))
            continue
        readings += [("kvobs.host.pressure", (kind, who), total * _MICROSECOND) for who, total in found.items()]
        if not found:
            reasons.append(misunderstood(path))
    return readings, " ".join(reasons)


def huge_pages(tree: Tree) -> Part:
    """The pools of huge pages of this machine, by page size."""
    readings: Readings = []
    try:
        for name in tree.names(HUGE_PAGES):
            size = parse.page_size(name)
            if size is None:
                continue
            for state, prefix in _STATES:
                pages = parse.number(tree.read(f"{HUGE_PAGES}/{name}/{prefix}_hugepages"))
                if pages is not None:
                    readings.append(("kvobs.host.hugepages", (size, state), pages))
    except OSError as error:
        return readings, unreadable(HUGE_PAGES, error)
    return readings, "" if readings else f"{HUGE_PAGES} names no size of page."


def transparent(tree: Tree) -> Part:
    """Transparent huge pages of this process, beside the mode that this machine is in."""
    try:
        mode = parse.chosen(tree.read(THP_MODE)) or "unknown"
    except OSError:
        mode = "unknown"
    try:
        found = parse.sizes(tree.read(ROLLUP)).get("AnonHugePages")
    except OSError as error:
        return [], unreadable(ROLLUP, error)
    return ([], misunderstood(ROLLUP)) if found is None else ([("kvobs.host.thp", (mode,), found)], "")


def numa(tree: Tree) -> Part:
    """Memory and allocations of each NUMA node."""
    readings: Readings = []
    try:
        for name in tree.names(NODES):
            node = name.removeprefix("node")
            if name == node or not node.isdigit():
                continue
            sizes = parse.sizes(tree.read(f"{NODES}/{name}/meminfo"))
            counts = parse.counts(tree.read(f"{NODES}/{name}/numastat"))
            readings += [("kvobs.host.numa.usage", (node, state), sizes[key])
                         for state, key in (("used", "MemUsed"), ("free", "MemFree")) if key in sizes]
            readings += [("kvobs.host.numa.allocations", (node, kind), counts[key])
                         for kind, key in _NUMASTAT if key in counts]
    except OSError as error:
        return readings, unreadable(NODES, error)
    return readings, "" if readings else f"{NODES} names no node."
