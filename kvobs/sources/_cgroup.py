"""The memory that the kernel counts and limits for the control group of this process (cgroup v2, or v1's controller).

Where the group's directory lies follows from ``/proc/self/cgroup`` (which group) and ``/proc/self/mountinfo`` (which
group is seen at which mount point): in a container the two differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvobs.sources._host_parse import Mount, counts, groups, mounts, number
from kvobs.sources._tree import Tree, misunderstood, unreadable

SELF, MOUNTS = "/proc/self/cgroup", "/proc/self/mountinfo"
NOWHERE = "The memory control group of this process is not visible from here."
UNCOUNTED = "This process is in no control group whose memory is counted."
_DEEPEST = 16
_UNLIMITED = 1 << 62  # v1 says "no limit" as the largest multiple of the page size
_FILES = {2: ("memory.current", "memory.peak", "memory.max"),
          1: ("memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.limit_in_bytes")}
_EVENTS = ("low", "high", "max", "oom", "oom_kill")

Readings = list[tuple[str, tuple[str, ...], float]]


class Place(msgspec.Struct, frozen=True):
    """The directory of a group, and how many directories above it are groups too."""

    version: int
    directory: str
    above: int


def place(membership: str, mountinfo: str) -> Place | None:
    """Where the memory of the group is told; v1's memory controller, where there is one, is not in v2."""
    unified, memory = groups(membership)
    found = mounts(mountinfo)
    for group, candidates, version in ((memory, [mount for mount in found if mount.memory], 1),
                                       (unified, [mount for mount in found if mount.version == 2], 2)):
        if group is not None:
            return next((it for mount in candidates if (it := _below(mount, group, version)) is not None), None)
    return None


def _below(mount: Mount, group: str, version: int) -> Place | None:
    root = mount.root.rstrip("/")
    if ".." in group.split("/") or not (group.rstrip("/") + "/").startswith(root + "/"):
        return None
    names = [name for name in group[len(root):].split("/") if name]
    return Place(version, "/".join([mount.point.rstrip("/"), *names]), min(len(names), _DEEPEST))


class Cgroup:
    """The group's readings; where it is, is looked for again when the process was moved."""

    def __init__(self) -> None:
        self._membership: str | None = None
        self._place: Place | None = None

    def read(self, tree: Tree) -> tuple[Readings, str]:
        """What is known of the group, and the reason where nothing is."""
        path = SELF
        try:
            membership = tree.read(path)
            if membership != self._membership:
                path = MOUNTS
                self._place = place(membership, tree.read(path))
                self._membership = membership
        except OSError as error:
            return [], unreadable(path, error)
        if self._place is None:
            return [], NOWHERE
        usage, peak, _ = (f"{self._place.directory}/{name}" for name in _FILES[self._place.version])
        try:
            used = number(tree.read(usage))
        except FileNotFoundError:
            return [], UNCOUNTED  # the root group of v2, or one without the memory controller
        except OSError as error:
            return [], unreadable(usage, error)
        if used is None:
            return [], misunderstood(usage)
        values = {"usage": used, "peak": number(_maybe(tree, peak)), "limit": _limit(tree, self._place)}
        readings: Readings = [("kvobs.host.cgroup.memory", (state,), value)
                              for state, value in values.items() if value is not None]
        readings += [("kvobs.host.cgroup.events", (event,), count) for event, count in _events(tree, self._place)]
        return readings, ""


def _limit(tree: Tree, where: Place) -> int | None:
    """The smallest limit of the group and of those above it, all of which bind it; None where there is none."""
    directory, limits = where.directory, []
    for _ in range(where.above + 1):
        value = number(_maybe(tree, f"{directory}/{_FILES[where.version][2]}"))
        if value is not None and value < _UNLIMITED:
            limits.append(value)
        directory = directory.rpartition("/")[0]
    return min(limits, default=None)


def _events(tree: Tree, where: Place) -> Iterator[tuple[str, int]]:
    if where.version == 2:
        found = counts(_maybe(tree, f"{where.directory}/memory.events"))
    else:  # v1 keeps two of them: how often the limit was met, and how many were killed
        found = {name: value for name, value in counts(_maybe(tree, f"{where.directory}/memory.oom_control")).items()
                 if name == "oom_kill"}
        met = number(_maybe(tree, f"{where.directory}/memory.failcnt"))
        found |= {} if met is None else {"max": met}
    return ((event, found[event]) for event in _EVENTS if event in found)


def _maybe(tree: Tree, path: str) -> str:
    try:
        return tree.read(path)
    except OSError:
        return ""
