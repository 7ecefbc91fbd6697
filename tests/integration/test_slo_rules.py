"""Burn rates and alerts in process against Prometheus's own, which evaluates the generated rules on the same counts."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from kvobs.config import ARTICLE, Objective
from kvobs.slo import ALERTS, History, alert_expression, alert_rules, burn_expression, burn_rate, firing, refusal
from tests.peers import program

SECOND = 10**9
EVERY = 30  # seconds between samples, as kvobs keeps them
OBJECTIVES = (ARTICLE, Objective(name="first-token", signal="time_to_first_token", target=0.9, at_most=10**9),
              Objective(name="whole", signal="out_of_memory", target=0.9999))
LENGTHS = {"short": 40 * 60, "day": 26 * 3600, "days": 76 * 3600}  # seconds
LABELS = 'job="j", instance="i"'


def _shares(draw: random.Random, kind: str, samples: int, allowed: float) -> list[float]:
    """The share of bad events at each sample."""
    if kind == "burst":
        start, length = draw.randrange(samples), draw.randrange(2, max(3, samples // 10))
        return [float(start <= index < start + length) for index in range(samples)]
    factor = {"steady": draw.choice([0.5, 2, 4, 8, 20]), "healing": 20.0}[kind]
    return [min(1.0, allowed * factor * (1 if kind == "steady" else (index < samples * 0.7)))
            for index in range(samples)]


def _scene(draw: random.Random, objective: Objective, length: int, kind: str) -> dict[str, object]:
    """A promtool test: the counts as series, and what kvobs says at several times."""
    samples = length // EVERY
    history, good, events = History(0), [0], [0]
    asked = sorted({samples - 1, *(draw.randrange(1, samples) for _ in range(12))})
    alerts: list[dict[str, object]] = []
    rates: list[dict[str, object]] = []
    for index, share in enumerate(_shares(draw, kind, samples, 1 - objective.target), 1):
        count = draw.choice([0, 1, 7, 1000])
        bad = sum(draw.random() < share for _ in range(count))
        history.add(count - bad, count)
        history.keep(index * EVERY * SECOND)
        good.append(history.all - history.bad)
        events.append(history.all)
        if index in asked:
            _ask(history, objective, index * EVERY, alerts, rates)
    return {"interval": f"{EVERY}s", "input_series": [
        {"series": f'{name}{{objective="{objective.name}", {LABELS}}}', "values": " ".join(map(str, values))}
        for name, values in (("kvobs_slo_good_total", good), ("kvobs_slo_events_total", events))],
        "promql_expr_test": [*alerts, *rates]}


def _ask(history: History, objective: Objective, at: int, alerts: list[dict[str, object]],
         rates: list[dict[str, object]]) -> None:
    now = at * SECOND
    for alert in ALERTS:
        for seconds in (alert.short_s, alert.long_s):
            rate, expression = burn_rate(history, objective, now, seconds), burn_expression(objective, seconds)
            expected = [] if rate is None else [{"labels": "{" + LABELS + "}", "value": 1}]
            rates.append({"expr": f"abs({expression} - {rate or 0!r}) < bool 1e-6", "eval_time": f"{at}s",
                          "exp_samples": expected})
        if not refusal(objective, alert):
            alerts.append({"expr": f"count({alert_expression(objective, alert)})", "eval_time": f"{at}s", "exp_samples":
                           [{"labels": "{}", "value": 1}] if firing(history, objective, now, alert) else []})


@pytest.mark.peer
def test_promtool_agrees(tmp_path: Path) -> None:
    """At 13 times of each of 21 histories, every burn rate is PromQL's to 1e-6 and the same alerts fire."""
    draw = random.Random(7)
    scenes = [_scene(draw, objective, LENGTHS[length], kind) for objective in OBJECTIVES
              for length, kind in (("short", "steady"), ("short", "burst"), ("day", "steady"), ("day", "burst"),
                                   ("day", "healing"), ("days", "steady"), ("days", "healing"))]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "slo", "rules": alert_rules(OBJECTIVES)}]}))
    (tmp_path / "tests.yml").write_text(json.dumps(
        {"evaluation_interval": f"{EVERY}s", "tests": scenes}))  # the rules themselves would be evaluated every 30 s
    promtool = program("promtool", "prometheus")
    checked = subprocess.run([promtool, "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True,
                             check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    done = subprocess.run([promtool, "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4_000:]
    fired = sum(bool(one["exp_samples"]) for scene in scenes for one in scene["promql_expr_test"]  # type: ignore[attr-defined]
                if one["expr"].startswith("count"))
    asked = sum(one["expr"].startswith("count") for scene in scenes for one in scene["promql_expr_test"])  # type: ignore[attr-defined]
    assert 0.1 < fired / asked < 0.9  # both answers are tried
