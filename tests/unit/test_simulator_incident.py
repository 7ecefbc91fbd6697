"""Past incidents under another policy: signals from recorded points, and what came after, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvobs import model
from kvobs.allocator.verdict import Verdict
from kvobs.breaker import SIGNALS, Leaf, Level, Phase, Policy
from kvobs.breaker._sense import Senses
from kvobs.breaker.simulator import MAPPING, WANTED, Trouble, WouldHave, replayed
from kvobs.breaker.simulator._recorded import Growth, Points, Recorded
from kvobs.catalog import BY_NAME
from kvobs.store import Point

SECOND = 10**9
NEVER = Leaf(signal="waiting", above=1e12)
WHO = {"model": "m", "device": "cpu", "cache": "c"}
ORIGIN = model.Origin("vllm", "m", "c", "cpu", "")


def policy(condition: Leaf) -> Policy:
    return Policy(name="p", jitter=0.0, levels=tuple(Level(condition=one) for one in (condition, NEVER, NEVER)))


def counter(values: Sequence[float], **attributes: str) -> list[Point]:
    """A series with a value per second, from second 0 on."""
    return [Point("p", at * SECOND, dict(attributes), value, None, None, None) for at, value in enumerate(values)]


def read(found: dict[str, Points]) -> dict[str, float | str]:
    return {name: one.value for name, one in Recorded().signals(0, found).items()}


def test_every_metric_and_signal_of_the_mapping_exists() -> None:
    """Metrics are rows of the catalog, signals are ones that policies may name, each once."""
    assert all(name in BY_NAME for name in WANTED)
    assert all(one.signal in SIGNALS for one in MAPPING)
    assert len({one.signal for one in MAPPING}) == len(MAPPING)


def test_states_become_signals() -> None:
    """Utilization, waiting, verdict, burn, headroom and fragmentation of an instant, by hand."""
    found: dict[str, Points] = {
        "kvobs.kv.blocks": [
            *((WHO | {"state": state}, value) for state, value in (("used", 30.0), ("cached", 20.0), ("free", 50.0),
                                                                   ("pinned", 1.0))),
            *(({"model": "n", "device": "cpu", "cache": "c", "state": state}, value)
              for state, value in (("used", 3.0), ("free", 1.0)))],
        "kvobs.requests": [({"model": "m", "state": "running"}, 9.0), ({"model": "m", "state": "waiting"}, 3.0),
                           ({"model": "m", "state": "preempted"}, 2.0)],
        "kvobs.request.next": [({"model": "m", "verdict": "RECLAIM"}, 4.0), ({"model": "n", "verdict": "WAIT"}, 1.0)],
        "kvobs.slo.burn": [({"objective": "a", "window": "5m"}, 20.0), ({"objective": "a", "window": "1h"}, 2.0),
                           ({"objective": "b", "window": "5m"}, 3.0), ({"objective": "b", "window": "1h"}, 4.0),
                           ({"objective": "c", "window": "5m"}, 50.0)],
        "kvobs.allocator.usage": [({"device": "cuda:0", "state": "allocated"}, 60.0),
                                  ({"device": "cuda:0", "state": "unused"}, 20.0),
                                  ({"device": "cuda:1", "state": "allocated"}, 99.0)],
        "kvobs.device.memory": [({"device": "cuda:0", "part": "free"}, 20.0),
                                ({"device": "cuda:1", "part": "torch"}, 99.0)],
        "kvobs.kv.fragmentation.article": [(WHO, 0.2), (WHO, 0.7)]}
    read_ = read(found)
    assert read_ == {"kv_utilization": 0.75, "waiting": 5.0, "pool_verdict": "WAIT", "burn_rate": 3.0,
                     "headroom": pytest.approx(0.4), "fragmentation_article": 0.7}


def test_what_is_not_recorded_is_not_told() -> None:
    """Without points there are no readings."""
    assert read({}) == {}


@pytest.mark.parametrize("word", [verdict.value for verdict in Verdict])
def test_a_verdict_keeps_its_word(word: str) -> None:
    """Every verdict of the allocator passes as it is."""
    assert read({"kvobs.request.next": [({"model": "m", "verdict": word}, 1.0)]}) == {"pool_verdict": word}


def test_growth_counts_from_what_was_first_seen() -> None:
    """A first value is no growth, a series that appears later began at 0, and one that begins anew counts from 0."""
    growth = Growth(2)

    def grown(at: int, **values: float) -> float:
        points: Points = [({"series": name}, value) for name, value in values.items()]
        return sum(value for _, value in growth.add(at * SECOND, points))

    assert [grown(0, a=100), grown(1, a=103), grown(2, a=103, b=4), grown(3, a=104, b=4)] == [0, 3, 7, 5]
    assert grown(4, a=2, b=4) == 3


def test_recorded_rates_are_those_of_the_live_senses() -> None:
    """The same pool, told as events to the running breaker's senses and as points here, gives the same signals."""
    senses, recorded = Senses(), Recorded()
    preemptions = failures = queried = hit = 0
    for at in range(100):
        preemptions += at % 7 == 3
        failures += at % 5
        queried += 10 * (at % 4)
        hit += 3 * (at % 4)
        t_ns = at * SECOND
        senses.fold([model.Blocks(t_ns, ORIGIN, 0, 1, at, 50, 100, 0, failures, preemptions),
                     model.PoolWork(t_ns, ORIGIN, 0, queried_tokens=queried, hit_tokens=hit)])
        found: dict[str, Points] = {
            "kvobs.kv.blocks": [(WHO | {"state": state}, float(value))
                                for state, value in (("used", at), ("cached", 50), ("free", 100))],
            "kvobs.kv.preemptions": [(WHO, float(preemptions))], "kvobs.kv.block.failures": [(WHO, float(failures))],
            "kvobs.prefix.queried": [(WHO | {"admission": "first"}, float(queried))],
            "kvobs.prefix.hit": [(WHO | {"admission": "first"}, float(hit))]}
        live = senses.signals(t_ns, ())["m@cpu"]
        mine = recorded.signals(t_ns, found)
        for name in ("kv_utilization", "preemption_rate", "failure_rate", "hit_rate"):
            if at > 1 and name in live:
                assert mine[name].value == pytest.approx(live[name].value), (at, name)
                assert mine[name].samples == live[name].samples


def incident(horizon_s: float) -> WouldHave:
    """Two preemptions a second from second 20 to 40, an error at second 60, a missed objective at second 200."""
    preemptions = [0.0] * 20 + [2.0 * n for n in range(1, 22)] + [42.0] * 259
    errors = counter([0.0] * 60 + [1.0] * 240, model="m")[60:]  # the series appears with its first error
    events = counter([float(at) for at in range(300)], objective="a")
    good = counter([float(at) - (at >= 200) for at in range(300)], objective="a")
    made, = replayed("p", {
        "kvobs.kv.preemptions": counter(preemptions, **WHO), "kvobs.out_of_memory": errors,
        "kvobs.slo.events": events, "kvobs.slo.good": good},
        [policy(Leaf(signal="preemption_rate", above=1.0))], horizon_s)
    return made


def test_an_incident_is_replayed_to_the_second() -> None:
    """More than one preemption a second over 10 s holds from second 25 to 45: level 1 opens, is on probation from then
    on, and closes after 10 s of it.
    """
    told = incident(60).transitions
    assert [(one.t_ns // SECOND, one.level, one.after) for one in told] == [
        (25, 1, Phase.OPEN), (45, 1, Phase.HALF_OPEN), (55, 1, Phase.CLOSED)]
    assert dict(told[0].readings) == {"preemption_rate": 1.2}


@pytest.mark.parametrize(("horizon_s", "foreseen"), [(60, 1), (5, 1), (4, 0)])
def test_trouble_is_foreseen_within_the_horizon(horizon_s: float, foreseen: int) -> None:
    """The burst begins with the opening and is not foreseen; the error 5 s after the level closed is, if the horizon
    reaches so far; the miss at 200 is not. The opening was followed by the rest of the burst.
    """
    made = incident(horizon_s)
    assert made.troubles == (
        Trouble("preemption burst", 25 * SECOND, 44 * SECOND), Trouble("out of memory", 60 * SECOND, 60 * SECOND),
        Trouble("SLO miss", 200 * SECOND, 200 * SECOND))
    assert (made.opened, made.followed, made.foreseen) == (1, 1, foreseen)
    assert (made.precision, made.recall) == (1.0, foreseen / 3)


def test_trouble_with_pauses_within_the_horizon_is_one() -> None:
    """Errors at seconds 10, 15 and 30 are two troubles with a horizon of 10 s."""
    series = counter([0.0] * 10 + [1.0] * 5 + [2.0] * 15 + [3.0] * 5, model="m")
    made, = replayed("p", {"kvobs.out_of_memory": series}, [policy(NEVER)], 10)
    assert [(one.first_ns // SECOND, one.last_ns // SECOND) for one in made.troubles] == [(10, 15), (30, 30)]
    assert (made.precision, made.recall) == (None, 0.0)
    assert made.signals == ("out_of_memory",)


def test_without_trouble_there_is_no_recall() -> None:
    """A quiet store has neither precision nor recall, and no transition."""
    made, = replayed("p", {"kvobs.kv.preemptions": counter([5.0] * 30, **WHO)}, [policy(NEVER)], 60)
    assert (made.opened, made.troubles, made.precision, made.recall) == (0, (), None, None)
    assert made.instants == 30
