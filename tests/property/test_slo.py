"""Objectives against a plain second account that keeps every event and looks at all of them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs import model
from kvobs.catalog import LATENCY_BOUNDS_NS
from kvobs.config import Objective
from kvobs.slo import ALERTS, History, Ledger, budget_left, burn_rate, firing, refusal
from kvobs.slo._burn import RESOLUTION_NS

SECOND = 10**9
ORIGIN = model.Origin("test", "m", "c", "cpu", "float32")
ALLOCATIONS = Objective(name="a", signal="allocation_latency", target=0.995, at_most=12_000_000, quantile=0.95,
                        window_s=10)
CALM = Objective(name="p", signal="preemptions", target=0.99, at_most=1, window_s=10)
WHOLE = Objective(name="o", signal="out_of_memory", target=0.99, window_s=10)


def step(t_ns: int) -> model.Step:
    return model.Step(t_ns, 1, 0, ORIGIN, 1, False, 1, 0, 0, 0, 0, 0, 0)


def counted(t_ns: int, device: str, latencies: list[int]) -> model.AllocationLatencies:
    counts = [0] * (len(LATENCY_BOUNDS_NS) + 1)
    for latency in latencies:
        counts[sum(latency > bound for bound in LATENCY_BOUNDS_NS)] += 1
    return model.AllocationLatencies(t_ns, device, tuple(counts), sum(latencies))


latencies = st.sampled_from([1, 11_999_999, 12_000_000, 12_000_001, 10**9, 5 * 10**9])
times = st.lists(st.integers(0, 120 * SECOND), max_size=40).map(sorted)


def standing(ledger: Ledger, now_ns: int) -> tuple[int, int]:
    found, = ledger.standings(now_ns)
    return found.good, found.events


@given(times, st.data())
def test_windows_of_allocations_are_those_counted_one_by_one(at: list[int], data: st.DataObject) -> None:
    """Exact and counted latencies, two devices, looked at in between: good and all windows are the plain account's."""
    ledger = Ledger([ALLOCATIONS], 0)
    seen: dict[tuple[int, str], list[int]] = {}
    for t_ns in at:
        device = data.draw(st.sampled_from(["cpu", "vgpu:0"]))
        took = data.draw(st.lists(latencies, min_size=1, max_size=25))
        seen.setdefault((t_ns // (10 * SECOND), device), []).extend(took)
        if data.draw(st.booleans()):
            ledger.fold([counted(t_ns, device, took)])
        else:
            ledger.fold(model.Allocation(t_ns, device, 1, latency) for latency in took)
        if data.draw(st.booleans()):
            ledger.standings(t_ns)
    good = sum(Fraction(sum(one <= 12_000_000 for one in took), len(took)) >= Fraction(95, 100)
               for took in seen.values())
    assert standing(ledger, 200 * SECOND) == (good, len(seen))


@given(times, st.data())
def test_windows_of_work_are_those_counted_one_by_one(at: list[int], data: st.DataObject) -> None:
    """Preemptions (grown counts of two pools) and OOM errors spoil the windows that they fall into, and no other."""
    calm, whole = Ledger([CALM], 0), Ledger([WHOLE], 0)
    preempted: dict[int, int] = {}
    failed: dict[int, bool] = {}
    grown = [0, 0]
    for t_ns in at:
        window = t_ns // (10 * SECOND)
        what = data.draw(st.sampled_from(["step", "blocks", "oom"]))
        if what == "step":
            event: model.Event = step(t_ns)
            preempted.setdefault(window, 0)
            failed.setdefault(window, False)
        elif what == "blocks":
            pool = data.draw(st.sampled_from([0, 1]))
            more = data.draw(st.integers(0, 2))
            grown[pool] += more
            event = model.Blocks(t_ns, ORIGIN, pool, 1, 0, 0, 0, 0, 0, grown[pool])
            if more:
                preempted[window] = preempted.get(window, 0) + more
        else:
            event = model.OutOfMemory(t_ns, ORIGIN, "", "")
            failed[window] = True
        calm.fold([event])
        whole.fold([event])
    assert standing(calm, 200 * SECOND) == (sum(count <= 1 for count in preempted.values()), len(preempted))
    assert standing(whole, 200 * SECOND) == (sum(not bad for bad in failed.values()), len(failed))


@given(st.lists(st.tuples(st.integers(0, 60 * SECOND), st.integers(-20 * SECOND, 20 * SECOND)), max_size=30))
def test_late_events_are_counted_somewhere(events: list[tuple[int, int]]) -> None:
    """However late events come, as many windows are judged as at least one event fell into, and none twice."""
    ledger, now, opened = Ledger([WHOLE], 0), 0, set()
    for ahead, shift in events:
        now += ahead
        ledger.standings(now)
        t_ns = max(0, now + shift)
        closed = (now - 5 * SECOND) // (10 * SECOND) - 1
        opened.add(max(t_ns // (10 * SECOND), closed + 1))
        ledger.fold([step(t_ns)])
    assert standing(ledger, now + 60 * SECOND) == (len(opened), len(opened))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 4_000), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=300),
       st.sampled_from([0.9, 0.99, 0.995, 0.9999]))
def test_burn_rates_are_those_of_all_events(told: list[tuple[int, int, int]], target: float) -> None:
    """Over days, each window's rate is bad / all / (1 - target) of the events in it, begun at a kept sample."""
    objective = Objective(name="x", signal="out_of_memory", target=target)
    history, now = History(0), 0
    kept, everything = [(0, 0, 0)], [0, 0]
    for ahead, good, bad in told:
        now += ahead * SECOND
        history.add(good, good + bad)
        everything[0] += bad
        everything[1] += good + bad
        history.keep(now)
        if now - kept[-1][0] >= RESOLUTION_NS:
            kept.append((now, *everything))
    for seconds in {seconds for alert in ALERTS for seconds in (alert.short_s, alert.long_s)}:
        _, bad, events = next((one for one in reversed(kept) if one[0] <= now - seconds * SECOND), kept[0])
        bad, events = everything[0] - bad, everything[1] - events
        rate = burn_rate(history, objective, now, seconds)
        if not events:
            assert rate is None
        else:
            assert rate == pytest.approx(float(Fraction(bad, events) / (1 - Fraction(str(target)))))
    left = budget_left(history, objective, now)
    assert left is None or left == pytest.approx(1 - (burn_rate(history, objective, now, 259_200) or 0))
    for alert in ALERTS:
        rates = [burn_rate(history, objective, now, seconds) for seconds in (alert.short_s, alert.long_s)]
        assert firing(history, objective, now, alert) == (None not in rates and min(map(float, rates)) > alert.factor)


@given(st.floats(0.001, 0.99999), st.sampled_from(ALERTS))
def test_an_alert_is_refused_exactly_if_nothing_can_fire_it(target: float, alert: object) -> None:
    """With nothing but bad events an alert fires, unless its refusal says that it cannot."""
    assert isinstance(alert, type(ALERTS[0]))
    objective = Objective(name="x", signal="out_of_memory", target=target)
    history = History(0)
    history.add(0, 1_000)
    edge = abs(1 / (1 - target) / alert.factor - 1) < 1e-8
    assert edge or firing(history, objective, SECOND, alert) == (not refusal(objective, alert))


def test_a_window_that_is_longer_than_the_alert_s_is_refused() -> None:
    """An objective judged by windows of 600 s has no alert over 5 minutes, and the reason says so."""
    slow = Objective(name="x", signal="out_of_memory", target=0.99, window_s=600)
    assert "longer than the 300 s" in refusal(slow, ALERTS[0])
    assert refusal(slow, ALERTS[1]) == ""
