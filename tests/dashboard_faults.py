"""What a board may not say of a metric, over its JSON and the catalog's rows, without the code that made the board."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvobs.catalog import ROWS, Row, prometheus_label, prometheus_name
from kvobs.slo import ALERTS, window_text
from tests.dashboard_lint import expressions, variables
from tests.promql import Node, parse

# Prometheus's own, which the catalog does not have.
OWN = {"up", "scrape_duration_seconds", "scrape_samples_scraped"}
EVERY = {"job", "instance"}
SUMS = ("sum", "avg")
# Functions that keep what kind of value a series has, as far as adding it up is concerned.
KEEP = ("rate", "increase", "irate", "max_over_time")


# Values that the catalog leaves to another list: the windows of burn rates.
WORDS = {"window": {window_text(seconds) for alert in ALERTS for seconds in (alert.short_s, alert.long_s)}}


def _samples() -> dict[str, tuple[Row, set[str]]]:
    found: dict[str, tuple[Row, set[str]]] = {}
    for row in ROWS:
        labels = EVERY | {prometheus_label(one) for one in row.attributes}
        if row.kind == "histogram":
            found[f"{prometheus_name(row)}_bucket"] = row, labels | {"le"}
            found |= {f"{prometheus_name(row)}{suffix}": (row, labels) for suffix in ("_sum", "_count")}
        else:
            found[prometheus_name(row)] = row, labels
    return found


SAMPLES = _samples()


def metrics_of(board: dict[str, Any]) -> set[str]:
    """The OpenTelemetry names of all rows that the board's expressions read; unknown names are left out."""
    return {SAMPLES[one.name][0].name for _, text in expressions(board) for one, _ in parse(text).series()
            if one.name in SAMPLES}


def faults(board: dict[str, Any]) -> list[str]:
    """Unknown names and labels, sums and means that the catalog forbids, and denominators that may be 0."""
    found = [f"{place}: {fault}" for place, text in expressions(board) for fault in _faults(parse(text))]
    for name, one in variables(board).items():
        if one["type"] == "query":
            asked, label = one["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
            found += [f"variable {name}: {fault}" for fault in _asked(parse(asked), label)]
    return found


def _asked(selector: Node, label: str) -> Iterator[str]:
    names = [selector.name] if selector.name else [
        one for key, operator, value in selector.matchers if (key, operator) == ("__name__", "=~")
        for one in value.split("|")]
    for name in names:
        if name not in OWN and name not in SAMPLES:
            yield f"{name} is no metric of the catalog"
        elif label not in EVERY and label not in SAMPLES[name][1]:
            yield f"{name} has no label {label}"


def _faults(tree: Node) -> Iterator[str]:
    for one, above in tree.walk():
        if one.kind == "series":
            yield from _series(one, above)
        elif one.kind == "aggregation" and one.name in SUMS and _is_ratio(one.parts[-1]):
            yield f"{one.name} over a share: shares are not added up"
        elif one.kind == "binary" and one.name in ("/", "%") and not _guarded(one.parts[1]):
            yield "a denominator may be 0"


def _series(one: Node, above: tuple[Node, ...]) -> Iterator[str]:
    if one.name in OWN:
        return
    if one.name not in SAMPLES:
        yield f"{one.name} is no metric of the catalog"
        return
    row, labels = SAMPLES[one.name]
    yield from (f"{one.name} has no label {label}" for label, _, _ in one.matchers if label not in labels)
    for label, operator, value in one.matchers:
        if label in EVERY or label == "le" or value.startswith("$") or operator not in ("=", "=~"):
            continue
        yield from (f"the catalog does not say that {label} of {one.name} may be {word}" for word in value.split("|")
                    if word not in WORDS.get(label, set()) and not re.search(rf"\b{word}\b", row.meaning + row.formula))
    around = [node for node in reversed(above) if node.kind == "aggregation"]
    for node in around[:1]:
        yield from (f"{one.name} has no label {label}" for label in node.labels if label not in labels)
    nearest = next((node for node in reversed(above) if node.kind != "call" or node.name not in KEEP), None)
    if nearest is None or nearest.kind != "aggregation":
        if not (above and above[-1].name == "changes"):
            yield f"{one.name} is not aggregated"
        return
    forbidden = row.across_ranks != "sum" or (row.unit == "1" and row.kind == "gauge")
    if nearest.name in SUMS and forbidden:
        yield f"{nearest.name} over {one.name}, of which the catalog allows the {row.across_ranks}"
    if row.kind == "gauge" and nearest.name in ("min", "max") and nearest.name != row.across_ranks:
        yield f"{nearest.name} over {one.name}, of which the catalog allows the {row.across_ranks}"
    if nearest.name == "avg":
        yield f"{one.name} is averaged over series"
    if row.nature == "scraped" and "target" not in nearest.labels:
        yield f"{one.name} is added up over targets"


def _is_ratio(node: Node) -> bool:
    return (node.kind == "binary" and node.name == "/") or (
        node.kind in ("aggregation", "call") and any(map(_is_ratio, node.parts))) or (
        node.kind == "binary" and not node.boolean and any(map(_is_ratio, node.parts)))


def _guarded(node: Node) -> bool:
    if node.kind == "number":
        return float(node.name) != 0
    return node.kind == "binary" and node.name == ">" and not node.boolean and node.parts[1] == Node("number", "0")
