"""The mapping table: what a file may say, what is refused with one sentence, and how rules apply."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from kvobs.bridge import TableError, Translator, built_in, with_file
from kvobs.bridge._exposition import parse
from kvobs.bridge._mapping import Mapped
from kvobs.bridge._table import UNITS, canonical, rules
from kvobs.catalog import BY_NAME

ROWS = '[[engine]]\nname = "mine"\nsource = "a test"\nranks = {{ dp = "rank" }}\nrows = [ {} ]\n'
RUNNING = '{ row = "kvobs.engine.requests", names = ["run"], attributes = { state = "running" } }'


def table(*rows: str) -> str:
    return "version = 1\n" + ROWS.format(", ".join(rows))


def means(text: str, page: str) -> Mapped:
    translator = Translator(rules(text, "t"))
    return translator.translate(parse([page.encode()], translator.knows).samples, "t:1")


def values(found: Mapped) -> dict[tuple[str, ...], float]:
    return {(name, *attributes): value for name, attributes, value in found.readings}


@pytest.mark.parametrize(("text", "complaint"), [
    ("version = ", "is not one"),
    ("version = 1\n", "is not one"),
    ("version = 2\nengine = []\n", "has version 2; this kvobs reads version 1"),
    (table("{ row = 'nothing', names = ['a'] }"), "Row 1 of engine 'mine' in t names 'nothing'"),
    (table("{ row = 'kvobs.kv.usage', names = ['a'] }"), "no scraped row"),
    (table("{ row = 'kvobs.engine.preemptions', names = [] }"), "needs names"),
    (table("{ row = 'kvobs.engine.preemptions', names = ['a b'] }"), "needs names"),
    (table("{ row = 'kvobs.engine.requests', names = ['a'] }"), "each of these attributes once: state"),
    (table("{ row = 'kvobs.engine.preemptions', names = ['a'], labels = { x = 'y' } }"), "attributes once: none"),
    (table("{ row = 'kvobs.engine.preemptions', names = ['a'], unit = 'ms' }"), "has the unit 'ms'"),
    (table("{ histogram = ['a'], attributes = {} }"), "maps a histogram"),
    (table("{ row = 'kvobs.engine.preemptions', nmaes = ['a'] }"), "unknown field `nmaes`"),
])
def test_a_table_that_is_wrong_is_refused_in_one_sentence(text: str, complaint: str) -> None:
    """The sentence names the table, the row and what is wrong with it."""
    with pytest.raises(TableError) as caught:
        rules(text, "t")
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(("The mapping table t ", "Row 1 of engine 'mine' in t "))
    assert str(caught.value).endswith(".")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A missing file and one that is not text are one sentence each."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "binary"):
        with pytest.raises(TableError, match=r"^The mapping table .* cannot be read \(.*\)\.$"):
            with_file(tmp_path / name)


def test_a_file_goes_before_the_built_in_table(tmp_path: Path) -> None:
    """A file's row for a metric that kvobs knows wins, and every other built-in row stays."""
    path = tmp_path / "mine.toml"
    path.write_text(table('{ row = "kvobs.engine.preemptions", names = ["vllm:num_preemptions_total"] }'))
    found = with_file(path)
    assert [rule.engine.name for rule in found[:1]] == ["mine"]
    assert found[1:] == built_in()


@pytest.mark.parametrize(("unit", "row", "given", "expected"), [
    ("ms", "kvobs.engine.migration.duration", "0.1", Fraction("0.0001")),
    ("ms", "kvobs.engine.migration.duration", "7", Fraction("0.007")),
    ("MiB", "kvobs.engine.migration.io", "1.5", Fraction(1_572_864)),
    ("GiB", "kvobs.engine.kv.usage", "2", Fraction(2_147_483_648)),
    ("percent", "kvobs.engine.kv.utilization", "87", Fraction("0.87")),
])
def test_units_become_the_catalog_s_exactly(unit: str, row: str, given: str, expected: Fraction) -> None:
    """The value is the number nearest to the exact quotient, as Python writes that decimal fraction."""
    attributes = {name: "x" for name in BY_NAME[row].attributes if name not in ("engine", "target", "model", "ranks")}
    shown = ", ".join(f'{name} = "{text}"' for name, text in attributes.items())
    mapped = means(table(f'{{ row = "{row}", names = ["m"], unit = "{unit}", attributes = {{ {shown} }} }}'),
                   f"m {given}\n")
    assert [value for _, _, value in mapped.readings] == [float(expected)]
    assert unit in UNITS


def test_names_of_several_versions_count_once() -> None:
    """Of a metric that is sent under its old and its new name, the name that the table says first is used."""
    text = table('{ row = "kvobs.engine.preemptions", names = ["new_total", "old_total"] }')
    assert list(values(means(text, "old_total 3\nnew_total 4\n")).values()) == [4.0]
    assert list(values(means(text, "old_total 3\n")).values()) == [3.0]


def test_two_spellings_of_one_name_count_once() -> None:
    """Ray's and OpenTelemetry's spellings are the same metric; sent twice, it is not added up."""
    assert {canonical(name) for name in ("vllm:a_b", "vllm_a_b", "ray_vllm_a_b", "ray_vllm:a_b")} == {"vllm_a_b"}
    text = table('{ row = "kvobs.engine.preemptions", names = ["x:n_total"] }')
    assert list(values(means(text, "x:n_total 3\nray_x_n_total 3\n")).values()) == [3.0]


def test_labels_that_mean_nothing_are_added_up_only_where_sums_are_allowed() -> None:
    """Counts over a tenant label add up; of two shares neither is chosen, and both are counted as ambiguous."""
    text = table('{ row = "kvobs.engine.preemptions", names = ["n_total"] }',
                 '{ row = "kvobs.engine.kv.utilization", names = ["share"], attributes = { pool = "device" } }')
    found = means(text, 'n_total{tenant="a"} 1\nn_total{tenant="b"} 2\nshare{tenant="a"} 0.25\nshare{tenant="b"} 0.5\n')
    assert values(found) == {("kvobs.engine.preemptions", "mine", "t:1", "", ""): 3.0}
    assert found.dropped == {"ambiguous": 2}


def test_ranks_stay_apart() -> None:
    """Two ranks are two points, also of a share, and a rank that is not told is an empty attribute."""
    text = table('{ row = "kvobs.engine.kv.utilization", names = ["share"], attributes = { pool = "device" } }')
    found = means(text, 'share{rank="0"} 0.25\nshare{rank="1"} 0.5\nshare 0.75\n')
    name = "kvobs.engine.kv.utilization"
    assert values(found) == {(name, "mine", "t:1", "", "dp=0", "device"): 0.25,
                             (name, "mine", "t:1", "", "dp=1", "device"): 0.5,
                             (name, "mine", "t:1", "", "", "device"): 0.75}


def test_impossible_values_are_dropped_and_counted() -> None:
    """A negative count, a sum beyond all numbers and a label of kilobytes are no readings."""
    text = table(RUNNING, '{ row = "kvobs.engine.migration.io", names = ["io"], unit = "MiB", '
                          'attributes = { path = "p", direction = "d" } }')
    assert means(text, "run -1\n").dropped == {"negative": 1}
    assert means(text, "io 1e308\n").dropped == {"not_finite": 1}
    assert means(text, 'run{a="1"} 1e308\nrun{a="2"} 1e308\n').dropped == {"not_finite": 2}
    long = means(text, f'run{{model_name="{"m" * 129}"}} 1\n')
    assert (long.readings, long.dropped) == ((), {"bound": 1})


def test_every_built_in_row_says_its_source() -> None:
    """Each engine's rows name where the metric's name and meaning were read, with a version."""
    assert all(any(letter.isdigit() for letter in rule.engine.source) for rule in built_in())
    assert {rule.engine.name for rule in built_in()} == {"vllm", "sglang", "lmcache", "tgi", "llama.cpp"}
