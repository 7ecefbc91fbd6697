"""What a Prometheus that saw the incidents answers to the boards: where there is data, and what moved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any, NamedTuple

from tests.dashboards.boards import Target, replaced
from tests.dashboards.harness import Played, Server

Series = list[Any]
SETTLES_S = 6.0  # after an order, until what it caused was counted, scraped and is within a rate's interval


class Peak(NamedTuple):
    """The lowest, middle and highest value of all series of a query over a while; None where there were none."""

    low: float | None
    usual: float | None
    high: float | None


def asked(server: Server, target: Target, played: Played, begin: float, end: float) -> Series:
    """A target's series of a scenario's processes over a while, once a second."""
    expr = replaced(target.expr, instances=played.matcher(), range_s=end - begin)
    found: Series = server.range(expr, begin, end)
    return found


def has_values(series: Series) -> bool:
    """Whether any value is a number."""
    return any(not math.isnan(float(value)) for one in series for _, value in one["values"])


def peak(series: Series) -> Peak:
    """The extremes of all numbers in these series."""
    values = [float(value) for one in series for _, value in one["values"] if not math.isnan(float(value))]
    return Peak(min(values), median_low(values), max(values)) if values else Peak(None, None, None)


def told_by(server: Server, targets: Iterable[Target], played: Mapping[str, Played]) -> dict[Target, list[str]]:
    """The scenarios in which each target has data."""
    return {target: [name for name, one in played.items()
                     if has_values(asked(server, target, one, one.begin, one.end))] for target in targets}


def silent(server: Server, targets: Sequence[Target], played: Mapping[str, Played]) -> list[Target]:
    """The targets that have data in no scenario."""
    return [target for target in targets if not any(
        has_values(asked(server, target, one, one.begin, one.end)) for one in played.values())]


def before(server: Server, target: Target, played: Played) -> Peak:
    """A target's extremes while the scenario was calm."""
    return peak(asked(server, target, played, played.begin, played.incident_begin))


def during(server: Server, target: Target, played: Played) -> Peak:
    """A target's extremes in the incident, once it has settled."""
    return peak(asked(server, target, played, played.incident_begin + SETTLES_S, played.incident_end))
