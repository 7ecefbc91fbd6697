"""Names, labels and groupings of PromQL, read by a small scanner that knows nothing of how kvobs writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvobs.catalog import ROWS, Row

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[A-Za-z_:][\w:]*|[0-9][0-9.]*(?:e-?[0-9]+)?[smhdwy]?|[{}(),]'
                    r"|=~|!~|!=|==|>=|<=|[-+*/%^<>=]|\s+")
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "bool", "offset", "sum", "max", "min", "group", "count", "histogram_quantile",
          "quantile_over_time", "count_over_time", "sum_over_time", "last_over_time", "max_over_time", "increase",
          "rate", "absent", "clamp_min", "predict_linear"}


class Selector(NamedTuple):
    """A metric name with the labels that its matchers name."""

    name: str
    labels: frozenset[str]


class Read(NamedTuple):
    selectors: tuple[Selector, ...]
    grouping: frozenset[str]  # labels of by, on, group_left ...


def tokens(text: str) -> Iterator[str]:
    """The tokens, without white space.

    Raises:
        ValueError: something is no token.
    """
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"{text[at:at + 20]!r} is no PromQL.")
        at = found.end()
        if found[0].strip():
            yield found[0]


def _until(words: list[str], start: int, end: str) -> tuple[list[str], int]:
    stop = words.index(end, start)
    return words[start:stop], stop + 1


def read(text: str) -> Read:
    """What an expression names."""
    words, selectors, grouping = list(tokens(text)), list[Selector](), set[str]()
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word in _GROUPING:
            if words[at] == "(":
                inside, at = _until(words, at + 1, ")")
                grouping |= set(inside) - {","}
        elif re.match(r"[A-Za-z_:]", word) and word not in _WORDS:
            labels: list[str] = []
            if at < len(words) and words[at] == "{":
                inside, at = _until(words, at + 1, "}")
                labels = [inside[index - 1] for index, one in enumerate(inside) if one in ("=", "!=", "=~", "!~")]
            selectors.append(Selector(word, frozenset(labels)))
    return Read(tuple(selectors), frozenset(grouping))


def _translated(row: Row) -> str:
    """The Prometheus name by OpenTelemetry's translation rules, written down here a second time."""
    unit = {"s": "_seconds", "By": "_bytes", "W": "_watts", "J": "_joules", "Cel": "_celsius", "s2": "_s2",
            "1": "_ratio" if row.kind == "gauge" else ""}.get(row.unit, "")
    name = row.name.replace(".", "_")
    return name + ("" if name.endswith(unit) else unit) + ("_total" if row.kind == "counter" else "")


def exported() -> dict[str, frozenset[str]]:
    """The series that the catalog gives, with their labels."""
    found = {"up": frozenset({"job", "instance"})}
    for row in ROWS:
        labels = frozenset({"job", "instance", *(key.replace(".", "_") for key in row.attributes)})
        if row.kind == "histogram":
            found |= {_translated(row) + "_bucket": labels | {"le"}, _translated(row) + "_count": labels,
                      _translated(row) + "_sum": labels}
        else:
            found[_translated(row)] = labels
    return found


def unknown(expression: str, series: Mapping[str, frozenset[str]]) -> list[str]:
    """Names and labels of an expression that no series has."""
    seen = read(expression)
    names = [selector.name for selector in seen.selectors if selector.name not in series]
    there = frozenset[str]().union(*(series.get(selector.name, ()) for selector in seen.selectors))
    return names + [f"{selector.name}.{label}" for selector in seen.selectors
                    for label in sorted(selector.labels - series.get(selector.name, frozenset()))] + [
                        f"by {label}" for label in sorted(seen.grouping - there)]
