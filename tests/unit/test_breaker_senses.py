"""Signals from events: each is what a closed form says, has its own age, and is absent where nothing tells it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvobs import model
from kvobs.breaker import Reading
from kvobs.breaker._sense import MOST_SCOPES, Senses
from kvobs.config import ARTICLE
from kvobs.slo import Standing
from tests import events

SECOND = 10**9
POOL = "tiny@cpu"


def blocks(second: float, **fields: Any) -> model.Blocks:
    return events.blocks(t_ns=round(second * SECOND), cache_id=1, **fields)


def device(senses: Senses, second: int, free: float, reserved: int, allocated: int) -> None:
    senses.fold([model.Poll(second * SECOND, "nvml", 1, (("kvobs.device.memory", ("cuda:0", "free"), free),)),
                 model.AllocatorState(second * SECOND, "cuda:0", reserved, allocated, None)])


def test_headroom_is_what_the_process_could_still_have() -> None:
    """60 free on the device, 40 reserved of which 30 are allocated: 70 of 100; a device whose free bytes nobody tells
    has none.
    """
    senses = Senses()
    device(senses, 1, 60.0, 40, 30)
    senses.fold([model.AllocatorState(SECOND, "vgpu:0", 40, 30, None)])
    found = senses.signals(2 * SECOND, [])
    assert found["cuda:0"]["headroom"] == Reading(0.7, SECOND)
    assert "vgpu:0" not in found


def test_torch_s_own_word_on_what_is_left_counts_more_than_the_driver_s() -> None:
    """The driver knows no memory fraction: where torch itself has said what is left, its own next word counts only."""
    senses = Senses()
    senses.headroom("cuda:0", 0.2, SECOND)
    senses.fragmentation("cuda:0", 0.75, SECOND)
    device(senses, 2, 60.0, 40, 30)
    assert senses.signals(2 * SECOND, [])["cuda:0"]["headroom"] == Reading(0.2, SECOND)
    senses.headroom("cuda:0", 0.1, 3 * SECOND)
    found = senses.signals(3 * SECOND, [])["cuda:0"]
    assert found["headroom"] == Reading(0.1, 3 * SECOND)
    assert found["fragmentation_article"] == Reading(0.75, SECOND)


def test_headroom_is_as_old_as_the_older_of_its_two_facts() -> None:
    """Once the driver falls silent, its last word on free bytes does not make a young signal."""
    senses = Senses()
    device(senses, 1, 60.0, 40, 30)
    senses.fold([model.AllocatorState(90 * SECOND, "cuda:0", 40, 10, None)])
    assert senses.signals(90 * SECOND, [])["cuda:0"]["headroom"] == Reading(0.9, SECOND)


def test_a_pool_s_use_and_rates() -> None:
    """3 of 16 blocks are held; 8 preemptions and 20 refusals in 4 s are 0.8 and 2 per second of the last 10 s."""
    senses = Senses()
    senses.fold([blocks(1, preemptions=2, failures=5), blocks(5, preemptions=10, failures=25)])
    found = senses.signals(6 * SECOND, [])[POOL]
    assert found["kv_utilization"] == Reading(3 / 16, 5 * SECOND)
    assert found["preemption_rate"] == Reading(0.8, 5 * SECOND)
    assert found["failure_rate"] == Reading(2.0, 5 * SECOND)


def test_a_rate_is_of_the_last_ten_seconds() -> None:
    """100 preemptions, and then a minute without one: the rate is 0."""
    senses = Senses()
    senses.fold([blocks(0, preemptions=0), blocks(1, preemptions=100)])
    senses.fold([blocks(second, preemptions=100) for second in range(2, 62)])
    assert senses.signals(61 * SECOND, [])[POOL]["preemption_rate"] == Reading(0.0, 61 * SECOND)


def test_hits_are_counted_in_tokens() -> None:
    """Of 400 tokens that were looked up in the last minute, 100 were found; the samples are the tokens."""
    senses = Senses()
    for second, queried, hit in ((1, 1_000, 900), (2, 1_400, 1_000)):
        senses.fold([model.PoolWork(second * SECOND, events.origin(), 1, queried_tokens=queried, hit_tokens=hit)])
    assert senses.signals(2 * SECOND, [])[POOL]["hit_rate"] == Reading(0.25, 2 * SECOND, 400)


def test_the_next_request_s_verdict_goes_with_it() -> None:
    """While somebody waits the verdict on it is the signal; when nobody does, it is SERVED, so that a level which
    rested on it ends by its own rules; where the engine does not tell one, there is none.
    """
    senses = Senses()
    waiting, = [one for one in events.EXAMPLES if isinstance(one, model.RequestStates)]
    senses.fold([waiting])
    scope = f"{waiting.origin.model}@{waiting.origin.device}"
    found = senses.signals(20, [])[scope]
    assert found["pool_verdict"] == Reading("WAIT", 19)
    assert found["waiting"] == Reading(1.0, 19)
    senses.fold([model.RequestStates(30, waiting.origin, waiting.cache_id, 1, 1, (), (), 0)])
    assert senses.signals(40, [])[scope]["pool_verdict"] == Reading("SERVED", 30)
    senses.fold([model.RequestStates(50, waiting.origin, waiting.cache_id, 1, 1, (("waiting", "", 1),), (), 0)])
    assert "pool_verdict" not in senses.signals(60, [])[scope]


def test_errors_and_burn_rates_are_everybody_s() -> None:
    """Two errors in the last minute and the faster of two budgets are signals of each scope."""
    senses = Senses()
    device(senses, 100, 1.0, 1, 0)
    senses.fold([blocks(100)])
    senses.fold([model.OutOfMemory(second * SECOND, None, "", "") for second in (10, 90, 100)])
    standings = [Standing(ARTICLE, 0, 0, None, {300: 20.0, 3_600: 3.0}, {}),
                 Standing(ARTICLE, 0, 0, None, {300: 8.0, 3_600: 9.0}, {}),
                 Standing(ARTICLE, 0, 0, None, {300: 99.0}, {})]
    found = senses.signals(101 * SECOND, standings)
    assert set(found) == {"cuda:0", POOL}
    for signals in found.values():
        assert signals["out_of_memory"].value == 2.0
        assert signals["burn_rate"].value == 8.0


def test_applications_report_what_is_theirs() -> None:
    """The article's service signals and app.NAME are taken with their time; kvobs's own signals are not overwritten."""
    senses = Senses()
    device(senses, 1, 1.0, 1, 0)
    senses.report("cpu", 0.8, 7)
    senses.report("app.queue", 12, 8)
    found = senses.signals(9, [])["cuda:0"]
    assert (found["cpu"], found["app.queue"]) == (Reading(0.8, 7), Reading(12.0, 8))
    for name in ("headroom", "verdict", "queue", "app.", "app.Queue"):
        with pytest.raises(ValueError, match=r"may report cpu"):
            senses.report(name, 1.0, 1)


def test_a_process_without_devices_and_pools_is_a_scope() -> None:
    """Where no device and no pool is known, what the application reports is judged for the process."""
    senses = Senses()
    senses.report("app.queue", 3, 1)
    assert senses.signals(2, []) == {"process": {"app.queue": Reading(3.0, 1), "out_of_memory": Reading(0.0, 2)}}


def test_scopes_and_reports_are_bounded() -> None:
    """The 65th device, pool or reported signal is not kept."""
    senses = Senses()
    for number in range(200):
        senses.fold([model.Poll(1, "nvml", 1, (("kvobs.device.memory", (f"cuda:{number}", "free"), 1.0),)),
                     model.AllocatorState(1, f"cuda:{number}", 1, 0, None),
                     events.blocks(cache_id=number, origin=events.origin(model_name=f"m{number}"))])
    assert len(senses.signals(2, [])) == 2 * MOST_SCOPES
    for number in range(64):
        senses.report(f"app.n{number}", math.nan, 1)
    with pytest.raises(ValueError, match="may report 64"):
        senses.report("app.n64", 1.0, 1)
