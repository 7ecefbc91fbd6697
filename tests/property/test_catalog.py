"""Prometheus names of any row that could ever be added."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from kvobs.catalog import Row, prometheus_name

SUFFIX = {"s": "_seconds", "By": "_bytes", "s2": "_s2"}
WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True) | st.sampled_from(["seconds", "bytes", "ratio", "total"])
NAMES = st.lists(WORDS, min_size=1, max_size=4).map(lambda words: "kvobs." + ".".join(words))


@given(NAMES, st.sampled_from(["counter", "gauge", "histogram"]), st.sampled_from(["s", "By", "1", "s2", "{thing}"]))
def test_names_translate_by_the_rules(name: str, kind: str, unit: str) -> None:
    """Dots become underscores, the unit is spelled out once, a unitless gauge ends _ratio and a counter _total."""
    row = Row(name=name, kind=kind, unit=unit, attributes=(), meaning="m", formula="f")
    base = re.sub(r"\.", "_", name)
    unit_suffix = SUFFIX.get(unit, "_ratio" if unit == "1" and kind == "gauge" else "")
    if base.endswith(unit_suffix):
        unit_suffix = ""
    expected = base + unit_suffix
    if kind == "counter" and not expected.endswith("_total"):
        expected += "_total"
    assert prometheus_name(row) == expected
