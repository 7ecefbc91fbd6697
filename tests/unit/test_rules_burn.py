"""Burn alerts before a real promtool, a case for every pair of windows that can fire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvobs.config import ARTICLE, Objective
from kvobs.dashboards.rules import alert_groups, blind, files
from kvobs.slo import ALERTS, Alert, alert_expression, refusal
from tests.rules_cases import Series, Values
from tests.rules_promtool import WHO, promtool, scene

LOOSE = Objective(name="first-token", signal="time_to_first_token", target=0.9, at_most=10**9)
PAIRS = [(objective, alert) for objective in (ARTICLE, LOOSE) for alert in ALERTS if not refusal(objective, alert)]
EVENTS, STEP_S = 10_000, 60


def step(alert: Alert) -> int:
    """Seconds between samples: 12 of them at least in the short window."""
    return STEP_S if alert.short_s < 3_600 else 5 * STEP_S


def counts(objective: Objective, good: Values, events: Values) -> Series:
    labels = f'objective="{objective.name}", job="kvobs", instance="a:1"'
    return {f"kvobs_slo_good_total{{{labels}}}": good, f"kvobs_slo_events_total{{{labels}}}": events}


def burning(objective: Objective, alert: Alert, of_factor: float) -> Series:
    """Bad events at a steady multiple of the alert's factor over its long window."""
    many = alert.long_s // step(alert) + 2
    good = round(EVENTS * (1 - alert.factor * of_factor * (1 - objective.target)))
    return counts(objective, [good * index for index in range(many)], [EVENTS * index for index in range(many)])


def burn_rules(objective: Objective) -> list[dict[str, Any]]:
    return next(group for group in alert_groups([objective], "r", "d") if group["name"] == "kvobs-slo")["rules"]


@pytest.mark.peer
@pytest.mark.parametrize(("objective", "alert"), PAIRS, ids=lambda value: getattr(value, "name", None) or value.windows)
def test_it_fires_above_its_factor_only(objective: Objective, alert: Alert, tmp_path: Path) -> None:
    """5 % above the factor it fires, 5 % below it does not; nor on one sample, on a restart, or without events."""
    told = {"alertname": "KvobsErrorBudgetBurn", "severity": alert.severity, "objective": objective.name,
            "windows": alert.windows} | WHO
    rule, = [rule for rule in burn_rules(objective) if rule["labels"]["windows"] == alert.windows]
    groups = [{"name": "burn", "rules": [rule]}]
    rising = [float(index) for index in range(20)]
    scenes = [scene("above", burning(objective, alert, 1.05), [told], step_s=step(alert)),
              scene("below", burning(objective, alert, 0.95), [], step_s=step(alert)),
              scene("one sample", counts(objective, [0], [EVENTS]), [], step_s=step(alert)),
              scene("restart", counts(objective, [*rising, *rising], [*rising, *rising]), [], step_s=step(alert)),
              scene("no events", counts(objective, [0] * 20, [0] * 20), [], step_s=step(alert)),
              scene("absent", {}, [], step_s=step(alert))]
    assert promtool(tmp_path, scenes, groups, step_s=step(alert)) == ""


@pytest.mark.parametrize("objective", [ARTICLE, LOOSE], ids=lambda objective: objective.name)
def test_those_that_can_fire_are_there(objective: Objective) -> None:
    """With a target of 0.9 a burn rate is at most 10, so that 14.4 is left out, and with 0.995 nothing is."""
    kept = [rule["labels"]["windows"] for rule in burn_rules(objective)]
    assert kept == [alert.windows for alert in ALERTS if alert.factor < 1 / (1 - objective.target)]
    assert len(kept) == {"allocation-latency": 4, "first-token": 3}[objective.name]


def planted(objective: Objective, factor: float, short_s: int = 300) -> dict[str, Any]:
    return {"alert": "Planted", "labels": {"objective": objective.name},
            "expr": alert_expression(objective, Alert(factor, short_s, 3_600, "page"))}


@pytest.mark.peer
def test_a_planted_window_that_never_fires_is_found(tmp_path: Path) -> None:
    """A factor of 10 at a target of 0.9 is silent in a total outage, which promtool confirms, and it is refused."""
    rule = planted(LOOSE, 10.0)
    outage = counts(LOOSE, [0] * 70, [EVENTS * index for index in range(70)])
    assert promtool(tmp_path, [scene("outage", outage, [], step_s=STEP_S)], [{"name": "g", "rules": [rule]}],
                    step_s=STEP_S) == ""
    reason, = set(blind([rule], [LOOSE]))
    assert reason == ("Planted waits for a burn rate above 10, but with a target of 0.9 it is at most 10: it cannot "
                      "fire.")
    assert not list(blind([planted(LOOSE, 9.9)], [LOOSE]))


def test_planted_windows_stop_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that cannot fire is not written: the whole output is refused with one sentence."""
    from kvobs.dashboards.rules import _service

    monkeypatch.setattr(_service, "alert_rules", lambda objectives: [
        planted(objective, 300.0) | {"annotations": {"description": ""}} for objective in objectives])
    with pytest.raises(ValueError, match=r"^Planted waits for .* at most 200: it cannot fire\.$"):
        files([ARTICLE], "r", "d")


@pytest.mark.parametrize(("expression", "window_s", "reason"), [
    ("increase(x[60s]) > 0", 60, "A looks at 60 s, in which there may be one sample only: it may never fire."),
    ("increase(x[1h]) > 0 and rate(x[2m]) > 0", 60,
     "A looks at 120 s, in which there may be one sample only: it may never fire."),
    ("increase(x[5m]) > 3", 600, "A looks at 300 s, less than the 600 s of one event of o."),
])
def test_windows_that_are_too_short(expression: str, window_s: int, reason: str) -> None:
    """A window that cannot hold two samples, or an event of its objective, is named."""
    objective = Objective(name="o", signal="out_of_memory", target=0.99, window_s=window_s)
    assert list(blind([{"alert": "A", "expr": expression, "labels": {"objective": "o"}}], [objective])) == [reason]


def test_without_objectives_there_is_no_burn() -> None:
    """Where nothing is promised no burn rate is alerted on or recorded, and the rest is there."""
    made = files([], "r", "d")
    assert "KvobsErrorBudgetBurn" not in made["rules/kvobs-alerts.yaml"]
    assert "kvobs:slo_burn:ratio" not in made["rules/kvobs-recording.yaml"]
    assert "KvobsOutOfMemory" in made["rules/kvobs-alerts.yaml"]
