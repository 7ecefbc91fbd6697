"""Rules that could never fire, found by reading them: such a rule is refused rather than written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvobs.config import Objective

LEAST_S = 180  # a rate needs two samples; scrapes are up to 60 s apart, and one may fail
_RANGE = re.compile(r"\[(\d+)([smhd])(?::[^\]]*)?\]")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_ABOVE = re.compile(r"> ([0-9.]+)$", re.MULTILINE)


def blind(rules: Sequence[dict[str, Any]], objectives: Sequence[Objective]) -> Iterator[str]:
    """Why rules cannot fire, each as a whole sentence.

    A range of less than three minutes may hold one sample only, of which nothing grows: scrapes are up to a minute
    apart, and one that fails makes the wait of an alert begin anew. A burn rate is at most 1 / (1 - target), which a
    factor must be below; and a window of an objective that is longer than the range looks empty to it.
    """
    targets = {objective.name: objective for objective in objectives}
    for rule in rules:
        name = rule.get("alert") or rule["record"]
        ranges = [int(number) * _SECONDS[unit] for number, unit in _RANGE.findall(rule["expr"])]
        if ranges and min(ranges) < LEAST_S:
            yield f"{name} looks at {min(ranges)} s, in which there may be one sample only: it may never fire."
        objective = targets.get(rule.get("labels", {}).get("objective", ""))
        if objective is None:
            continue
        if ranges and min(ranges) < objective.window_s:
            yield (f"{name} looks at {min(ranges)} s, less than the {objective.window_s} s of one event of "
                   f"{objective.name}.")
        highest = 1 / (1 - objective.target)
        for factor in map(float, _ABOVE.findall(rule["expr"]) if "alert" in rule else ()):
            if factor >= highest * (1 - 1e-9):
                yield (f"{name} waits for a burn rate above {factor:g}, but with a target of {objective.target:.6g} "
                       f"it is at most {highest:.4g}: it cannot fire.")
