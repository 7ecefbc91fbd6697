"""Apply the mapping table to the samples of one answer: pure, and never more than the engine said.

Of several rules, names or spellings that would give the same point, the first one that the answer has gives it: a
renamed metric that is sent under both names counts once. Samples that differ only in labels the table does not name
(a streaming flag, a tenant) are added up where the catalog says that the row may be summed; where it may not (a share)
they are dropped, since any choice among them would be invented.

Where a settled engine's page names one model (one rank), samples that do not say theirs are of that one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from kvobs.bridge._exposition import NOT_FINITE, Sample
from kvobs.bridge._table import Rule, canonical
from kvobs.catalog import Row

MAX_VALUE = 128  # letters of a label's value: longer ones are no name of a model, a reason or a rank
NEGATIVE, AMBIGUOUS, LABEL = "negative", "ambiguous", "bound"

Reading = tuple[str, tuple[str, ...], float]
Point = tuple[str, tuple[str, ...]]
Only = dict[tuple[str, str], str]


class Mapped(msgspec.Struct, frozen=True):
    """The readings of an answer, how many samples gave them, how many none, and how many of which were dropped."""

    readings: tuple[Reading, ...]
    samples: int
    ignored: int
    dropped: dict[str, int]


class Translator:
    """A table, by the names that it knows."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._by_name: dict[str, list[tuple[tuple[int, int], Rule]]] = {}
        for order, rule in enumerate(rules):
            for at, name in enumerate(rule.names):
                self._by_name.setdefault(name, []).append(((order, at), rule))

    def knows(self, name: str) -> bool:
        """Whether samples of this name mean anything."""
        return canonical(name) in self._by_name

    def translate(self, samples: Iterable[Sample], target: str) -> Mapped:
        """What the samples of one answer of ``target`` mean."""
        found: dict[Point, dict[tuple[int, int, str], list[float]]] = {}
        rows: dict[Point, Row] = {}
        samples = tuple(samples)
        only = self._only(samples)
        used, ignored, dropped = 0, 0, Counter[str]()
        for sample in samples:
            labels, meant = dict(sample.labels), False
            for rank, rule in self._by_name[canonical(sample.name)]:
                if any(labels.get(label, "") != wanted for label, wanted in rule.where.items()):
                    continue
                value = _value(rule, labels, sample.value)
                if value is None:
                    continue
                meant = True
                attributes = _attributes(rule, labels, target, only)
                refusal = _refusal(rule, attributes, value)
                if refusal:
                    dropped[refusal] += 1
                else:
                    point = (rule.row.name, attributes)
                    rows[point] = rule.row
                    found.setdefault(point, {}).setdefault((*rank, sample.name), []).append(value)
            used, ignored = used + meant, ignored + (not meant)
        readings: list[Reading] = []
        for point, ways in found.items():
            values = ways[_first(ways)]
            if len(values) > 1 and rows[point].across_ranks != "sum":
                dropped[AMBIGUOUS] += len(values)
            elif math.isfinite(total := sum(values)):
                readings.append((*point, total))
            else:
                dropped[NOT_FINITE] += len(values)
        return Mapped(tuple(readings), used, ignored, dict(dropped))

    def _only(self, samples: Iterable[Sample]) -> Only:
        """By settled engine, the model and the ranks that a page names, where it names just one."""
        named: dict[tuple[str, str], set[str]] = {}
        for sample in samples:
            for _, rule in self._by_name[canonical(sample.name)]:
                if rule.engine.settled:
                    labels = dict(sample.labels)
                    for what, text in (("model", _model(rule, labels)), ("ranks", _ranks(rule, labels))):
                        if text:
                            named.setdefault((rule.engine.name, what), set()).add(text)
        return {key: next(iter(texts)) for key, texts in named.items() if len(texts) == 1}


def _first(ways: dict[tuple[int, int, str], list[float]]) -> tuple[int, int, str]:
    """The earliest rule and name; of two spellings of it the one that came first."""
    return min(ways, key=lambda way: way[:2])


def _value(rule: Rule, labels: dict[str, str], value: float) -> float | None:
    if rule.mapping.value_label:
        try:
            value = float(int(labels.get(rule.mapping.value_label, "")))
        except (ValueError, OverflowError):
            return None  # "None", or a version without the label: the engine does not say
    times, over = rule.scale
    return value * times / over


def _refusal(rule: Rule, attributes: tuple[str, ...], value: float) -> str:
    if not math.isfinite(value):
        return NOT_FINITE
    if value < 0:
        return NEGATIVE
    return LABEL if any(len(text) > MAX_VALUE for text in attributes) else ""


def _model(rule: Rule, labels: dict[str, str]) -> str:
    return labels.get(rule.engine.model, "")


def _ranks(rule: Rule, labels: dict[str, str]) -> str:
    return " ".join(f"{rank}={labels[label]}" for rank, label in rule.engine.ranks.items() if labels.get(label))


def _attributes(rule: Rule, labels: dict[str, str], target: str, only: Only) -> tuple[str, ...]:
    mapping, engine = rule.mapping, rule.engine.name
    known = {"engine": engine, "target": target, "model": _model(rule, labels) or only.get((engine, "model"), ""),
             "ranks": _ranks(rule, labels) or only.get((engine, "ranks"), ""),
             **mapping.attributes, **{name: labels.get(label, "") for name, label in mapping.labels.items()}}
    return tuple(known[name] for name in rule.row.attributes)
