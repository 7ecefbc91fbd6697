"""Policies in TOML: presets are what the documentation says, and refusals name the place and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvobs.allocator.verdict import Verdict
from kvobs.breaker import PRESETS, SIGNALS, All, AnyOf, Leaf, Level, Policy, PolicyError, load_policy, parse_policy
from kvobs.breaker._conditions import Reading, leaves
from kvobs.breaker._machine import begin, step
from kvobs.lab.breaker_vllm._run import LOOK_AHEAD

GOOD = """
name = "mine"
transitions = 30
[[level]]
any = [
    { signal = "headroom", below = 0.1, release = 0.2, for = "1.5s", max_age = "4s", min_samples = 3 },
    { all = [{ signal = "cpu", above = 0.75 }, { signal = "app.queue", above = 10 }] },
]
open = "3s"
probes = 2
[[level]]
all = [{ signal = "verdict", one_of = ["FRAGMENTED", "CAPACITY"] }]
[[level]]
any = [{ signal = "burn_rate", above = 14.4, release = 1 }]
"""


def test_a_policy_is_what_its_tables_say() -> None:
    """Conditions nest as written; what is left out has the defaults of the machine."""
    policy = parse_policy(GOOD, "here")
    assert (policy.name, policy.transitions, policy.within_s) == ("mine", 30, 60.0)
    first, second, third = policy.levels
    assert first == Level(open_s=3.0, probes=2, condition=AnyOf((
        Leaf(signal="headroom", below=0.1, release=0.2, for_s=1.5, max_age_s=4.0, min_samples=3),
        All((Leaf(signal="cpu", above=0.75), Leaf(signal="app.queue", above=10.0))))))
    assert second == Level(condition=All((Leaf(signal="verdict", one_of=("FRAGMENTED", "CAPACITY")),)))
    assert third == Level(condition=AnyOf((Leaf(signal="burn_rate", above=14.4, release=1.0),)))


def test_a_file_is_read_and_a_missing_one_is_told(tmp_path: Path) -> None:
    """A path is read as TOML; one that is not there is told with the presets' names."""
    (tmp_path / "p.toml").write_text(GOOD)
    assert load_policy(str(tmp_path / "p.toml")).name == "mine"
    with pytest.raises(PolicyError, match=r"neither a file nor one of the presets default, article, growing\."):
        load_policy(str(tmp_path / "q.toml"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_known_signals(name: str) -> None:
    """Each preset has its own name and three levels, all on signals of the table."""
    policy = load_policy(name)
    assert policy.name == name
    assert {leaf.signal for level in policy.levels for leaf in leaves(level.condition)} <= set(SIGNALS)


def test_the_article_s_preset_has_its_thresholds_and_its_caveat() -> None:
    """S9 and S11: 0.683; CPU above 75 % with hits below 82 %; gateway P99 above 800 ms; pool above 95 %."""
    policy = load_policy("article")
    found = {leaf.signal: leaf.above or leaf.below for level in policy.levels for leaf in leaves(level.condition)}
    assert found == {"fragmentation_article": 0.683, "cpu": 0.75, "hit_rate": 0.82, "gateway_p99": 0.8,
                     "pool_use": 0.95}
    assert "0.490" in policy.caveat


def test_verdicts_are_those_of_the_allocator() -> None:
    """The words of both verdict signals are the allocator's, in its order."""
    assert SIGNALS["verdict"].words == SIGNALS["pool_verdict"].words == tuple(one.value for one in Verdict)


def test_the_default_decides_on_no_raw_ratio() -> None:
    """The verdict, room, budget and preemptions; the article's rate is not in it, and it needs no caveat."""
    policy = load_policy("default")
    assert "fragmentation_article" not in {leaf.signal for level in policy.levels for leaf in leaves(level.condition)}
    assert not policy.caveat


def levels(policy: Policy, told: Sequence[tuple[float, float, float]]) -> list[int]:
    """The level after each second with (requests that wait, share of the pool in use, preemptions per second)."""
    state, found = begin(policy, 0), []
    for second, values in enumerate(told, 1):
        now = second * 10**9
        names = ("waiting", "kv_utilization", "preemption_rate")
        signals = {name: Reading(value, now) for name, value in zip(names, values, strict=True)}
        state, _ = step(policy, state, signals, now)
        found.append(state.level)
    return found


def test_the_default_begins_where_requests_preempt_each_other() -> None:
    """A full pool with a queue and few preemptions opens nothing; many preemptions open level 1, which is lifted once
    there are none.
    """
    policy = load_policy("default")
    found = levels(policy, 10 * [(4.0, 0.95, 0.1)] + 8 * [(4.0, 0.95, 0.7)] + 12 * [(4.0, 0.8, 0.0)])
    assert set(found[:10]) == {0}
    assert found[17] == 1
    assert found[-1] == 0


def test_the_lab_s_policy_looks_ahead_while_requests_wait() -> None:
    """Level 1 opens once requests wait at a nearly full pool, stays open while they wait though its own action has
    the pool half empty, and is lifted when nobody waits; a queue at an empty pool opens nothing.
    """
    policy = load_policy(str(LOOK_AHEAD))
    waiting = 9 * [(4.0, 0.2, 0.0)] + 4 * [(4.0, 0.95, 0.0)] + 46 * [(4.0, 0.5, 0.0)]
    found = levels(policy, waiting + 4 * [(0.0, 0.5, 0.0)])
    assert set(found[:9]) == {0}
    assert set(found[12:59]) == {1}
    assert found[-1] == 0


@pytest.mark.parametrize(("old", "new", "words"), [
    ('name = "mine"', "name = 3", "name must be a text, and is 3"),
    ('name = "mine"', 'nme = "mine"', "the policy has no key 'nme'; did you mean 'name'?"),
    ("transitions = 30", "transitions = 5", "the policy has transitions = 5; allowed is a whole number from 6 to"),
    ('open = "3s"', 'open = "3 hours"', "level 1 has open = '3 hours'; allowed is a duration"),
    ('open = "3s"', 'open = "3s"\nlongest_open = "1s"', "level 1 has longest_open below open"),
    ("probes = 2", "probes = 0", "level 1 has probes = 0; allowed is a whole number from 1"),
    ('signal = "headroom"', 'signal = "headrom"', "there is no signal 'headrom'; allowed are verdict"),
    ("release = 0.2", "release = 0.05", "level 1, headroom has its release on the wrong side of below"),
    ("below = 0.1", "below = nan", "level 1, headroom has below = nan; allowed is a finite number"),
    ("below = 0.1", "below = 0.1, above = 0.5", "level 1, headroom needs above or below, and has above and below"),
    ('one_of = ["FRAGMENTED", "CAPACITY"]', "above = 1", "level 2, verdict needs one_of, and has above"),
    ('"CAPACITY"', '"FULL"', "allowed are SERVED, GROW"),
    ('all = [{ signal = "verdict"', 'some = [{ signal = "verdict"', "level 2 has no key 'some'"),
    ('any = [{ signal = "burn_rate", above = 14.4, release = 1 }]', "any = []", "level 3 needs a list of conditions"),
    ('any = [{ signal = "burn_rate", above = 14.4, release = 1 }]', "any = [7]", "level 3 has a condition 7"),
    ("any = [{ signal", "[[level]]\nany = [{ signal", "needs 3 tables headed [[level]]"),
    ("[[level]]", "[[level", "is not TOML"),
])
def test_refusals(old: str, new: str, words: str) -> None:
    """One sentence with the policy's name, the table, what is wrong and what is allowed."""
    with pytest.raises(PolicyError) as refused:
        parse_policy(GOOD.replace(old, new), "here.toml")
    assert words in str(refused.value)
    assert "here.toml" in str(refused.value)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize("depth", [20, 5_000])
def test_nesting_is_bounded(depth: int) -> None:
    """Conditions may not nest without end."""
    nested = "{ any = [" * depth + '{ signal = "cpu", above = 1 }' + "] }" * depth
    with pytest.raises(PolicyError, match="nest"):
        parse_policy(GOOD.replace('{ signal = "burn_rate", above = 14.4, release = 1 }', nested), "here")
