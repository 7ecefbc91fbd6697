"""What the kernel's text files say, as numbers. Pure; text that is not understood gives None or nothing, no error.

The formats are those of proc(5), Documentation/accounting/psi.rst, Documentation/admin-guide/cgroup-v2.rst and
Documentation/admin-guide/mm/hugetlbpage.rst of the kernel.
"""

from __future__ import annotations

import re

import msgspec

KIB = 1024
_DIGITS = 20  # of an unsigned 64-bit number
# One pattern over the whole text: taking lines apart in Python costs four times as much.
_SIZE = re.compile(r"^(?:Node [0-9]+ )?([^\s:]+):[ \t]+([0-9]{1,20}) kB[ \t]*$", re.ASCII | re.MULTILINE)
_ESCAPE = re.compile(r"\\([0-7]{3})")
_HUGE_PAGES = re.compile(r"hugepages-([1-9][0-9]{0,14})kB")
_AFTER_NAME = (7, 9, 11, 12, 17)  # minflt, majflt, utime, stime, num_threads, counted from the state


class ProcessStat(msgspec.Struct, frozen=True):
    """Of ``/proc/self/stat``, over all threads: page faults, CPU time in clock ticks, and the number of threads."""

    minor_faults: int
    major_faults: int
    user_ticks: int
    system_ticks: int
    threads: int


class Mount(msgspec.Struct, frozen=True):
    """A control-group file system: which group (``root``) is seen at ``point``; ``memory`` where v1 counts memory."""

    version: int
    root: str
    point: str
    memory: bool


def number(text: str) -> int | None:
    """An unsigned 64-bit number, or None."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def pages(text: str) -> tuple[int, int] | None:
    """``statm``: the sizes of the address space and of what is resident, in pages."""
    fields = [number(field) for field in text.split()[:2]]
    if len(fields) < 2 or fields[0] is None or fields[1] is None:
        return None
    return fields[0], fields[1]


def stat(text: str) -> ProcessStat | None:
    """``stat`` of a process; its name, in parentheses, may contain spaces and parentheses itself."""
    fields = text.rpartition(")")[2].split()
    if len(fields) <= _AFTER_NAME[-1]:
        return None
    found = [number(fields[place]) for place in _AFTER_NAME]
    known = [value for value in found if value is not None]
    return ProcessStat(*known) if len(known) == len(found) else None


def sizes(text: str) -> dict[str, int]:
    """Lines ``Name: 12 kB`` (also behind ``Node 0``) in bytes; lines of another form are left out."""
    return {name: int(value) * KIB for name, value in _SIZE.findall(text)}


def counts(text: str) -> dict[str, int]:
    """Lines ``name 12``; lines of another form are left out."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        value = number(words[1]) if len(words) == 2 else None
        if value is not None:
            found[words[0]] = value
    return found


def pressure(text: str) -> dict[str, int]:
    """Microseconds in which ``some`` or all (``full``) tasks were stalled, since the machine was started."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        kind, *pairs = line.split() or [""]
        total = next((pair[6:] for pair in pairs if pair.startswith("total=")), "")
        value = number(total)
        if kind in ("some", "full") and value is not None:
            found[kind] = value
    return found


def chosen(text: str) -> str | None:
    """Of ``always [madvise] never`` the word in brackets."""
    found = [word[1:-1] for word in text.split() if word.startswith("[") and word.endswith("]")]
    return found[0] if len(found) == 1 and found[0] else None


def page_size(directory: str) -> str | None:
    """``hugepages-2048kB`` as ``2MiB``; None for another name."""
    match = _HUGE_PAGES.fullmatch(directory)
    if match is None:
        return None
    size, units = int(match[1]), ["KiB", "MiB", "GiB"]
    while size % KIB == 0 and len(units) > 1:
        size, units = size // KIB, units[1:]
    return f"{size}{units[0]}"


def groups(text: str) -> tuple[str | None, str | None]:
    """``/proc/self/cgroup``: the process's group in the unified hierarchy (v2), and in v1's memory controller."""
    unified = memory = None
    for line in text.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if hierarchy == "0" and not controllers:
            unified = path
        elif "memory" in controllers.split(","):
            memory = path
    return unified, memory


def mounts(text: str) -> list[Mount]:
    """``/proc/self/mountinfo``: its control-group file systems, in their order."""
    found = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if dash and len(fields) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            found.append(Mount(2 if kind[0] == "cgroup2" else 1, _plain(fields[3]), _plain(fields[4]),
                               kind[0] == "cgroup" and "memory" in kind[2].split(",")))
    return found


def _plain(path: str) -> str:
    r"""The kernel writes blanks, line ends and backslashes of a path as ``\040``."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), path)
