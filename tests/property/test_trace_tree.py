"""Arbitrary spans as a tree: missing parents, cycles, several roots, equal ids, unknown and skewed times."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvobs.cli._output import plain
from kvobs.cli.traces import Event, Span, Trace, document, folded, line, rows

ids = st.sampled_from(["", *(f"{number:016x}" for number in range(1, 12))])
times = st.none() | st.integers(0, 40) | st.integers(0, 2**64 - 1)
FIRST = 0x4E00  # a letter of its own for each span, two cells wide


@st.composite
def some_spans(draw: st.DrawFn) -> tuple[Span, ...]:
    return tuple(Span(name=chr(FIRST + at), span_id=draw(ids), parent_id=draw(ids), start_ns=draw(times),
                      end_ns=draw(times)) for at in range(draw(st.integers(0, 14))))


def of(*spans: Span) -> Trace:
    return Trace(trace_id="ab" * 16, source="a test", spans=tuple(spans))


CYCLE = (Span(name=chr(FIRST), span_id="1", parent_id="3"), Span(name=chr(FIRST + 1), span_id="2", parent_id="1"),
         Span(name=chr(FIRST + 2), span_id="3", parent_id="2"), Span(name=chr(FIRST + 3), span_id="4", parent_id="4"))


@given(some_spans())
@example(CYCLE)
def test_every_span_is_printed_once(spans: tuple[Span, ...]) -> None:
    """Each span has one line, with its letter once, in the text as in the JSON."""
    wanted = [span.name for span in spans]
    shown = [row.label for row in rows(of(*spans))]
    assert sorted(label[0] for label in shown) == wanted
    assert Counter(letter for label in shown for letter in label if ord(letter) >= FIRST) == Counter(wanted)
    assert sorted(one["name"] for one in document(of(*spans))["spans"]) == wanted  # type: ignore[attr-defined]


@given(some_spans())
@example(CYCLE)
def test_parents_stand_before_their_children(spans: tuple[Span, ...]) -> None:
    """A place named as the parent is earlier, one level up and has the id that the span names; who has none says why.

    Whoever names a parent that is here, and is no ancestor of itself, has it.
    """
    by_id: dict[str, str] = {}
    for span in spans:
        if span.span_id:
            by_id.setdefault(span.span_id, span.name)
    parent_of = {span.name: by_id.get(span.parent_id) for span in spans}
    told = document(of(*spans))["spans"]
    assert isinstance(told, list)
    for place, one in enumerate(told):
        ancestors: set[str] = set()
        above = parent_of[one["name"]]
        while above is not None and above not in ancestors:
            ancestors.add(above)
            above = parent_of[above]
        if one["parent"] is not None:
            assert one["parent"] < place
            assert told[one["parent"]]["depth"] == one["depth"] - 1
            assert told[one["parent"]]["name"] == parent_of[one["name"]]
        elif one["name"] in ancestors:
            assert one["note"] == "it is its own ancestor"
        else:
            assert parent_of[one["name"]] is None
            assert one["note"] == (f"its parent {one['parent_span_id']} is not here" if one["parent_span_id"] else None)
    roots = [one["name"] for one in told if one["parent"] is None]
    assert len(told) == len(spans)
    assert bool(roots) == bool(spans)


@given(some_spans())
def test_siblings_stand_in_the_order_of_their_beginnings(spans: tuple[Span, ...]) -> None:
    """Of one parent the child that begins first comes first; unknown beginnings come last."""
    told = document(of(*spans))["spans"]
    assert isinstance(told, list)
    for parent in {one["parent"] for one in told}:
        starts = [one["start_ns"] for one in told if one["parent"] == parent]
        known = [start for start in starts if start is not None]
        assert starts == sorted(known) + [None] * (len(starts) - len(known))


@given(some_spans(), st.integers(1, 120))
@example(tuple(Span(name=chr(FIRST + at), span_id=f"{at + 1:x}", parent_id=f"{at:x}") for at in range(60)), 20)
def test_narrow_terminals_lose_nothing(spans: tuple[Span, ...], width: int) -> None:
    """No line is wider than the terminal (of 16 cells or more), and every letter is there once."""
    lines = [found for row in rows(of(*spans)) for found in folded(row, width)]
    assert all(cell_len(guide + text) <= max(width, 16) for guide, text in lines)
    assert Counter(letter for _, text in lines for letter in text if ord(letter) >= FIRST) == Counter(
        span.name for span in spans)


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=20), st.integers(16, 90))
def test_nothing_in_a_name_acts_on_the_terminal(name: str, value: str, service: str, width: int) -> None:
    """Names, keys and values of any text become one printable line each, and folded ones the same text."""
    hostile = Span(name=name, service=service, error=value, attributes={name: value},
                   events=(Event(5, name, {value: name}),), start_ns=1, end_ns=9)
    for row in rows(of(hostile), attributes=True):
        assert line(row).isprintable()
        pieces = list(folded(row, width))
        assert all(guide.isprintable() and text.isprintable() for guide, text in pieces)
        label = "".join(text for _, text in pieces)
        assert label == plain(row.label) or label.startswith(plain(row.label) + " (")
        assert plain(row.label).rstrip() in line(row)


def test_a_deep_trace_is_printed_in_a_width_that_stays() -> None:
    """A chain of 20,000 spans is 20,000 lines, none longer than 200 characters."""
    chain = [Span(name=f"s{at}", span_id=f"{at + 1:x}", parent_id=f"{at:x}" if at else "") for at in range(20_000)]
    found = [line(row) for row in rows(of(*chain))]
    assert len(found) == 20_000
    assert max(map(len, found)) <= 200
    assert "[19999] └─ s19999" in found[-1]
