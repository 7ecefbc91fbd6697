"""Alerts about what cannot be seen, before a real promtool: processes that went, hang, stand still, or never came."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rules_cases import Series, flat, ramp
from tests.rules_promtool import WHO, promtool, scene

pytestmark = pytest.mark.peer
HEART = "kvobs_self_drain_duration_seconds_total"
UNREACHABLE = {"alertname": "KvobsUnreachable", "severity": "page"} | WHO
STALE = {"alertname": "KvobsTelemetryStale", "severity": "ticket"} | WHO
ABSENT = {"alertname": "KvobsJobAbsent", "severity": "ticket"}
GONE = [*ramp(3, 0.1, 55), *[None] * 25]  # looked back for 5 minutes, and waited for another 5


def process(up: object, heart: object, job: str = "kvobs", instance: str = "a:1") -> Series:
    made = {f'up{{job="{job}", instance="{instance}"}}': up, f'{HEART}{{job="{job}", instance="{instance}"}}': heart}
    return {key: values for key, values in made.items() if values is not None}  # type: ignore[misc]


def test_a_process_that_does_not_answer(tmp_path: Path) -> None:
    """Its failing scrapes page after 3 minutes, under whatever job; targets that are not kvobs's do not matter."""
    other = process(flat(1), ramp(3, 0.1), "serving", "b:1")
    down = [*flat(1, 55), *flat(0, 25)]
    absent = ABSENT | {"job": "kvobs"}
    assert promtool(tmp_path, [
        scene("down", process(down, GONE) | other, [UNREACHABLE, absent]),
        scene("never up", process(flat(0), None) | other, [UNREACHABLE]),
        scene("for 2.5 minutes", process([*flat(1, 74), *flat(0, 6)], [*ramp(3, 0.1, 74), *[None] * 6]) | other, []),
        scene("own job name", process(down, GONE, "serving") | process(flat(1), ramp(3, 0.1), "serving", "b:1"),
              [UNREACHABLE | {"job": "serving"}]),
        scene("not kvobs", process(flat(1), ramp(3, 0.1)) | process(flat(0), None, "node"), []),
        scene("up again", process([*flat(1, 40), *flat(0, 20), *flat(1, 20)],
                                  [*ramp(3, 0.1, 40), *[None] * 20, *ramp(0, 0.1, 20)]), [])]) == ""


def test_a_process_that_stands_still(tmp_path: Path) -> None:
    """It answers and its own clock of work does not move; a busy, restarted, young or unreachable one is not stale."""
    still = [*ramp(3, 0.1, 60), *flat(9, 20)]
    assert promtool(tmp_path, [
        scene("still", process(flat(1), still), [STALE]),
        scene("pushed", process(None, still), [STALE]),
        scene("slow", process(flat(1), [*ramp(3, 0.1, 60), *ramp(9, 0.0001, 20)]), []),
        scene("for 3 minutes", process(flat(1), [*ramp(3, 0.1, 74), *flat(10.3, 6)]), []),
        scene("restarted", process(flat(1), [*ramp(300, 0.1, 70), *ramp(0, 0.1, 10)]), []),
        scene("one sample", process([*[None] * 79, 1.0], [*[None] * 79, 3.0]), []),
        scene("unreachable", process([*flat(1, 60), *flat(0, 20)], [*ramp(3, 0.1, 50), *flat(8, 30)]), [UNREACHABLE]),
    ]) == ""


def test_a_job_that_is_not_there(tmp_path: Path) -> None:
    """A job that went is named for 6 hours; where there never was one it is said without a name; a gap is no end."""
    here = process(flat(1), ramp(3, 0.1))
    assert promtool(tmp_path, [
        scene("went", here | process(None, [*ramp(3, 0.1, 59), *[None] * 21], "batch"), [ABSENT | {"job": "batch"}]),
        scene("one of two went", here | process(None, GONE, instance="b:1"), []),
        scene("for 4 minutes", here | process(None, [*ramp(3, 0.1, 72), *[None] * 8], "batch"), []),
        scene("nobody", {'up{job="node", instance="n:1"}': flat(1)}, [ABSENT]),
        scene("young", process([*[None] * 79, 1.0], [*[None] * 79, 3.0]), []),
        scene("all went long ago", {f'{HEART}{{job="kvobs", instance="a:1"}}': [*ramp(0, 0.1, 5), *[None] * 800]},
              [ABSENT])]) == ""
