"""What the breaker's levels do to the model engine, and what the model tells the breaker."""

from __future__ import annotations

import pytest

from kvobs.breaker import SIGNALS, Leaf, Level, Phase, Policy, Reading
from kvobs.breaker.simulator import Request, Server
from kvobs.breaker.simulator._engine import Engine, Job
from kvobs.breaker.simulator._gate import CRITICAL, NORMAL, SHEDDABLE, Gate, priority
from kvobs.breaker.simulator._signals import TOLD, Told

SECOND = 10**9
SERVER = Server(blocks=10, budget=64, step_s=1.0, token_s=0.0, context_s=0.0, clamp_tokens=5)
POLICY = Policy(name="by level", jitter=0.0, escalate_s=0.0, transitions=100, levels=tuple(
    Level(condition=Leaf(signal="app.level", above=number - 0.5), open_s=0.0, closed_s=0.0, half_open_s=100.0,
          probe_every_s=1.0) for number in (1, 2, 3)))
ASKED = Request(0, 40, 50)


def engine_with_a_cached_chunk() -> Engine:
    engine = Engine(SERVER, 16)
    engine.pool.take(1)
    engine.pool.register(1)
    engine.pool.let_go([1], 0)
    return engine


class Driven:
    """A gate whose machine follows one signal, the level that it should have."""

    def __init__(self, engine: Engine) -> None:
        self.gate, self.now = Gate(POLICY, engine, 0), 0

    def go(self, level: int, ticks: int = 4) -> None:
        for _ in range(ticks):
            self.now += SECOND
            self.gate.tick({"app.level": Reading(float(level), self.now)}, self.now)


def number_of(rank: str, start: int = 0) -> int:
    return next(number for number in range(start, 10_000) if priority(SERVER, 0, number) == rank)


def test_level_1_admits_with_care_and_drops_the_cache_of_an_idle_engine() -> None:
    """While level 1 is open the engine is careful and nothing is cached once it is idle; afterwards it is as before."""
    engine = engine_with_a_cached_chunk()
    engine.arrive(Job(0, ASKED, 50, 0))
    driven = Driven(engine)
    driven.go(1)
    assert (engine.careful, engine.pool.offloading, engine.pool.cached) == (True, False, 1)  # not idle
    engine.waiting.clear()
    driven.go(1)
    assert (engine.pool.cached, engine.pool.dropped, engine.pool.free) == (0, 1, 10)
    driven.go(0)
    assert not engine.careful


def test_level_2_moves_what_is_idle_to_the_host() -> None:
    """While level 2 is open, a chunk that nobody held for a second is on the host; afterwards nothing more goes there
    and what is there can still be found.
    """
    engine = engine_with_a_cached_chunk()
    engine.arrive(Job(0, ASKED, 50, 0))  # while level 1 alone is open it would drop the chunk of an idle engine
    driven = Driven(engine)
    driven.go(2)
    assert engine.pool.offloading
    assert (engine.pool.cached, engine.pool.offloaded, engine.pool.found([1], 1)) == (0, 1, (1, 0, 1))
    driven.go(0, 1)
    assert not engine.pool.offloading
    assert engine.pool.found([1], 1) == (1, 0, 1)


def test_level_3_limits_by_priority() -> None:
    """Open, level 3 refuses sheddable requests, clamps normal ones, and passes critical ones; closed, all pass."""
    driven = Driven(Engine(SERVER, 16))
    ranks = (SHEDDABLE, NORMAL, CRITICAL)
    assert [driven.gate.limit(number_of(rank), ASKED, driven.now) for rank in ranks] == [50, 50, 50]
    driven.go(3)
    assert [driven.gate.limit(number_of(rank), ASKED, driven.now) for rank in ranks] == [None, 5, 50]
    assert driven.gate.limit(number_of(NORMAL), Request(0, 40, 3), driven.now) == 3


def test_a_failed_probe_opens_level_3_again() -> None:
    """On probation one sheddable request passes in full and others do not; if it was preempted the level is open."""
    driven = Driven(Engine(SERVER, 16))
    driven.go(3)
    driven.go(2, 1)
    assert driven.gate.transitions[-1].after is Phase.HALF_OPEN
    first = number_of(SHEDDABLE)
    second = number_of(SHEDDABLE, first + 1)
    assert [driven.gate.limit(number, ASKED, driven.now) for number in (first, second)] == [50, None]
    job = Job(first, ASKED, 50, 0)
    job.outcome, job.preemptions = "ok", 1
    driven.gate.ended(job, in_time=True)
    driven.go(2, 1)
    assert driven.gate.transitions[-1].reason.endswith("a probe failed.")
    assert driven.gate.limit(second, ASKED, driven.now) is None


def test_time_is_counted_by_level() -> None:
    """Levels open and close one a tick: of ten seconds, each tick's second goes to the level before it."""
    driven = Driven(Engine(SERVER, 16))
    driven.go(3, 5)  # opens 1, 2, 3 at seconds 1, 2 and 3
    assert driven.gate.seconds == [1.0, 1.0, 1.0, 2.0]


def test_the_model_tells_its_signals() -> None:
    """Three requests on ten blocks: one of 100 tokens runs on 4 of its blocks after a step, two wait."""
    engine = Engine(SERVER, 16)
    told = Told(engine)
    for number in range(3):
        engine.arrive(Job(number, Request(0, 100, 1), 1, 0))
    engine.schedule(0)
    engine.complete(SECOND)
    signals = told.signals(SECOND)
    assert {name: one.value for name, one in signals.items()} == {
        "kv_utilization": 0.4, "headroom": 0.6, "waiting": 2.0, "pool_verdict": "WAIT", "out_of_memory": 0.0}
    assert set(signals) <= set(TOLD) <= set(SIGNALS)


def test_rates_and_errors_of_the_model_are_told() -> None:
    """Failures and preemptions are rates over 10 s; a request that ended out of memory is an error, and a missed one
    burns its objective's budget.
    """
    engine = Engine(SERVER, 16)
    told = Told(engine)
    told.signals(0)
    engine.failures, engine.preemptions = 5, 2
    job = Job(0, ASKED, 50, 0)
    job.outcome, job.ended_ns = "out_of_memory", 9 * SECOND
    told.ended(job)
    found = told.signals(10 * SECOND)
    assert (found["failure_rate"].value, found["preemption_rate"].value) == (0.5, 0.2)
    assert found["out_of_memory"].value == 1.0
    assert found["burn_rate"].value == pytest.approx(100.0)
