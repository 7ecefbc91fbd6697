"""What runs come to: figures per arm, load and allocator setting, with 95 % intervals. Pure.

Means and ratios: percentile bootstrap over runs (pairs of the same seed for ratios), with a fixed seed. Shares of
windows: exact (Clopper and Pearson), as if windows were independent, which those of one run are not quite.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvobs.lab.breaker._outcome import Outcome, p95_ns
from kvobs.slo.calibration._binomial import upper_bound

RESAMPLES = 10_000
TAIL = 0.025
BASELINE = "baseline"
T = TypeVar("T")


class Interval(msgspec.Struct, frozen=True):
    """A figure with its interval of 95 %."""

    value: float
    low: float
    high: float


class Settings(msgspec.Struct, frozen=True):
    """What the experiment was run with. ``load_before`` is the machine's load average when it began."""

    trace: str
    latency: str
    device_bytes: int
    weight_bytes: int
    bytes_per_token: int
    tokens_per_step: int
    loads: dict[str, tuple[int, float, float]]
    arms: dict[str, tuple[str, str]]
    seeds: list[int]
    versions: dict[str, str]
    machine: str
    processors: int
    load_before: float


class Results(msgspec.Struct, frozen=True):
    """The settings and all runs."""

    settings: Settings
    runs: list[Outcome]


class Row(msgspec.Struct, frozen=True):
    """One arm under one load with one allocator setting: sums over its runs, shares and ratios with intervals.

    ``fast`` is the share of windows with P95 <= 12 ms, ``good`` of those that had no out-of-memory error either;
    ``slow`` are allocations above 12 ms, per million. ``ratio`` is the goodput over the baseline's.
    """

    arm: str
    load: str
    expandable: bool
    runs: int
    admitted: int
    finished: int
    shed: int
    errors: int
    fast: Interval
    good: Interval
    p95_ms: float
    slow: float
    goodput: Interval
    ratio: Interval | None
    cut: int
    transitions: float
    same_answers: int | None


def rows(runs: Sequence[Outcome]) -> list[Row]:
    """One row per arm, load and setting, in the order in which they first come."""
    groups: dict[tuple[str, bool, str], list[Outcome]] = {}
    for run in runs:
        groups.setdefault((run.load, run.expandable, run.arm), []).append(run)
    return [_row(found, groups.get((load, expandable, BASELINE), []))
            for (load, expandable, _), found in groups.items()]


def _row(runs: Sequence[Outcome], baseline: Sequence[Outcome]) -> Row:
    first = runs[0]
    windows = [window for run in runs for window in run.windows]
    histogram = [sum(counts) for counts in zip(*(run.histogram for run in runs), strict=True)]
    others = {run.seed: run for run in baseline}
    pairs = [(run, others[run.seed]) for run in runs if run.seed in others]
    allocations = sum(window.allocations for window in windows)
    return Row(
        arm=first.arm, load=first.load, expandable=first.expandable, runs=len(runs),
        admitted=sum(run.admitted for run in runs), finished=sum(run.finished for run in runs),
        shed=sum(run.shed for run in runs), errors=sum(run.errors for run in runs),
        fast=share(sum(window.fast for window in windows), len(windows)),
        good=share(sum(window.good for window in windows), len(windows)),
        p95_ms=p95_ns(histogram) / 1e6,
        slow=1e6 * sum(window.slow for window in windows) / allocations if allocations else 0.0,
        goodput=bootstrap(runs, goodput),
        ratio=bootstrap(pairs, lambda drawn: goodput([run for run, _ in drawn]) / goodput([run for _, run in drawn]))
        if pairs and first.arm != BASELINE else None,
        cut=sum(run.cut for run in runs), transitions=sum(run.transitions for run in runs) / len(runs),
        same_answers=sum(run.answers == other.answers for run, other in pairs) if pairs else None)


def goodput(runs: Sequence[Outcome]) -> float:
    """Tokens of finished requests per second of the runs together."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def share(good: int, total: int) -> Interval:
    """A share with its exact interval."""
    if not total:
        return Interval(float("nan"), 0.0, 1.0)
    return Interval(good / total, 1 - upper_bound(total - good, total, TAIL), upper_bound(good, total, TAIL))


def bootstrap(runs: Sequence[T], figure: Callable[[Sequence[T]], float], resamples: int = RESAMPLES) -> Interval:
    """A figure of runs with the interval of it over runs drawn with replacement."""
    chance = random.Random(0)
    drawn = sorted(figure(chance.choices(runs, k=len(runs))) for _ in range(resamples))
    return Interval(figure(runs), drawn[int(TAIL * resamples)], drawn[-1 - int(TAIL * resamples)])
