"""The forecast of exhaustion before a real promtool: its arithmetic, and what it says of histories."""

from __future__ import annotations

import math
import random
import re
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvobs.dashboards.rules import recording_groups
from tests.rules_promtool import promtool, scene
from tests.support import program

pytestmark = pytest.mark.peer
ALERT = "KvobsKvPoolExhaustionForecast"
FIRED = f'count_over_time(ALERTS{{alertname="{ALERT}", alertstate="firing"}}[1d])'
BLOCKS = 1_000
MINUTE = 2  # samples


def series(histories: dict[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Pools of 1,000 blocks, named after their histories of free ones."""
    made: dict[str, Sequence[float]] = {}
    for name, free in histories.items():
        labels = f'model="{name}", device="d", cache="c", job="kvobs", instance="a:1"'
        made[f'kvobs_kv_blocks{{state="free", {labels}}}'] = free
        made[f'kvobs_kv_blocks{{state="used", {labels}}}'] = [BLOCKS - value for value in free]
    return made


def bounded(value: float) -> float:
    return float(min(BLOCKS, max(0, round(value))))


def noisy(seed: int, minutes: int, level: Callable[[float], float], spread: float) -> list[float]:
    draw = random.Random(seed)
    return [bounded(level(index / MINUTE) + draw.gauss(0, spread)) for index in range(minutes * MINUTE)]


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the sorted values."""
    ordered, at = sorted(values), share * (len(values) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(values) - 1)] - ordered[low])


def closed() -> int:
    """1 where a range of 5 minutes holds a sample that is exactly 5 minutes old, as until Prometheus 3; else 0."""
    told = subprocess.run([program("promtool", "prometheus"), "--version"], capture_output=True, text=True, check=True)
    major = re.search(r"version (\d+)", told.stdout + told.stderr)
    assert major is not None
    return int(int(major[1]) < 3)


def resistant(values: Sequence[float], minutes: float, more: int) -> float:
    """The line through the medians of the last and the first of three thirds of 5 minutes, from their middles on."""
    last, first = statistics.median(values[-10 - more:]), statistics.median(values[-30 - more:-20])
    return last + (last - first) / 10 * (2.5 + minutes)


def test_its_arithmetic(tmp_path: Path) -> None:
    """Line, forecast and band are those of a second implementation, for noise of several sizes on slopes."""
    histories = {f"n{seed}": noisy(seed, 40, lambda minute: 700 - 9 * minute, 5.0 * seed) for seed in range(6)}
    checks, more = list[dict[str, Any]](), closed()
    for name, free in histories.items():
        shares = [value / BLOCKS for value in free]
        lines = {end: resistant(shares[:end], 0, more) for end in range(31, len(shares) + 1)}
        excess = [shares[end - 1] - lines[end] for end in range(len(shares) - 29 - more, len(shares) + 1)]
        weight = (2.5 + 15) / 10
        width = 2 * math.sqrt(1 + ((1 + weight) ** 2 + weight**2) * math.pi / 20)
        for part, value in (("line", lines[len(shares)]), ("forecast15m", resistant(shares, 15, more)),
                            ("band15m", width * max(0.0, quantile(excess, 0.8413)))):
            checks.append({"expr": f'abs(kvobs:kv_pool_headroom:{part}{{model="{name}"}} - {value!r}) < bool 1e-4',
                           "eval_time": f"{(len(free) - 1) * 30}s", "exp_samples": [
                               {"labels": f'{{cache="c", device="d", instance="a:1", job="kvobs", model="{name}"}}',
                                "value": 1}]})
    told = scene("arithmetic", series(histories), [])
    assert promtool(tmp_path, [told | {"promql_expr_test": checks}], recording_groups([])) == ""


def test_what_does_not_end_is_no_exhaustion(tmp_path: Path) -> None:
    """It is silent on noise, a sawtooth, outliers, drops that ended, falls that stop or are slow, and while young."""
    draw = random.Random(3)
    histories: dict[str, Sequence[float]] = {
        f"noise{seed}": noisy(seed, 90, lambda _: 150, 10.0 * (seed + 1)) for seed in range(5)}
    histories["sawtooth"] = [bounded(600 - 60 * (index / MINUTE % 8)) for index in range(90 * MINUTE)]
    histories["outliers"] = [0.0 if draw.random() < 0.25 else bounded(400 + draw.gauss(0, 20)) for _ in range(180)]
    histories["stops"] = [bounded(max(520, 700 - 30 * max(0, index / MINUTE - 30))) for index in range(180)]
    histories["slow"] = [bounded(900 - 5 * index / MINUTE) for index in range(180)]
    for minutes in (0.5, 2, 4):  # one drop from 90 to 10 %, which ended
        histories[f"drop{minutes:g}"] = [bounded(900 - 800 * min(1, max(0, index / MINUTE - 30) / minutes))
                                         for index in range(180)]
    young = {"young": [bounded(300 - 15 * index / MINUTE) for index in range(19 * MINUTE)]}
    scenes = [scene(name, series(these), [], FIRED) for name, these in (("all along", histories), ("young", young))]
    assert promtool(tmp_path, scenes) == ""


@pytest.mark.parametrize(("name", "slope", "spread"), [
    ("clean", 20.0, 0.0), ("noisy", 20.0, 15.0), ("fast", 40.0, 5.0)])
def test_a_fall_is_told_before_its_end(name: str, slope: float, spread: float, tmp_path: Path) -> None:
    """After a calm half hour at 800 of 1,000 blocks a fall is told 4 minutes before its end, and not 17 before."""
    free = noisy(1, 30 + math.ceil(800 / slope), lambda minute: 800 - slope * max(0, minute - 30), spread)
    end = round((30 + 800 / slope) * MINUTE)
    firing = f'ALERTS{{alertname="{ALERT}", alertstate="firing"}}'
    checks = [{"expr": f"count({firing})", "eval_time": f"{(end - minutes * MINUTE) * 30}s",
               "exp_samples": [{"labels": "{}", "value": 1}] if there else []}
              for minutes, there in ((4, True), (17, False))]
    assert promtool(tmp_path, [scene(name, series({name: free}), []) | {"promql_expr_test": checks}]) == ""
