"""The host: a hand-written tree is told as it was written, what is missing has its reason, and the real one agrees."""

from __future__ import annotations

import errno
import itertools
import os
import resource
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvobs.catalog import BY_NAME
from kvobs.model import Availability, Event, Poll
from kvobs.sources._host import HostSource
from kvobs.sources._tree import LIMIT_BYTES, Tree

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
SECOND = 1_000_000_000
PAGE, TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
GROUPS_V1 = "12:cpuset:/\n7:cpu,cpuacct:/pod/a\n4:memory:/pod/a\n1:name=systemd:/x\n0::/\n"
MOUNTS_V1 = ("35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
             "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
MOUNTS_V2 = ("22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
             "30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 none rw\n")

# A process called "a ) b (c" on a machine with two NUMA nodes and two sizes of huge pages, in a cgroup v2 that is two
# levels deep. Every number is another one.
FILES: dict[str, str] = {
    "proc/self/statm": "1000 300 25 4 0 120 0\n",
    "proc/self/stat": "4242 (a ) b (c) S 1 4242 4242 0 -1 4194304 5001 9 17 8 250 75 3 4 20 0 13 0 90 4096000 300 1\n",
    "proc/self/cgroup": "0::/slice/pod\n",
    "proc/self/mountinfo": MOUNTS_V2,
    "proc/self/smaps_rollup": "5500-7fff ---p 00000000 00:00 0      [rollup]\nRss:   1200 kB\n"
                              "AnonHugePages:   4096 kB\nSwap:     0 kB\n",
    "proc/meminfo": "MemTotal:       16000000 kB\nMemFree:         4000000 kB\nMemAvailable:    9000000 kB\n"
                    "Buffers:          200000 kB\nCached:          3000000 kB\nSwapCached:           7 kB\n"
                    "HugePages_Total:       9\nHugepagesize:       2048 kB\n",
    "proc/pressure/cpu": "some avg10=0.26 avg60=0.36 avg300=0.30 total=3885555291\n"
                         "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "proc/pressure/memory": "some avg10=1.50 avg60=0.00 avg300=0.00 total=2500000\n"
                            "full avg10=0.50 avg60=0.00 avg300=0.00 total=1250000\n",
    "proc/pressure/io": "some avg10=0.07 avg60=0.11 avg300=0.50 total=302988233\n"
                        "full avg10=0.04 avg60=0.07 avg300=0.48 total=146015371\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    **{f"sys/kernel/mm/hugepages/hugepages-{size}kB/{name}_hugepages": f"{value}\n"
       for size, values in ((2048, (2048, 1500, 7, 3)), (1048576, (4, 1, 2, 0)))
       for name, value in zip(("nr", "free", "resv", "surplus"), values, strict=True)},
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages": "99\n",
    "sys/devices/system/node/online": "0-1\n",
    **{f"sys/devices/system/node/node{node}/meminfo":
       f"Node {node} MemTotal:     {total} kB\nNode {node} MemFree:     {free} kB\nNode {node} MemUsed:   {used} kB\n"
       f"Node {node} HugePages_Total:   5\n" for node, total, free, used in ((0, 900, 600, 300), (1, 800, 100, 700))},
    **{f"sys/devices/system/node/node{node}/numastat":
       "numa_hit {}\nnuma_miss {}\nnuma_foreign {}\ninterleave_hit {}\nlocal_node {}\nother_node {}\n".format(*values)
       for node, values in ((0, (100, 1, 2, 3, 95, 6)), (1, (200, 11, 12, 13, 195, 16)))},
    "sys/fs/cgroup/slice/pod/memory.current": "123456789\n",
    "sys/fs/cgroup/slice/pod/memory.peak": "223456789\n",
    "sys/fs/cgroup/slice/pod/memory.max": "1073741824\n",
    "sys/fs/cgroup/slice/memory.max": "536870912\n",
    "sys/fs/cgroup/slice/pod/memory.events": "low 1\nhigh 2\nmax 3\noom 4\noom_kill 5\noom_group_kill 6\n",
}
TRUTH: dict[tuple[str, ...], float] = {
    ("process.memory.virtual",): 1000 * PAGE, ("process.memory.usage",): 300 * PAGE,
    ("process.cpu.time", "user"): 250 / TICK, ("process.cpu.time", "system"): 75 / TICK,
    ("process.paging.faults", "minor"): 5001, ("process.paging.faults", "major"): 17,
    ("process.thread.count",): 13,
    ("process.context_switches", "voluntary"): 41, ("process.context_switches", "involuntary"): 42,
    ("system.memory.limit",): 16000000 * KiB, ("system.memory.usage", "free"): 4000000 * KiB,
    ("system.memory.usage", "buffers"): 200000 * KiB, ("system.memory.usage", "cached"): 3000000 * KiB,
    ("system.memory.usage", "used"): 8800000 * KiB,
    ("kvobs.host.pressure", "cpu", "some"): 3885.555291, ("kvobs.host.pressure", "cpu", "full"): 0,
    ("kvobs.host.pressure", "memory", "some"): 2.5, ("kvobs.host.pressure", "memory", "full"): 1.25,
    ("kvobs.host.pressure", "io", "some"): 302.988233, ("kvobs.host.pressure", "io", "full"): 146.015371,
    ("kvobs.host.hugepages", "2MiB", "total"): 2048, ("kvobs.host.hugepages", "2MiB", "free"): 1500,
    ("kvobs.host.hugepages", "2MiB", "reserved"): 7, ("kvobs.host.hugepages", "2MiB", "surplus"): 3,
    ("kvobs.host.hugepages", "1GiB", "total"): 4, ("kvobs.host.hugepages", "1GiB", "free"): 1,
    ("kvobs.host.hugepages", "1GiB", "reserved"): 2, ("kvobs.host.hugepages", "1GiB", "surplus"): 0,
    ("kvobs.host.thp", "madvise"): 4 * MiB,
    ("kvobs.host.numa.usage", "0", "used"): 300 * KiB, ("kvobs.host.numa.usage", "0", "free"): 600 * KiB,
    ("kvobs.host.numa.usage", "1", "used"): 700 * KiB, ("kvobs.host.numa.usage", "1", "free"): 100 * KiB,
    **{("kvobs.host.numa.allocations", node, kind): value
       for node, values in (("0", (100, 1, 2, 3, 95, 6)), ("1", (200, 11, 12, 13, 195, 16)))
       for kind, value in zip(("hit", "miss", "foreign", "interleave", "local", "other"), values, strict=True)},
    ("kvobs.host.cgroup.memory", "usage"): 123456789, ("kvobs.host.cgroup.memory", "peak"): 223456789,
    ("kvobs.host.cgroup.memory", "limit"): 512 * MiB,
    ("kvobs.host.cgroup.events", "low"): 1, ("kvobs.host.cgroup.events", "high"): 2,
    ("kvobs.host.cgroup.events", "max"): 3, ("kvobs.host.cgroup.events", "oom"): 4,
    ("kvobs.host.cgroup.events", "oom_kill"): 5,
}
SUBJECTS = {"host", "host.pressure", "host.numa", "host.cgroup", "host.hugepages", "host.thp"}
Values = dict[tuple[str, ...], float]


def usage(who: int) -> Any:
    assert who == resource.RUSAGE_SELF
    return SimpleNamespace(ru_nvcsw=41, ru_nivcsw=42)


def write(root: Path, changes: dict[str, str | None] | None = None) -> Path:
    """The tree of FILES with changed files; None takes one away."""
    for name, text in (FILES | (changes or {})).items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return root


def told(events: Iterable[Event]) -> Values:
    """The readings of the one poll by (name, *attributes); every reading has its row's attributes, and comes once."""
    (poll,) = events
    assert isinstance(poll, Poll)
    assert poll.source == "host"
    for name, attributes, _ in poll.readings:
        assert len(attributes) == len(BY_NAME[name].attributes)
    values = {(name, *attributes): value for name, attributes, value in poll.readings}
    assert len(values) == len(poll.readings)
    return values


def reasons(facts: Iterable[Availability]) -> dict[str, str]:
    """Reasons by subject; a reason is a sentence, and is there where something is not available."""
    found = list(facts)
    assert all(fact.reason.endswith(".") if fact.reason else fact.available for fact in found)
    return {fact.subject: fact.reason for fact in found}


def look(root: Path) -> tuple[Values, dict[str, str]]:
    source = HostSource(root, usage=usage)
    source.install(lambda event: pytest.fail(f"nothing is emitted outside a poll, but {event}"))
    values = told(source.sample(SECOND))
    return values, reasons(source.availability())


def only(values: Values, name: str) -> Values:
    return {key: value for key, value in values.items() if key[0].startswith(name)}


def test_the_tree_is_told_as_it_was_written(tmp_path: Path) -> None:
    """Every value of the hand-written tree comes out, in the catalog's units, and nothing else does."""
    values, why = look(write(tmp_path))
    assert values == pytest.approx(TRUTH)
    assert why == dict.fromkeys(SUBJECTS, "")


def test_the_states_of_memory_add_up() -> None:
    """Used, free, buffers and cached are all of the machine's memory, here and in the hand-written truth."""
    source = HostSource()
    source.install(lambda _: None)
    for values in (TRUTH, told(source.sample(SECOND))):
        assert sum(only(values, "system.memory.usage").values()) == values["system.memory.limit",]


@pytest.mark.parametrize(("gone", "subject", "names", "said"), [
    (["proc/self/statm"], "host", ["process.memory"], "/proc/self/statm cannot be read (no such file or directory)."),
    (["proc/self/stat"], "host", ["process.cpu", "process.paging", "process.thread"],
     "/proc/self/stat cannot be read (no such file or directory)."),
    (["proc/meminfo"], "host", ["system."], "/proc/meminfo cannot be read (no such file or directory)."),
    (["proc/pressure/io"], "host.pressure", ["kvobs.host.pressure\0io"],
     "/proc/pressure/io cannot be read (no such file or directory)."),
    ([name for name in FILES if "hugepages-" in name], "host.hugepages", ["kvobs.host.hugepages"],
     "/sys/kernel/mm/hugepages cannot be read (no such file or directory)."),
    ([name for name in FILES if "/node" in name], "host.numa", ["kvobs.host.numa"],
     "/sys/devices/system/node cannot be read (no such file or directory)."),
    (["proc/self/smaps_rollup"], "host.thp", ["kvobs.host.thp"],
     "/proc/self/smaps_rollup cannot be read (no such file or directory)."),
    (["proc/self/cgroup"], "host.cgroup", ["kvobs.host.cgroup"],
     "/proc/self/cgroup cannot be read (no such file or directory)."),
    (["proc/self/mountinfo"], "host.cgroup", ["kvobs.host.cgroup"],
     "/proc/self/mountinfo cannot be read (no such file or directory)."),
])
def test_a_missing_file_is_absent_with_its_reason(tmp_path: Path, gone: list[str], subject: str, names: list[str],
                                                  said: str) -> None:
    """Exactly the metrics of the missing file are absent, never 0, and its subject, and no other, says which it is."""
    values, why = look(write(tmp_path, dict.fromkeys(gone)))
    missing = {key for key in TRUTH if any("\0".join(key).startswith(name) for name in names)}
    assert missing
    assert values.keys() == TRUTH.keys() - missing
    assert {key: value for key, value in why.items() if value} == {subject: said}


def test_a_machine_without_proc_tells_nothing(tmp_path: Path) -> None:
    """Where neither /proc nor /sys is, there is no poll, and every subject has a reason."""
    source = HostSource(tmp_path, usage=usage)
    source.install(lambda _: None)
    assert list(source.sample(SECOND)) == []
    facts = list(source.availability())
    assert {fact.subject for fact in facts} == SUBJECTS
    assert not any(fact.available for fact in facts)
    assert all(reasons(facts).values())


def test_pressure_that_was_turned_off_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel started with psi=0 refuses to read the files: absent, with the kernel's word for it."""
    read = Tree.read

    def refuse(tree: Tree, path: str) -> str:
        if path.startswith("/proc/pressure"):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        return read(tree, path)

    monkeypatch.setattr(Tree, "read", refuse)
    values, why = look(write(tmp_path))
    assert not only(values, "kvobs.host.pressure")
    assert "/proc/pressure/cpu cannot be read (operation not supported)." in why["host.pressure"]


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(("online", "overcommit_hugepages"))])
@pytest.mark.parametrize("text", ["", "garbage\n", "-1 -2 -3\n", "\ud83d) 1 2".encode("utf-8", "surrogatepass").hex()])
def test_a_file_of_another_form_makes_nothing_wrong(tmp_path: Path, name: str, text: str) -> None:
    """Whatever stands in one file, no value is told that was not written in the others, and nothing raises."""
    values, _ = look(write(tmp_path, {name: text}))
    assert {key: value for key, value in values.items() if TRUTH.get(key) != pytest.approx(value)} in (
        {}, {("kvobs.host.thp", "unknown"): 4 * MiB}, {("kvobs.host.cgroup.memory", "limit"): 512 * MiB},
        {("kvobs.host.cgroup.memory", "limit"): GiB})


# -- control groups ------------------------------------------------------------------------------------


def cgroup(root: Path, files: dict[str, str], groups: str, mounts: str) -> tuple[Values, str]:
    """What is told of the control group of a tree that has these files below /sys/fs/cgroup."""
    own: dict[str, str | None] = {name: None for name in FILES if name.startswith("sys/fs/cgroup")}
    values, why = look(write(root, own | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
                             | {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}))
    return {key[1:]: value for key, value in only(values, "kvobs.host.cgroup").items()}, why["host.cgroup"]


def test_version_1_tells_what_it_keeps(tmp_path: Path) -> None:
    """Usage, peak, the smaller of two limits, and the two events that v1 counts; beside v2 the v1 controller is it."""
    values, why = cgroup(tmp_path, {
        "memory/pod/a/memory.usage_in_bytes": "1000\n", "memory/pod/a/memory.max_usage_in_bytes": "3000\n",
        "memory/pod/a/memory.limit_in_bytes": "9000\n", "memory/pod/memory.limit_in_bytes": "8000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/pod/a/memory.failcnt": "12\n",
        "memory/pod/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        "unified/memory.current": "77\n"}, GROUPS_V1, MOUNTS_V1)
    assert values == {("usage",): 1000, ("peak",): 3000, ("limit",): 8000, ("max",): 12, ("oom_kill",): 2}
    assert why == ""


@pytest.mark.parametrize(("groups", "mounts", "name", "unlimited"), [
    ("0::/\n", "30 1 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n", "memory.current", {"memory.max": "max\n"}),
    ("4:memory:/docker/f00\n", "35 1 0:32 /docker/f00 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
     "memory/memory.usage_in_bytes", {"memory/memory.limit_in_bytes": "9223372036854710272\n"}),
])
def test_a_container_without_a_limit_has_none(tmp_path: Path, groups: str, mounts: str, name: str,
                                              unlimited: dict[str, str]) -> None:
    """In a container its group lies at the mount point itself; "max", and v1's huge number, are no limit, not one."""
    values, why = cgroup(tmp_path, {name: "5000\n"} | unlimited, groups, mounts)
    assert values == {("usage",): 5000}
    assert why == ""


@pytest.mark.parametrize(("groups", "mounts", "files", "said"), [
    ("0::/\n", MOUNTS_V2, {"cgroup.procs": "1\n"}, "in no control group whose memory is counted"),
    ("0::/../other\n", MOUNTS_V2, {"memory.current": "1\n"}, "not visible from here"),
    ("0::/elsewhere\n", "30 1 0:26 /docker /sys/fs/cgroup ro - cgroup2 cgroup rw\n", {"memory.current": "1\n"},
     "not visible from here"),
    ("0::/a\n", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n", {}, "not visible from here"),
    ("0::/a\n", MOUNTS_V2, {"a/memory.current": "plenty\n"}, "memory.current is not understood"),
])
def test_a_group_that_is_not_there_has_a_reason(tmp_path: Path, groups: str, mounts: str, files: dict[str, str],
                                                said: str) -> None:
    """The root group, a group outside this namespace or mount, none mounted, garbage: absent, and each says why."""
    values, why = cgroup(tmp_path, files, groups, mounts)
    assert values == {}
    assert said in why


def test_a_failing_read_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the read itself, which names no file, costs the control group alone and says which file it was."""
    read = Tree.read

    def failing(self: Tree, path: str) -> str:
        if path == "/proc/self/mountinfo":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, path)

    write(tmp_path)
    monkeypatch.setattr(Tree, "read", failing)
    values, why = look(tmp_path)
    assert why["host.cgroup"] == "/proc/self/mountinfo cannot be read (input/output error)."
    assert only(values, "process.memory.usage")


def test_a_process_that_is_moved_is_followed(tmp_path: Path) -> None:
    """After the process was put into another group, the next poll tells of that one."""
    source = HostSource(write(tmp_path, {"sys/fs/cgroup/other/memory.current": "42\n"}), usage=usage,
                        cpu=lambda: 0)
    source.install(lambda _: None)
    assert told(source.sample(SECOND))["kvobs.host.cgroup.memory", "usage"] == 123456789
    (tmp_path / "proc/self/cgroup").write_text("0::/other\n")
    assert told(source.sample(2 * SECOND))["kvobs.host.cgroup.memory", "usage"] == 42


# -- what is read rarely -------------------------------------------------------------------------------


class Clock:
    """CPU time that goes between two values in turn: every reading costs the same."""

    def __init__(self, *times: int) -> None:
        self._times = itertools.cycle(times)

    def __call__(self) -> int:
        return next(self._times)


def test_pools_and_nodes_are_read_every_ten_seconds(tmp_path: Path) -> None:
    """The pools of huge pages and the NUMA nodes are up to 10 s old; everything else is of this very second."""
    source = HostSource(write(tmp_path), usage=usage, cpu=lambda: 0)
    source.install(lambda _: None)
    first = told(source.sample(SECOND))
    changed = {"sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": ("kvobs.host.hugepages", "2MiB", "free"),
               "sys/devices/system/node/node1/numastat": ("kvobs.host.numa.allocations", "1", "hit"),
               "proc/pressure/io": ("kvobs.host.pressure", "io", "some"),
               "sys/fs/cgroup/slice/pod/memory.current": ("kvobs.host.cgroup.memory", "usage")}
    for name in changed:
        text = {"numastat": "numa_hit 5000\n", "io": "some total=9000000000\n"}.get(Path(name).name, "5000\n")
        (tmp_path / name).write_text(text)
    for at, stale in ((10, 2), (11, 0)):
        values = told(source.sample(at * SECOND))
        assert [key for key in changed.values() if values[key] == first[key]] == list(changed.values())[:stale]


def test_huge_pages_of_the_process_are_read_more_rarely_the_more_it_costs(tmp_path: Path) -> None:
    """A reading of 4 ms is repeated after 10 s, one of 200 ms after 60 s; meanwhile the last one is told again."""
    for cost_ms, again_s in ((4, 10), (200, 60)):
        source = HostSource(write(tmp_path), usage=usage, cpu=Clock(0, cost_ms * 1_000_000))
        source.install(lambda _: None)
        rollup = tmp_path / "proc/self/smaps_rollup"
        assert told(source.sample(SECOND))["kvobs.host.thp", "madvise"] == 4 * MiB
        rollup.write_text("AnonHugePages:   6144 kB\n")
        assert told(source.sample(again_s * SECOND))["kvobs.host.thp", "madvise"] == 4 * MiB
        assert told(source.sample((again_s + 4) * SECOND))["kvobs.host.thp", "madvise"] == 6 * MiB


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cost_us=st.integers(0, 50_000), gaps=st.lists(st.integers(1, 3_000), min_size=1, max_size=40))
def test_the_more_a_look_costs_the_rarer_it_is(tmp_path: Path, cost_us: int, gaps: list[int]) -> None:
    """Two looks are 2,000 times their cost apart, but never have to be more than 4 s apart, whenever it is asked."""
    source = HostSource(tmp_path, usage=usage, cpu=Clock(0, cost_us * 1_000))
    source.install(lambda _: None)
    (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc/self/statm").write_text("10 5 1 1 0 1 0\n")
    asked = [1_000 + sum(gaps[:number]) for number in range(len(gaps) + 1)]
    looked = [at_ms for at_ms in asked if list(source.sample(at_ms * 1_000_000))]
    least_ms = min(2 * cost_us, 4_000)
    expected = asked[:1]
    for at_ms in asked[1:]:
        expected += [at_ms] if at_ms - expected[-1] >= least_ms else []
    assert looked == expected


def test_a_huge_process_is_left_alone(tmp_path: Path) -> None:
    """After a reading of more than 300 ms the value is absent for good, and the reason says so."""
    source = HostSource(write(tmp_path), usage=usage, cpu=Clock(0, 301_000_000))
    source.install(lambda _: None)
    for at in (1, 1000):
        assert not only(told(source.sample(at * SECOND)), "kvobs.host.thp")
        assert "more than 300 ms" in reasons(source.availability())["host.thp"]


def test_it_ends_with_uninstall(tmp_path: Path) -> None:
    """Before install and after uninstall (also a second one) there is no poll and no fact; install begins anew."""
    source = HostSource(write(tmp_path), usage=usage)
    assert (list(source.sample(SECOND)), list(source.availability())) == ([], [])
    source.install(lambda _: None)
    assert told(source.sample(SECOND))
    source.uninstall()
    source.uninstall()
    assert (list(source.sample(2 * SECOND)), list(source.availability())) == ([], [])
    source.install(lambda _: None)
    assert told(source.sample(3 * SECOND)).keys() == TRUTH.keys()


def test_reading_is_bounded(tmp_path: Path) -> None:
    """Of a file without an end no more than the limit is read."""
    (tmp_path / "endless").write_bytes(b"x" * (LIMIT_BYTES + 10))
    assert Tree(tmp_path).read("/endless") == "x" * LIMIT_BYTES


# -- the real machine ----------------------------------------------------------------------------------

real = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="There is no /proc on this machine.")
