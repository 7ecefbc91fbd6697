"""The kernel's text files: what is well formed is read back as it was written, and no other text raises."""

from __future__ import annotations

import string

from hypothesis import example, given
from hypothesis import strategies as st

from kvobs.sources import _host_parse as parse
from kvobs.sources._cgroup import place

WHOLE = st.integers(0, 2**64 - 1)
NAMES = st.text(string.ascii_letters + string.digits + "_()", min_size=1, max_size=20)
# Names of processes and directories: anything but a NUL, and for paths a slash.
ANYTHING = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
PARTS = st.text(string.ascii_letters + " \\\t.-:(){}é", min_size=1, max_size=12).filter(lambda part: part.strip("."))
PARSERS = (parse.number, parse.pages, parse.stat, parse.sizes, parse.counts, parse.pressure, parse.chosen,
           parse.page_size, parse.groups, parse.mounts)


@given(st.one_of(st.text(), st.binary().map(lambda data: data.decode("utf-8", "replace")),
                 st.text("0123456789 :/,kB()-=\nsometalful.cgrp2\\", max_size=200)))
@example("some total=" + "9" * 5000)
@example("M: " + "9" * 5000 + " kB")
@example(") " + "1 " * 40)
@example("٣ ٣")
def test_no_text_makes_a_parser_raise(text: str) -> None:
    """Every parser answers every text, with numbers that fit in 64 bits if with any."""
    for parser in PARSERS:
        parser(text)
    place(text, text)
    found = [*parse.sizes(text).values(), *parse.counts(text).values(), *parse.pressure(text).values(),
             parse.number(text) or 0]
    assert all(0 <= value < 10**20 * 1024 for value in found)


@given(ANYTHING, st.lists(WHOLE, min_size=5, max_size=5),
       st.lists(st.integers(-(2**63), 2**63), min_size=40, max_size=40))
@example("a) S 1 2 (b) R", [1, 2, 3, 4, 5], [0] * 40)
def test_a_process_of_any_name_is_read(name: str, wanted: list[int], others: list[int]) -> None:
    """The five figures stand at places 10, 12, 14, 15 and 20 of proc(5), whatever the process is called."""
    fields = {place: str(value) for place, value in enumerate(others, start=1)}
    fields |= {1: "4242", 2: f"({name})", 3: "S"}
    fields |= {place: str(value) for place, value in zip((10, 12, 14, 15, 20), wanted, strict=True)}
    text = " ".join(fields[place] for place in range(1, 41))
    assert parse.stat(text) == parse.ProcessStat(*wanted)
    assert parse.stat(text.rpartition(")")[0] + ") " + " ".join(["S", *(["1"] * 16)])) is None  # one field too short


@given(st.dictionaries(NAMES, WHOLE, max_size=20), st.one_of(st.none(), st.integers(0, 999)), st.integers(1, 12))
def test_sizes_come_back_in_bytes(written: dict[str, int], node: int | None, width: int) -> None:
    """Lines as meminfo, a node's meminfo and smaps_rollup have them; counts without kB among them are left out."""
    prefix = "" if node is None else f"Node {node} "
    lines = [f"{prefix}{name}: {' ' * width}{value} kB" for name, value in written.items()]
    lines += [f"{prefix}HugePages_Total:       9", "5500-7fff ---p 00000000 00:00 0      [rollup]"]
    assert parse.sizes("\n".join(lines) + "\n") == {name: value * 1024 for name, value in written.items()}


@given(st.dictionaries(NAMES, WHOLE, max_size=20))
def test_counts_come_back(written: dict[str, int]) -> None:
    """Lines as numastat and memory.events have them."""
    assert parse.counts("".join(f"{name} {value}\n" for name, value in written.items())) == written


@given(st.dictionaries(st.sampled_from(["some", "full"]), WHOLE), st.floats(0, 100))
def test_pressure_comes_back(written: dict[str, int], average: float) -> None:
    """The totals, not the averages before them."""
    text = "".join(f"{kind} avg10={average:.2f} avg60={average:.2f} avg300=0.00 total={total}\n"
                   for kind, total in written.items())
    assert parse.pressure(text) == written


@given(WHOLE, WHOLE, st.lists(WHOLE, max_size=5))
def test_pages_come_back(virtual: int, resident: int, others: list[int]) -> None:
    """The first two figures of statm, however many follow; one alone is none."""
    assert parse.pages(" ".join(map(str, [virtual, resident, *others])) + "\n") == (virtual, resident)
    assert parse.pages(f"{virtual}\n") is None


@given(st.permutations(["always", "madvise", "never"]), st.integers(0, 2))
def test_the_word_in_brackets_is_chosen(words: list[str], at: int) -> None:
    """One word in brackets is the answer, none or two are no answer."""
    marked = [f"[{word}]" if place == at else word for place, word in enumerate(words)]
    assert parse.chosen(" ".join(marked) + "\n") == words[at]
    assert parse.chosen(" ".join(words)) is None
    assert parse.chosen(" ".join(f"[{word}]" for word in words)) is None


@given(st.integers(2, 40))
def test_page_sizes_are_written_in_the_largest_unit(exponent: int) -> None:
    """The label, read as a number and a unit, is the size of the directory's name, with a number below 1,024."""
    label = parse.page_size(f"hugepages-{2**exponent}kB")
    assert label is not None
    value, unit = int(label[:-3]), label[-3:]
    assert value * {"KiB": 1, "MiB": 2**10, "GiB": 2**20}[unit] == 2**exponent
    assert value < 1024 or unit == "GiB"


def _escaped(path: str) -> str:
    return "".join(f"\\{ord(char):03o}" if char in " \t\n\\" else char for char in path)


@given(st.lists(PARTS, max_size=4), st.lists(PARTS, max_size=4), st.lists(PARTS, min_size=1, max_size=3), st.booleans())
def test_a_group_is_found_below_its_mount(above: list[str], below: list[str], point: list[str], memory: bool) -> None:
    """Of the group /above/below, with /above mounted at a point, the directory is point/below."""
    group, root, at = ("/" + "/".join(parts) for parts in ([*above, *below], above, point))
    kind, line = ("cgroup cgroup rw,memory", "4:memory:") if memory else ("cgroup2 none rw", "0::")
    mountinfo = ("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
                 f"30 22 0:26 {_escaped(root)} {_escaped(at)} rw shared:9 - {kind}\n")
    found = place(f"9:name=systemd:/x\n{line}{group}\n", mountinfo)
    assert found is not None
    assert found.directory == "/".join([at, *below])
    assert found.version == (1 if memory else 2)
    assert found.above == len(below)
    assert place(f"{line}/{'x' * 20}{group}\n", mountinfo) is None or not above
