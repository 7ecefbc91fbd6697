"""Reading exposition text: what is well formed, what is dropped and counted, and how much is held."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator

import pytest

from kvobs.bridge._exposition import MAX_LINE_BYTES, MAX_SAMPLES, Exposition, lines, parse


def read(text: str | bytes, wanted: str = "") -> Exposition:
    body = text.encode() if isinstance(text, str) else text
    return parse([body], lambda name: name.startswith(wanted))


WELL_FORMED = {
    "m 1\n": ((), 1.0),
    "m\t1e3\n": ((), 1000.0),
    "m{} -0.5\n": ((), -0.5),
    "m{a=\"b\"} 2\n": ((("a", "b"),), 2.0),
    "m{a=\"b\",} 2\n": ((("a", "b"),), 2.0),
    "m { b = \"2\" , a = \"1\" } 3 1700000000000\n": ((("a", "1"), ("b", "2")), 3.0),
    "m{a=\"}\"} 4 # {trace_id=\"x\"} 1 2\n": ((("a", "}"),), 4.0),
    "m{a=\"q\\\"\\\\\\n\"} 5\n": ((("a", "q\"\\\n"),), 5.0),
    "m{a=\"{,# \"} .5\r\n": ((("a", "{,# "),), 0.5),
}


@pytest.mark.parametrize("line", WELL_FORMED)
def test_a_well_formed_line_is_one_sample(line: str) -> None:
    """Labels come sorted and unescaped, the value exactly; timestamps and exemplars are read over."""
    found = read(line)
    assert [(sample.name, sample.labels, sample.value) for sample in found.samples] == [("m", *WELL_FORMED[line])]
    assert found.dropped == {}


@pytest.mark.parametrize("line", [
    "m\n", "m{a=\"b\"}\n", "m{a=\"b\" 1\n", "m{a=b} 1\n", "m{a=\"b\"c=\"d\"} 1\n", "m{,} 1\n", "m{a=\"b\",,} 1\n",
    "m{a=\"b\",a=\"c\"} 1\n", "m 1_000\n", "m 0x10\n", "m one\n", "m 1 2 3\n", "{m=\"a\"} 1\n", "1m 1\n", "m-1 2\n",
    "<html>\n", f"m {'1' * 60_000}x\n", "m{a=\"\xe9\"} 1\n".encode("latin-1").decode("utf-8", "surrogateescape"),
])
def test_a_malformed_line_is_dropped_and_counted(line: str) -> None:
    """What the format does not allow gives no sample and one count, and the next line is read."""
    found = read(line.encode("utf-8", "surrogateescape") + b"m2 7\n")
    assert [(sample.name, sample.value) for sample in found.samples] == [("m2", 7.0)]
    assert found.dropped == {"malformed": 1}


@pytest.mark.parametrize("value", ["NaN", "nan", "+Inf", "-Inf", "Inf", "1e999"])
def test_what_is_not_finite_is_dropped_and_counted(value: str) -> None:
    """NaN and infinities are no values: they are counted, and other samples stay."""
    found = read(f"m {value}\nn 1\n")
    assert [sample.name for sample in found.samples] == ["n"]
    assert found.dropped == {"not_finite": 1}


def test_of_a_duplicated_series_the_first_counts() -> None:
    """The same name and labels again, in another order or not, are dropped and counted."""
    found = read('m{a="1",b="2"} 1\nm{b="2",a="1"} 9\nm{a="1"} 3\n')
    assert [sample.value for sample in found.samples] == [1.0, 3.0]
    assert found.dropped == {"duplicate": 1}


def test_what_is_not_wanted_is_counted_and_not_read() -> None:
    """Unknown metrics are ignored, even where the rest of their line is nonsense."""
    found = read("other{ nonsense\nm 1\nother 2\n# HELP m x\n\n", wanted="m")
    assert len(found.samples) == 1
    assert (found.ignored, found.dropped) == (2, {})


def test_a_line_that_was_cut_off_is_no_sample() -> None:
    """A last line without its end may lack digits: it is dropped, and the page is known not to be whole."""
    found = read("m 1\nn 12")
    assert [sample.name for sample in found.samples] == ["m"]
    assert (found.dropped, found.whole) == ({"malformed": 1}, False)
    assert read("m 1\n").whole


@pytest.mark.parametrize(("text", "eof"), [("m 1\n# EOF\n", True), ("m 1\n", False), ("# EOF\nm 1\n", False),
                                           ("m 1\n# EOF", False), ("m 1\n# EOF\n\n", False)])
def test_the_end_of_openmetrics_is_its_last_line(text: str, eof: bool) -> None:
    """``# EOF`` ends a page only as its last whole line."""
    assert read(text).eof is eof


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunks_may_end_anywhere(size: int) -> None:
    """The lines do not depend on how the body was cut into chunks."""
    body = b'm{a="\xc3\xa9"} 1\n\nn 2\r\n# EOF\n'
    parts = [body[at:at + size] for at in range(0, len(body), size)]
    assert parse(parts, bool) == parse([body], bool)


def test_an_overlong_line_is_one_drop() -> None:
    """A line of megabytes is never held whole, counts once, and the line behind it is read."""
    def chunks() -> Iterator[bytes]:
        yield b'm{a="'
        for _ in range(256):
            yield b"x" * 65_536
        yield b'"} 1\nn 2\n'

    tracemalloc.start()
    try:
        found = parse(chunks(), bool)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [sample.name for sample in found.samples] == ["n"]
    assert found.dropped == {"malformed": 1}
    assert found.whole
    assert peak < 4 * 1024**2


def test_the_longest_allowed_line_is_read() -> None:
    """A line of exactly the bound is a sample, one of a byte more is dropped."""
    label = "x" * (MAX_LINE_BYTES - len('m{a=""} 1'))
    assert len(read(f'm{{a="{label}"}} 1\n').samples) == 1
    assert read(f'm{{a="{label}x"}} 1\n').dropped == {"malformed": 1}
    assert not next(iter(lines([b"x" * (MAX_LINE_BYTES + 1)])))[0].endswith(b"\n")


def test_a_million_series_are_bounded_and_counted() -> None:
    """Of a million wanted series the first are kept and each other one is counted; nothing else is held."""
    held = 0

    def chunks() -> Iterator[bytes]:
        nonlocal held
        for block in range(100):
            yield b"".join([b'm{i="%d"} 1\n' % at for at in range(block * 10_000, (block + 1) * 10_000)])
            held = max(held, sys.getallocatedblocks())

    before = sys.getallocatedblocks()
    found = parse(chunks(), lambda name: name == "m")
    assert len(found.samples) == MAX_SAMPLES
    assert found.dropped == {"bound": 1_000_000 - MAX_SAMPLES}
    assert [sample.labels for sample in found.samples[-1:]] == [(("i", str(MAX_SAMPLES - 1)),)]
    assert held - before < 20 * MAX_SAMPLES


def test_binary_is_counted_line_by_line() -> None:
    """A page of random bytes gives no sample and raises nothing."""
    found = read(bytes(range(256)) * 64)
    assert found.samples == ()
    assert set(found.dropped) <= {"malformed"}
