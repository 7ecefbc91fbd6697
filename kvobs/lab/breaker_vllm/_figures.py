"""What a run's answers come to, and how two arms differ: paired by seed, with Student's intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

import msgspec

from kvobs.lab.breaker_vllm._client import Told

FIRST_TOKEN_S = 10.0  # the objective: a first token within so many seconds of when a turn was first sent
LEVEL = 0.95


class Run(msgspec.Struct, frozen=True):
    """One arm's run: its seed and its figures by name (those of ``COLUMNS``)."""

    arm: str
    seed: int
    figures: dict[str, float]


# name, unit, and whether it is compared as a ratio (else as a difference)
COLUMNS: tuple[tuple[str, str, bool], ...] = (
    ("preemptions", "", False), ("recomputed", "tokens", False), ("ttft_p50", "s", True), ("ttft_p99", "s", True),
    ("turn_p99", "s", True), ("gap_p99", "s", True), ("goodput", "tokens/s", True), ("throughput", "tokens/s", True),
    ("refusals", "", False), ("transitions", "", False))


def figures(told: Sequence[Told], seconds: float, before: Mapping[str, float], after: Mapping[str, float],
            objective_s: float = FIRST_TOKEN_S) -> dict[str, float]:
    """The figures of a run.

    Goodput counts the tokens of answers whose first token came within ``objective_s``. Percentiles are nearest ranks;
    a turn that was refused for good counts as one that took for ever, and is left out of gaps.
    """
    first = [math.inf if one.first_s is None else one.first_s for one in told]
    good = sum(one.tokens for one, first_s in zip(told, first, strict=True) if first_s <= objective_s)
    served = [one for one in told if one.first_s is not None]
    return {
        "preemptions": after["preemptions"] - before["preemptions"],
        "recomputed": after["recomputed"] - before["recomputed"],
        "ttft_p50": rank(first, 0.5), "ttft_p99": rank(first, 0.99),
        "turn_p99": rank([one.last_s if one.first_s is not None else math.inf for one in told], 0.99),
        "gap_p99": rank([one.longest_gap_s for one in served], 0.99),
        "goodput": good / seconds, "throughput": sum(one.tokens for one in told) / seconds,
        "refusals": float(sum(one.refusals for one in told)),
        "transitions": after["transitions"] - before["transitions"],
        "generated": after["generated"] - before["generated"], "turns": float(len(told)), "seconds": seconds}


def rank(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile; NaN of nothing."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1] if values else math.nan


class Compared(msgspec.Struct, frozen=True):
    """A figure with and without: means, and the paired difference or the geometric mean of ratios with its interval."""

    without: float
    with_: float
    effect: float
    low: float
    high: float
    pairs: int


def compared(runs: Sequence[Run], name: str, without: str, with_: str, *, ratio: bool) -> Compared:
    """Arms compared by pairs of the same seed; a ratio leaves out pairs in which one of both is 0."""
    values = {(run.arm, run.seed): run.figures[name] for run in runs}
    seeds = sorted({run.seed for run in runs if (without, run.seed) in values and (with_, run.seed) in values})
    pairs = [(values[without, seed], values[with_, seed]) for seed in seeds]
    usable = [(one, other) for one, other in pairs if not ratio or (0 < one < math.inf and 0 < other < math.inf)]
    steps = [math.log(other / one) if ratio else other - one for one, other in usable]
    back: Callable[[float], float] = math.exp if ratio else float
    centre = fmean(steps) if steps else math.nan
    half = student(LEVEL, len(steps) - 1) * stdev(steps) / math.sqrt(len(steps)) if len(steps) > 1 else math.nan
    return Compared(fmean(one for one, _ in pairs), fmean(other for _, other in pairs), back(centre),
                    back(centre - half), back(centre + half), len(steps))


def student(level: float, freedom: int) -> float:
    """The two-sided quantile of Student's t, by bisection of its distribution (Simpson's rule over x = tan of an
    angle, in which the density is a power of the cosine).
    """
    whole = _simpson(freedom, math.pi / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _simpson(freedom, middle) < level * whole else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _simpson(freedom: int, until: float, parts: int = 400) -> float:
    step = until / parts
    return step / 3 * sum((1 if i in (0, parts) else 4 if i % 2 else 2) * math.cos(i * step) ** (freedom - 1)
                          for i in range(parts + 1))
