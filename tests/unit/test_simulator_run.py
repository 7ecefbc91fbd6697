"""Runs of the simulator: same seed same run, what a breaker changes, and what it does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvobs.breaker import AnyOf, Leaf, Level, Phase, Policy, load_policy
from kvobs.breaker.simulator import (
    Ended,
    Request,
    Run,
    Server,
    Trace,
    compared,
    figures,
    scenario,
    simulate,
    transition_line,
    untold,
)
from kvobs.breaker.simulator._gate import CRITICAL, NORMAL, SHEDDABLE, priority

SECOND = 10**9
# About a third of what the default server does, so that a burst of the scenarios is too much for it.
SMALL = Server(blocks=1_500, slots=32, budget=2_048, step_s=0.03, token_s=2e-4)
NEVER, ALWAYS = Leaf(signal="waiting", above=1e12), Leaf(signal="waiting", above=-1.0)


def policy(*conditions: Leaf, **fields: Any) -> Policy:
    return Policy(name="test", levels=tuple(Level(condition=one) for one in conditions), escalate_s=0.0, **fields)


def load(number: int = 200, every_s: float = 0.2, output: int = 60) -> Trace:
    return Trace("even", tuple(Request(round(n * every_s * SECOND), 100 + n % 7, output) for n in range(number)))


def without(run: Run, *names: str) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(run).items() if name not in names}


def test_the_same_seed_gives_the_same_run() -> None:
    """Two runs of the same load, server, policy and seed are equal, transitions and all; another seed's priorities
    make another run.
    """
    burst = scenario("burst", limit=700)
    runs = [simulate(burst, SMALL, load_policy("default"), seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].transitions
    assert runs[0].ended != runs[2].ended


def test_a_breaker_that_never_opens_changes_nothing() -> None:
    """Under thresholds out of reach every request ends as without a breaker, to the nanosecond."""
    burst = scenario("burst", limit=700)
    never = simulate(burst, SMALL, policy(NEVER, NEVER, NEVER))
    nothing = simulate(burst, SMALL, None)
    assert without(never, "policy", "level_s") == without(nothing, "policy", "level_s")
    assert nothing.preemptions > 0
    assert never.transitions == ()


def test_a_breaker_that_always_refuses_sheds_all_that_may_be_shed() -> None:
    """From a second on, with no retries, exactly the sheddable requests are refused; normal ones are cut to the clamp,
    critical ones are not.
    """
    server = msgspec.structs.replace(SMALL, retries=0, clamp_tokens=10)
    run = simulate(load(), server, policy(ALWAYS, ALWAYS, ALWAYS), seed=5)
    seen = set()
    for one in run.ended:
        rank = priority(server, 5, one.number)
        if load().requests[one.number].arrival_ns > SECOND:
            expected = {SHEDDABLE: ("refused", 0), NORMAL: ("cut", 10), CRITICAL: ("ok", 60)}[rank]
            assert (one.outcome, one.generated) == expected
            seen.add(rank)
        elif load().requests[one.number].arrival_ns == 0:
            assert one.outcome == "ok"
    assert seen == {SHEDDABLE, NORMAL, CRITICAL}
    assert [told.level for told in run.transitions] == [1, 2, 3]


def test_refused_requests_come_back_and_their_users_waited() -> None:
    """A refused request comes back after 5 to 7.5 s, three times; its user's time to the first token has them all."""
    run = simulate(load(60), SMALL, policy(ALWAYS, ALWAYS, ALWAYS, seed=1), seed=5)
    assert {one.refusals for one in run.ended if one.outcome == "refused"} == {4}
    # Level 3 ends as soon as nobody is in the engine: who comes back then passes.
    quiet = Leaf(signal="kv_utilization", above=0.0)
    brief = [Level(condition=quiet, open_s=1.0, half_open_s=0.1) for _ in range(3)]
    run = simulate(load(60), SMALL, Policy(name="brief", levels=tuple(brief), escalate_s=0.0), seed=5)
    passed = [one for one in run.ended if one.refusals and one.outcome == "ok"]
    assert passed
    for one in passed:
        assert one.ttft_ns is not None
        assert one.ttft_ns > one.refusals * 5 * SECOND


def test_priorities_have_their_shares() -> None:
    """Of 20,000 requests the shares of each priority are within a hundredth of what was asked for."""
    server = Server(sheddable=0.25, critical=0.05)
    drawn = [priority(server, 0, number) for number in range(20_000)]
    for rank, share in ((SHEDDABLE, 0.25), (CRITICAL, 0.05), (NORMAL, 0.7)):
        assert drawn.count(rank) / 20_000 == pytest.approx(share, abs=0.01)


def test_a_probation_lets_probes_through_and_ends_well() -> None:
    """Level 3 on probation passes sheddable requests one by one as probes, and three good ones close it early."""
    busy = Leaf(signal="waiting", above=20.0, release=0.0)
    levels = tuple(Level(condition=AnyOf((busy,)), open_s=1.0, half_open_s=30.0, probe_every_s=0.1) for _ in range(3))
    flood = [Request(0, 600, 20) for _ in range(60)]
    trickle = [Request((20 + n) * SECOND, 50, 5) for n in range(60)]
    run = simulate(Trace("flood", (*flood, *trickle)), SMALL, Policy(name="p", levels=levels, escalate_s=0.0))
    ends = [told for told in run.transitions if told.level == 3 and told.after is Phase.CLOSED]
    assert ends
    assert "3 probes were good" in ends[0].reason
    began = next(told.t_ns for told in run.transitions if told.level == 3 and told.after is Phase.HALF_OPEN)
    assert ends[0].t_ns - began < 30 * SECOND


def test_a_host_without_bounds_finds_what_a_pool_without_bounds_finds() -> None:
    """One request after the other, with level 2 open and room on the host for everything, prefixes are found as in a
    pool that never evicts; the small pool alone finds fewer.
    """
    made = scenario("steady", limit=90)
    calm = Trace("calm", tuple(msgspec.structs.replace(one, arrival_ns=number * 60 * SECOND)
                               for number, one in enumerate(made.requests)), made.chunk_tokens)
    small = Server(blocks=900, host_blocks=10**6)
    offloading = simulate(calm, small, policy(ALWAYS, ALWAYS, NEVER))
    large = simulate(calm, Server(blocks=10**6), None)
    assert [one.hit for one in offloading.ended] == [one.hit for one in large.ended]
    assert sum(one.hit for one in simulate(calm, small, None).ended) < sum(one.hit for one in large.ended)
    assert offloading.fetched > 0


def test_figures_are_sums_over_requests() -> None:
    """Two good requests, one late, one slow, one cut in time, one refused: each figure by hand."""
    def ended(number: int, outcome: str, generated: int, ttft: float, tpot: float, refusals: int = 0) -> Ended:
        first = None if outcome == "refused" else round(ttft * SECOND)
        return Ended(number, outcome, 100, 10, generated, first, round(tpot * SECOND), refusals, 0, 25, 109)

    run = Run("p", (ended(0, "ok", 10, 1, 0.1), ended(1, "ok", 10, 2, 0.2), ended(2, "ok", 10, 2.1, 0.1, 1),
                    ended(3, "ok", 10, 1, 0.21), ended(4, "cut", 4, 1, 0.1), ended(5, "refused", 0, 0, 0, 4)),
              20 * SECOND, (), (), 1_000, 50, 400, 100, 0, 0, 0, 0, 7, 9)
    found = figures(run, Server())
    assert (found.requests, found.finished, found.cut, found.refused) == (6, 5, 1, 1)
    assert (found.met, found.met_share, found.met_share_of_finished) == (3, 0.5, 0.6)
    assert (found.goodput_tokens, found.goodput_per_s, found.generated_tokens) == (24, 1.2, 44)
    assert (found.cut_tokens, found.refusals, found.preemptions, found.hit_share) == (6, 5, 7, 0.3)
    assert (found.ttft_p50_s, found.ttft_p99_s) == (1.0, 2.1)
    rows = dict(row for row in compared([found]) if len(row) == 2)
    assert rows["met both objectives"] == "3 (50.00%)"


def test_a_transition_is_a_line_with_its_readings() -> None:
    """When, why, and the readings it rests on are one line."""
    run = simulate(load(5), SMALL, policy(ALWAYS, NEVER, NEVER))
    assert transition_line(run.transitions[0]) == (
        "0.25 s  Level 1 (reorganise) is open: its condition holds. [waiting 0]")


def test_signals_that_nothing_tells_are_named() -> None:
    """The article's preset rests on signals that the model has not, and the default one on all but the verdict of an
    allocator.
    """
    assert untold(load_policy("article")) == ["fragmentation_article", "cpu", "gateway_p99", "pool_use"]
    assert untold(load_policy("default")) == ["verdict"]
