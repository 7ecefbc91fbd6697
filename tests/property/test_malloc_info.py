"""The reader of malloc_info against arenas that are known chunk by chunk."""

from __future__ import annotations

from collections import defaultdict

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvobs.sources._malloc_info import MallocInfo, parse

FLAG = 1  # "the chunk before is in use": glibc prints a free chunk's size with it
CHUNK = st.integers(2, 1 << 20).map(lambda units: 16 * units)


class Arena(msgspec.Struct, frozen=True):
    """Free chunks of an arena by where they wait, its top, and the bytes it has of the system."""

    fast: list[int]
    bins: list[int]
    unsorted: list[int]
    top: int
    used: int

    def free(self) -> int:
        return sum(self.fast) + self.rest()

    def rest(self) -> int:
        """As glibc sums it up: flags of binned chunks included."""
        return self.top + sum(size + FLAG for size in self.bins + self.unsorted)


ARENAS = st.lists(st.builds(Arena, st.lists(st.integers(2, 8).map(lambda units: 16 * units), max_size=9),
                            st.lists(CHUNK, max_size=12), st.lists(CHUNK, max_size=4), CHUNK,
                            st.integers(0, 1 << 40)), min_size=1, max_size=4)


def totals(fast: int, rest: int) -> str:
    return f'<total type="fast" count="0" size="{fast}"/>\n<total type="rest" count="1" size="{rest}"/>\n'


def document(arenas: list[Arena], mapped: int) -> str:
    """What glibc 2.36 prints of such arenas; written from its recorded output."""
    text = '<malloc version="1">\n'
    for number, arena in enumerate(arenas):
        text += f'<heap nr="{number}">\n<sizes>\n'
        binned = defaultdict(list)
        for size in arena.fast:
            binned["fast", size].append(size)
        for size in arena.bins:
            binned["bin", size.bit_length()].append(size + FLAG)
        for sizes in binned.values():
            text += (f'  <size from="{min(sizes)}" to="{max(sizes)}" total="{sum(sizes)}" count="{len(sizes)}"/>\n')
        if arena.unsorted:
            waiting = [size + FLAG for size in arena.unsorted]
            text += (f'  <unsorted from="{min(waiting)}" to="{max(waiting)}" total="{sum(waiting)}" '
                     f'count="{len(waiting)}"/>\n')
        text += "</sizes>\n" + totals(sum(arena.fast), arena.rest())
        text += (f'<system type="current" size="{arena.used + arena.free()}"/>\n<aspace type="total" size="4096"/>\n'
                 '</heap>\n')
    text += totals(sum(sum(arena.fast) for arena in arenas), sum(arena.rest() for arena in arenas))
    text += f'<total type="mmap" count="2" size="{mapped}"/>\n'
    text += f'<system type="current" size="{sum(arena.used + arena.free() for arena in arenas)}"/>\n'
    return text + '<system type="max" size="9"/>\n<aspace type="total" size="9"/>\n</malloc>\n'


@given(ARENAS, st.integers(0, 1 << 40))
def test_known_arenas_are_read_back(arenas: list[Arena], mapped: int) -> None:
    """Totals equal the sums over the arenas, and the largest free chunk is the largest of all chunks and tops."""
    assert parse(document(arenas, mapped)) == MallocInfo(
        arenas=len(arenas), system_bytes=sum(arena.used + arena.free() for arena in arenas),
        free_bytes=sum(arena.free() for arena in arenas), mapped_bytes=mapped,
        largest_free_bytes=max(size for arena in arenas
                               for size in [*arena.fast, *arena.bins, *arena.unsorted, arena.top]))


@given(st.text())
def test_text_that_is_no_document_has_no_numbers(text: str) -> None:
    """Anything but a document of malloc_info is refused without raising."""
    assert parse(text) is None


@given(ARENAS, st.data())
def test_a_document_that_was_cut_has_no_numbers(arenas: list[Arena], data: st.DataObject) -> None:
    """A document that ends before its closing tag is refused: no total is taken from half of it."""
    whole = document(arenas, 0).rstrip()
    assert parse(whole[:data.draw(st.integers(0, len(whole) - 1))]) is None


@given(ARENAS, st.sampled_from(["size", "total", "type", "to"]), st.sampled_from(["", "-1", "x", "9" * 30, "٣"]))
def test_a_number_that_is_none_is_refused(arenas: list[Arena], attribute: str, wrong: str) -> None:
    """With an attribute that is no number, or no known kind, there are no numbers at all rather than wrong ones."""
    text = document([*arenas, Arena([], [32], [], 64, 0)], 0)
    head, found, tail = text.rpartition(f' {attribute}="')
    assert found
    if attribute == "type" or '<aspace' in head.rpartition("\n")[2] or 'type="max"' in head.rpartition("\n")[2]:
        head, found, tail = text.partition(f' {attribute}="')  # the last ones are not read
    assert parse(head + found + wrong + tail[tail.index('"'):]) is None


def test_more_in_the_bins_than_free_is_refused() -> None:
    """An arena whose bins hold more than all that is free contradicts itself, so nothing of it is told."""
    good = document([Arena([], [4096], [], 64, 0)], 0)
    assert parse(good) is not None
    assert parse(good.replace('total="4097"', 'total="9999"')) is None
