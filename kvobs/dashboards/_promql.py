"""PromQL as functions of catalog rows: a name, label or aggregation that the catalog does not allow is an error."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from kvobs.catalog import BY_NAME, Row, prometheus_label, prometheus_name

INTERVAL = "$__rate_interval"
TARGET_LABELS = ("job", "instance")
# Labels that a variable of every board selects, by the attributes that carry the same fact.
VARIABLES = {"model": "model", "gen_ai.request.model": "model", "device": "device"}
# What Prometheus itself says of its targets.
UP = Row(name="up", kind="gauge", unit="{target}", attributes=(), across_ranks="min", nature="exact",
         meaning="1 if Prometheus's last scrape of this target was good, 0 if it was not.", formula="1 or 0")
SCRAPE = Row(name="scrape.duration", kind="gauge", unit="s", attributes=(), across_ranks="max", nature="measured",
             meaning="How long Prometheus's last scrape of this target took.", formula="end - start")
SAMPLES = Row(name="scrape.samples_scraped", kind="gauge", unit="{sample}", attributes=(), across_ranks="sum",
              nature="exact", meaning="Samples in the last scrape of this target.", formula="count")
OWN = (UP, SCRAPE, SAMPLES)
_OWN = {row.name: row for row in OWN}

Range = Literal["rate", "increase", "changes"]


class Expr(msgspec.Struct, frozen=True):
    """An expression with the rows that it reads, the labels of its result and its unit (UCUM, ``factor`` for none)."""

    text: str
    rows: tuple[Row, ...]
    by: tuple[str, ...]
    unit: str
    formula: str = ""


def row(name: str) -> Row:
    """The row of a name.

    Raises:
        KeyError: neither the catalog nor Prometheus has it.
    """
    return _OWN[name] if name in _OWN else BY_NAME[name]


def labels(of: Row) -> tuple[str, ...]:
    """The labels of a row's series, beside ``le``."""
    return (*TARGET_LABELS, *map(prometheus_label, of.attributes))


def series(of: Row, suffix: str = "", **match: str) -> str:
    """A selector that every variable of a board narrows; ``~`` begins a regular expression, ``!`` what is left out."""
    for label in match:
        _known(of, label)
    found = [f'{label}=~"${label}"' for label in TARGET_LABELS]
    found += [f'{prometheus_label(key)}=~"${VARIABLES[key]}"' for key in of.attributes if key in VARIABLES]
    operators = {"~": "=~", "!": "!="}
    found += [f'{label}{operators.get(value[0], "=")}"{value.lstrip("~!")}"' for label, value in match.items()]
    return f"{prometheus_name(of)}{suffix}{{{', '.join(found)}}}"


def state(name: str, *by: str, **match: str) -> Expr:
    """A gauge, over all series that share ``by``, as its row aggregates across ranks."""
    of = _of_kind(name, "gauge")
    return Expr(_over(of, series(of, **match), by), (of,), _checked(of, by), of.unit)


def highest(name: str, *by: str) -> Expr:
    """The highest value of a gauge within $__rate_interval, for states that may be shorter than a step."""
    of = _of_kind(name, "gauge")
    if of.across_ranks != "max":
        raise ValueError(f"{name} is joined across ranks by its {of.across_ranks}, not by its max.")
    return Expr(_over(of, f"max_over_time({series(of)}[{INTERVAL}])", by), (of,), _checked(of, by), of.unit,
                f"the highest within {INTERVAL} before each point, however short it was")


def rate(name: str, *by: str, how: Range = "rate", **match: str) -> Expr:
    """Growth of a counter per second, or within $__rate_interval with ``how="increase"``."""
    of = _of_kind(name, "counter")
    unit = of.unit if how == "increase" else f"{of.unit}/s"
    return Expr(_over(of, f"{how}({series(of, **match)}[{INTERVAL}])", by), (of,), _checked(of, by), unit)


def changes(name: str, *by: str) -> Expr:
    """How often a gauge changed within $__rate_interval."""
    of = _of_kind(name, "gauge")
    text = f"sum{_by(by)} (changes({series(of)}[{INTERVAL}])) > 0"
    return Expr(text, (of,), _checked(of, by), "{change}")


def quantile(q: float, name: str, *by: str, **match: str) -> Expr:
    """A quantile of a histogram's buckets; absent where nothing was counted."""
    of = _of_kind(name, "histogram")
    text = f"histogram_quantile({q:g}, {_grown(of, '_bucket', ('le', *by), 'rate', match)}) >= 0"
    return Expr(text, (of,), _checked(of, by), of.unit,
                f"quantile {q:g} within the bucket that holds it, linear; above the last bound it is that bound")


def buckets(name: str, *by: str, **match: str) -> Expr:
    """How many values each bucket of a histogram got within $__rate_interval."""
    of = _of_kind(name, "histogram")
    return Expr(_grown(of, "_bucket", ("le", *by), "increase", match), (of,), _checked(of, by), of.unit,
                "values per bucket within $__rate_interval")


def observed(name: str, *by: str, **match: str) -> Expr:
    """How many values a histogram got per second."""
    of = _of_kind(name, "histogram")
    return Expr(_grown(of, "_count", by, "rate", match), (of,), _checked(of, by), "{value}/s", "values per second")


def mean(name: str, *by: str, **match: str) -> Expr:
    """The mean of a histogram's values; absent where nothing was counted."""
    of = _of_kind(name, "histogram")
    total, count = (_grown(of, suffix, by, "rate", match) for suffix in ("_sum", "_count"))
    return Expr(f"{total} / ({count} > 0)", (of,), _checked(of, by), of.unit, "sum / count")


def within(bound: float, name: str, *by: str) -> Expr:
    """The share of a histogram's values that are at most ``bound``, one of its boundaries."""
    of = _of_kind(name, "histogram")
    if bound not in of.buckets:
        raise ValueError(f"{name} has no bucket that ends at {bound:g}.")
    below, count = _grown(of, "_bucket", by, "rate", {"le": f"{bound:g}"}), _grown(of, "_count", by, "rate", {})
    return Expr(f"{below} / ({count} > 0)", (of,), _checked(of, by), "1", f"values of at most {bound:g} / all values")


def ratio(part: Expr, whole: Expr, formula: str = "") -> Expr:
    """One expression divided by another with the same labels; absent where the other is not above 0."""
    if part.unit != whole.unit:
        raise ValueError(f"{part.unit} is divided by {whole.unit}; a share needs equal units.")
    return each(part, whole, "1", formula)


def each(part: Expr, whole: Expr, unit: str, formula: str = "") -> Expr:
    """A mean: one total divided by a count of something else, in ``unit``; absent where the count is not above 0."""
    if part.by != whole.by:
        raise ValueError(f"{part.by} is divided by {whole.by}; allowed are equal labels.")
    return Expr(f"{_inner(part)} / ({_inner(whole)} > 0)", _rows(part, whole), part.by, unit, formula)


def total(*parts: Expr) -> Expr:
    """The sum of expressions with the same labels; absent where one of them is."""
    return _joined(" + ", parts)


def less(whole: Expr, *parts: Expr) -> Expr:
    """What is left of an expression without others with the same labels; absent where one of them is."""
    return _joined(" - ", (whole, *parts))


def either(first: Expr, *others: Expr) -> Expr:
    """The first of several expressions that is there, per set of labels."""
    return _joined(" or ", (first, *others))


def beside(of: Expr, other: Expr) -> Expr:
    """An expression where another with the same labels has series too."""
    return _joined(" and ", (of, other))


def deviation(variance: Expr) -> Expr:
    """The standard deviation of a variance."""
    return Expr(f"sqrt({variance.text})", variance.rows, variance.by, "s", "square root of the variance")


def top(count: int, of: Expr) -> Expr:
    """The series with the highest values at each step."""
    return msgspec.structs.replace(of, text=f"topk({count}, {of.text})")


def bottom(count: int, of: Expr) -> Expr:
    """The series with the lowest values at each step."""
    return msgspec.structs.replace(of, text=f"bottomk({count}, {of.text})")


def worst(of: Expr, *by: str, how: Literal["max", "min"] = "max") -> Expr:
    """The highest (or lowest) of the series that share ``by``."""
    lost = ", ".join(label for label in of.by if label not in by)
    return Expr(f"{how}{_by(by)} ({of.text})", of.rows, by, of.unit, of.formula or f"{how} over {lost}")


def spread(q: float, of: Expr) -> Expr:
    """A quantile over the series of an expression."""
    return Expr(f"quantile({q:g}, {of.text})", of.rows, (), of.unit,
                f"quantile {q:g} over {', '.join(of.by) or 'the series'}")


def where(of: Expr, condition: str) -> Expr:
    """The series of an expression that meet a condition such as ``> 0``."""
    return msgspec.structs.replace(of, text=f"{_inner(of)} {condition}")


def line(at: float, while_there: Expr, unit: str) -> Expr:
    """A constant that is drawn while an expression has series."""
    return Expr(f"{_inner(while_there)} * 0 + {at:g}", while_there.rows, while_there.by, unit, f"{at:g}")


def placed(of: Expr, into: str = "place") -> Expr:
    """The same with one more label that joins all others, for tables with one row per place."""
    names = ", ".join(f'"{label}"' for label in of.by)
    return msgspec.structs.replace(of, text=f'label_join({of.text}, "{into}", " ", {names})')


def _joined(operator: str, parts: tuple[Expr, ...]) -> Expr:
    first = parts[0]
    if any((part.by, part.unit) != (first.by, first.unit) for part in parts):
        raise ValueError(f"Parts of one expression differ: {[(part.by, part.unit) for part in parts]}.")
    return Expr(operator.join(map(_inner, parts)), _rows(*parts), first.by, first.unit)


def _inner(of: Expr) -> str:
    outside, depth = "", 0
    for letter in of.text:
        depth -= letter in ")}]"
        outside += letter if depth == 0 else ""
        depth += letter in "({["
    return f"({of.text})" if re.search(r" (?:[-+*/]|[<>=]=?|or|and) ", outside) else of.text


def _rows(*parts: Expr) -> tuple[Row, ...]:
    return tuple(dict.fromkeys(row for part in parts for row in part.rows))


def _grown(of: Row, suffix: str, by: tuple[str, ...], how: Range, match: dict[str, str]) -> str:
    bounds = {label: value for label, value in match.items() if label == "le"}
    rest = {label: value for label, value in match.items() if label != "le"}
    text = series(of, suffix, **rest)
    if bounds:
        text = text[:-1] + f', le="{bounds["le"]}"}}'
    return f"sum{_by(by)} ({how}({text}[{INTERVAL}]))"


def _over(of: Row, inner: str, by: tuple[str, ...]) -> str:
    if of.across_ranks == "sum" and of.unit == "1" and of.kind == "gauge":
        raise ValueError(f"{of.name} is a ratio: it must not be summed.")
    return f"{of.across_ranks}{_by(by)} ({inner})"


def _by(by: tuple[str, ...]) -> str:
    return f" by ({', '.join(by)})" if by else ""


def _checked(of: Row, by: tuple[str, ...]) -> tuple[str, ...]:
    for label in by:
        _known(of, label)
    if of.nature == "scraped" and "target" not in by:
        raise ValueError(f"{of.name} is told once per target: a sum over targets may count an engine twice.")
    return by


def _known(of: Row, label: str) -> None:
    if label not in labels(of):
        raise ValueError(f"{of.name} has no label {label}; it has {', '.join(labels(of))}.")


def _of_kind(name: str, kind: str) -> Row:
    of = row(name)
    if of.kind != kind:
        raise ValueError(f"{name} is a {of.kind}, not a {kind}.")
    return of
