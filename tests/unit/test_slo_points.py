"""Objectives as metrics: what is counted, what is absent, and what a runtime does with the configured ones."""

from __future__ import annotations

import pytest

from kvobs import model, runtime
from kvobs.config import ARTICLE, Config, Objective
from kvobs.metrics import Attributes, Metrics, Objectives, Value
from tests import events

SECOND = 10**9
FIRST = Objective(name="first", signal="time_to_first_token", target=0.9, at_most=400_000_000)


def points(metrics: Metrics) -> dict[str, dict[Attributes, Value]]:
    return {row.name: values for row, values in metrics.collect() if row.name.startswith("kvobs.slo")}


def turn(t_ns: int, ttft_ns: int | None, outcome: str = "ok", new: int = 5) -> model.Turn:
    return events.turn(t_ns=t_ns, start_ns=t_ns - SECOND, ttft_ns=ttft_ns, outcome=outcome, new_tokens=new)


def test_without_events_there_are_counts_and_no_rates() -> None:
    """Counters stand at 0, so that an alert sees the first event; burn rates and budgets are absent."""
    metrics = Metrics()
    Objectives([FIRST], metrics, 0).refresh(60 * SECOND)
    alerts = {("first", "page", "30m & 6h"): 0, ("first", "ticket", "2h & 1d"): 0, ("first", "ticket", "6h & 3d"): 0}
    assert points(metrics) == {
        "kvobs.slo.events": {("first",): 0}, "kvobs.slo.good": {("first",): 0}, "kvobs.slo.target": {("first",): 0.9},
        "kvobs.slo.alert": alerts}


def test_turns_are_judged_one_by_one() -> None:
    """Of five turns, one at the limit is good, one above it and one that waited in vain are bad, an error that came
    at once and a turn whose first token nobody timed are no events: 1 of 3, a burn rate of 6.67.
    """
    metrics = Metrics()
    objectives = Objectives([FIRST], metrics, 0)
    hasty = events.turn(t_ns=9 * SECOND, start_ns=9 * SECOND - 1, ttft_ns=None, outcome="error", new_tokens=0)
    objectives.fold([turn(SECOND, 400_000_000), turn(2 * SECOND, 400_000_001), turn(3 * SECOND, None, "cancelled", 0),
                     hasty, turn(10 * SECOND, None)])
    objectives.refresh(60 * SECOND)
    found = points(metrics)
    assert (found["kvobs.slo.good"], found["kvobs.slo.events"]) == ({("first",): 1}, {("first",): 3})
    rate = (2 / 3) / 0.1
    windows = ("30m", "6h", "2h", "1d", "3d")  # that of 14.4 over 5m & 1h cannot fire at 90 %
    assert found["kvobs.slo.burn"] == {("first", window): pytest.approx(rate) for window in windows}
    assert found["kvobs.slo.budget"] == {("first",): pytest.approx(1 - rate)}
    assert found["kvobs.slo.alert"] == {("first", "page", "30m & 6h"): 1, ("first", "ticket", "2h & 1d"): 1,
                                        ("first", "ticket", "6h & 3d"): 1}


def test_devices_are_judged_apart() -> None:
    """A million fast allocations on the CPU do not hide that all of the GPU's were slow: one window of two is good."""
    metrics = Metrics()
    objectives = Objectives([ARTICLE], metrics, 0)
    fast = (1_000_000, *16 * (0,))
    objectives.fold([model.AllocationLatencies(SECOND, "cpu", fast, 10**9),
                     *(model.Allocation(2 * SECOND, "cuda:0", 512, 12_000_001) for _ in range(3))])
    objectives.refresh(70 * SECOND)
    found = points(metrics)
    name = (ARTICLE.name,)
    assert (found["kvobs.slo.good"], found["kvobs.slo.events"]) == ({name: 1}, {name: 2})


def test_a_window_counts_once_it_is_over() -> None:
    """A window of 60 s is judged 5 s after its end, for what a source tells late, and not again."""
    metrics = Metrics()
    objectives = Objectives([ARTICLE], metrics, 0)
    objectives.fold([model.Allocation(SECOND, "cuda:0", 512, 1)])
    counted = []
    for now in (59, 64, 65, 300):
        objectives.refresh(now * SECOND)
        counted.append(points(metrics)["kvobs.slo.events"][ARTICLE.name,])
    assert counted == [0, 0, 1, 1]


def test_a_runtime_judges_what_its_sources_tell() -> None:
    """Events of the bus reach the configured objectives, and an alert that cannot fire is an availability."""
    now = [0]
    config = Config(store=None, prometheus=None, otlp="off", objectives=(FIRST,))
    found = runtime.Runtime(config, [], clock=lambda: now[0])
    found.start()
    try:
        found.bus.publish(turn(SECOND, 1))
        now[0] = 60 * SECOND
        found.tick(sample=True)
        assert points(found.metrics)["kvobs.slo.good"] == {("first",): 1}
        refused = {attributes for row, values in found.metrics.collect() if row.name == "kvobs.availability"
                   for attributes, value in values.items() if not value}
        assert {(subject, reason[:45]) for subject, reason in refused if subject.startswith("alert")} == {
            ("alert of first over 5m & 1h", "With a target of 0.9 a burn rate is at most 1")}
    finally:
        found.stop()
