"""Each alert before a real promtool: it fires, and it is silent on what is nearly the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvobs.dashboards.rules import ALERTS, NAMES
from tests.rules_cases import CASES, Case, Series, alive
from tests.rules_cases import WHO as TARGET
from tests.rules_promtool import FIRING, WHO, promtool, scene

pytestmark = pytest.mark.peer
BY_TELEMETRY = {"KvobsUnreachable", "KvobsJobAbsent", "KvobsTelemetryStale"}  # test_rules_telemetry.py
BY_BURN = {"KvobsErrorBudgetBurn"}  # test_rules_burn.py


def expected(case: Case) -> dict[str, str]:
    return {"alertname": case.alert, "severity": case.severity} | WHO | dict(case.labels)


def young(series: Series, samples: int) -> Series:
    """Only the last samples."""
    return {key: [None] * (len(values) - samples) + list(values[-samples:]) for key, values in series.items()}


def test_every_alert_has_a_case() -> None:
    """No alert is without a test of firing and of not firing."""
    assert sorted({case.alert for case in CASES} | BY_TELEMETRY | BY_BURN) == sorted(set(NAMES))
    severities = {alert.name: alert.severity for alert in ALERTS}
    assert all(severities[case.alert] == case.severity for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_it_fires_and_is_silent(case: Case, tmp_path: Path) -> None:
    """It alone fires, with its labels; nothing fires on a near miss, after a restart, while young, or just met."""
    scenes = [scene("firing", alive() | case.firing, [expected(case)]),
              scene("near", alive() | case.near, []),
              scene("restart", alive() | case.restart, []),
              scene("young", alive() | young(case.firing, case.young), [expected(case)] if case.told else []),
              scene("just met", young(alive() | case.firing, case.young), [])]
    assert promtool(tmp_path, scenes) == ""


def test_a_silent_scene_is_really_tried(tmp_path: Path) -> None:
    """Nothing fires where only what every process has is there; and promtool complains where that is a lie."""
    assert promtool(tmp_path, [scene("absent", alive(), [])]) == ""
    case = next(case for case in CASES if case.alert == "KvobsOutOfMemory")
    assert case.alert in promtool(tmp_path, [scene("planted", alive() | case.firing, [])])


@pytest.mark.parametrize("name", ["KvobsOutOfMemory", "KvobsAllocatorOutOfMemory", "KvobsAllocatorRetries"])
def test_what_was_counted_before_a_long_failure_is_not_new(name: str, tmp_path: Path) -> None:
    """Out of reach for more than the hour before the window, a process comes back with its old counter: silent."""
    case, away, back = next(case for case in CASES if case.alert == name), 180, 6  # 90 and 3 minutes
    up = {f"up{{{TARGET}}}": [*[1.0] * 10, *[0.0] * away, *[1.0] * back]}
    counter = {key: [*[5.0] * 10, *[None] * away, *[5.0] * back] for key in case.firing}
    growing = {key: [*[5.0] * 10, *[None] * away, *[5.0] * (back - 2), 6.0, 6.0] for key in case.firing}
    silent = scene("back", up | counter, [], f'{FIRING[:-1]}, alertname="{name}"}}')
    assert promtool(tmp_path, [silent]) == ""
    if not any(alert.wait for alert in ALERTS if alert.name == name):
        grown = scene("and grows", up | growing, [expected(case)], f'{FIRING[:-1]}, alertname="{name}"}}')
        assert promtool(tmp_path, [grown]) == ""


def test_one_failed_scrape_a_minute_apart_does_not_begin_the_wait_anew(tmp_path: Path) -> None:
    """A pool that refuses all the time is told of although one of the scrapes, a minute apart, failed."""
    case = next(case for case in CASES if case.alert == "KvobsBlockAllocationFailures")
    refused = [float(index // 2) if index % 2 == 0 and index != 70 else None for index in range(80)]
    scraped = dict.fromkeys(case.firing, refused)
    assert promtool(tmp_path, [scene("failed", scraped, [expected(case)],
                                     f'{FIRING[:-1]}, alertname="{case.alert}"}}')]) == ""
