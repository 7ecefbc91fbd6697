"""The exposition reader against prometheus_client's parser on generated pages; the whole path on arbitrary bytes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.bridge import Translator, built_in
from kvobs.bridge._exposition import parse
from kvobs.catalog import BY_NAME

client = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed.")
TRANSLATOR = Translator(built_in())
KNOWN = sorted({name for rule in built_in() for name in rule.mapping.names})
DROPS = {"not_finite", "malformed", "duplicate", "bound", "negative", "ambiguous"}

letters = "aZ_09"
names = st.builds("{}{}".format, st.sampled_from("aZ_:"), st.text(letters + ":", max_size=6))
# Not those that begin with __, which are reserved.
keys = st.builds("{}{}".format, st.sampled_from(["a", "Z", "_a"]), st.text(letters, max_size=3))
values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=6)
labels = st.dictionaries(keys, values, max_size=3)
numbers = st.one_of(st.floats(allow_nan=True), st.integers(-10**6, 10**20))
samples = st.lists(st.tuples(names, labels, numbers), max_size=8)


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def line(name: str, own: dict[str, str], number: float) -> str:
    shown = ",".join(f'{key}="{escaped(value)}"' for key, value in own.items())
    return name + (f"{{{shown}}}" if own else "") + f" {number}\n"


@given(samples)
def test_generated_pages_read_as_prometheus_client_reads_them(given: list[tuple[str, dict[str, str], float]]) -> None:
    """Every finite sample of a well-formed page has the name, labels and value that the other parser finds."""
    page = "".join(line(*one) for one in given)
    ours = parse([page.encode()], bool)
    theirs = {}
    for family in client.text_string_to_metric_families(page):
        for sample in family.samples:
            if math.isfinite(sample.value):
                theirs.setdefault((sample.name, tuple(sorted(sample.labels.items()))), float(sample.value))
    finite = [one for one in given if math.isfinite(one[2])]
    assert {(sample.name, sample.labels): sample.value for sample in ours.samples} == theirs
    assert ours.dropped.get("not_finite", 0) == len(given) - len(finite)
    assert ours.dropped.get("duplicate", 0) == len(finite) - len(theirs)
    assert "malformed" not in ours.dropped


@given(samples, st.data())
def test_a_truncated_page_never_tells_more_than_the_whole(given: list[tuple[str, dict[str, str], float]],
                                                          data: st.DataObject) -> None:
    """Cut anywhere, a page gives a beginning of its samples and none that the whole page does not have."""
    page = "".join(line(*one) for one in given).encode()
    cut = page[:data.draw(st.integers(0, len(page)))]
    whole, part = parse([page], bool), parse([cut], bool)
    assert part.samples == whole.samples[:len(part.samples)]
    assert part.whole == (not cut or cut.endswith(b"\n"))


hostile = st.one_of(
    st.binary(max_size=60),
    st.text(st.sampled_from('vllm:num_{}",=\\ \t#0123.eNaInf-'), max_size=40).map(str.encode),
    st.tuples(st.sampled_from(KNOWN), labels, st.one_of(numbers, st.just(float("nan"))),
              st.integers(0, 3)).map(lambda one: (line(*one[:3]) * (1 + one[3])).encode()),
)


@given(st.lists(hostile, max_size=10), st.integers(1, 40))
def test_arbitrary_pages_give_catalog_readings_or_counted_drops(parts: list[bytes], size: int) -> None:
    """Whatever a page holds, in whatever chunks: no error, each reading fits its row, is finite and comes once."""
    page = b"\n".join(parts)
    found = parse([page[at:at + size] for at in range(0, len(page), size)], TRANSLATOR.knows)
    assert found == parse([page], TRANSLATOR.knows)
    mapped = TRANSLATOR.translate(found.samples, "t:1")
    assert len({reading[:2] for reading in mapped.readings}) == len(mapped.readings)
    for name, attributes, value in mapped.readings:
        row = BY_NAME[name]
        assert row.nature == "scraped"
        assert len(attributes) == len(row.attributes)
        assert math.isfinite(value)
        assert value >= 0
    assert set(found.dropped) | set(mapped.dropped) <= DROPS
    assert mapped.samples + mapped.ignored == len(found.samples)


@given(st.lists(st.tuples(st.sampled_from(KNOWN), st.integers(0, 9)), unique_by=lambda one: one[0], max_size=10),
       st.randoms())
def test_the_order_of_lines_does_not_matter(given: list[tuple[str, int]], random: object) -> None:
    """A page's readings are the same in any order of its lines."""
    shuffled = list(given)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def readings(lines: list[tuple[str, int]]) -> dict[tuple[str, tuple[str, ...]], float]:
        page = "".join(f'{name}{{engine="0"}} {number}\n' for name, number in lines).encode()
        return {reading[:2]: reading[2] for reading in
                TRANSLATOR.translate(parse([page], TRANSLATOR.knows).samples, "t").readings}

    assert readings(given) == readings(shuffled)
