"""The reference run on vLLM's real engine: every figure of kvobs is that of an account that shares no code with it."""

from __future__ import annotations

import itertools

import pytest

from tests.vllm_engine import Scene, differences, interpreters, lives, phases_by_request, scene

COUNTS = {"preemptions": 4, "evictions": 29, "failures": 101}
BLOCK_BYTES = 2 * 2 * 2 * 32 * 32 * 2  # K and V, layers, heads, head size, tokens, bytes of bfloat16


@pytest.fixture(scope="module", params=interpreters() or [""])
def run(request: pytest.FixtureRequest) -> Scene:
    """The reference run."""
    return scene(request.param, "pressure")


def test_every_figure_is_the_accounts_at_every_call(run: Scene) -> None:
    """After each plan and each update, states of the pool and counts are those of a classification of all blocks."""
    assert len(run["looks"]) > 300
    assert differences(run) == []


def test_the_states_add_up_to_the_pool(run: Scene) -> None:
    """Used, cached, free and pinned blocks are 24 at every call, by the account and by kvobs, and none is left over."""
    states = ("used", "cached", "free", "pinned")
    for look in run["looks"]:
        assert sum(look["account"][name] for name in states) == sum(look["kvobs"][name] for name in states) == 24
        assert look["unexplained"] == 0


def test_the_run_is_the_reference_run(run: Scene) -> None:
    """So many preemptions, evictions and failures happen, and vLLM's own prefix counters agree with the account."""
    sums = run["sums"]
    assert {name: sums[name] for name in COUNTS} == COUNTS
    assert (sums["queried_tokens"], sums["hit_tokens"]) == (run["reported"]["queries"], run["reported"]["hits"])
    assert (sums["resumed_queried_tokens"], sums["resumed_hit_tokens"]) == (
        run["reported"]["preempted_queries"], run["reported"]["preempted_hits"])


def test_victims_and_moments_are_the_accounts(run: Scene) -> None:
    """Who was preempted, in which step, for whom, and what it lost."""
    told = [{name: one[name] for name in ("step", "request", "blocks", "cause", "wanted_by")}
            | {"tokens": one["tokens_lost"]} for one in run["kvobs"]["preemptions"]]
    assert told == run["preemptions"]
    for one in run["kvobs"]["preemptions"]:
        assert [one["request"], one["blocks"]] in one["holders"]
        assert sum(blocks for _, blocks in one["holders"]) <= 23


def test_evictions_are_told_in_the_step_in_which_they_happen(run: Scene) -> None:
    """Per step, as many ages and idle times as blocks that the account saw lose their content."""
    by_step: dict[int, int] = {}
    for one in run["kvobs"]["evictions"]:
        assert sum(one["ages"]) == sum(one["idles"])
        assert 0 <= one["idles_sum_ns"] <= one["ages_sum_ns"]
        by_step[one["step"]] = by_step.get(one["step"], 0) + sum(one["ages"])
    assert by_step == {step: sum(other == step for other, _ in run["evictions"]) for step, _ in run["evictions"]}


def test_phases_tile_each_requests_life(run: Scene) -> None:
    """From arrival to end without gap or overlap, in the order in which the account saw them, within the turn."""
    assert lives(run) == run["lives"]
    turns = {turn["start_ns"]: turn for turn in run["kvobs"]["turns"]}
    assert len(turns) == 8
    for _, phases in phases_by_request(run):
        turn = turns[phases[0]["start_ns"]]
        assert phases[-1]["t_ns"] == turn["t_ns"]
        assert all(one["t_ns"] == then["start_ns"] for one, then in itertools.pairwise(phases))
        assert [one["outcome"] for one in phases] == [""] * (len(phases) - 1) + ["ok"]
        first = next(one for one in phases if one["phase"] == "decode")
        assert turn["ttft_ns"] == first["start_ns"] - turn["start_ns"]


def test_turns_are_the_outputs(run: Scene) -> None:
    """Eight requests of 71 tokens that generated 100 each; their steps computed what the scheduler planned."""
    for turn in run["kvobs"]["turns"]:
        assert (turn["prompt_tokens"], turn["new_tokens"], turn["outcome"]) == (71, 100, "ok")
        assert (turn["cached_tokens"], turn["kv_bytes"]) == (0, 6 * BLOCK_BYTES)
    assert [len(tokens) for (tokens,) in run["tokens"]] == [100] * 8


def test_each_request_has_one_span_with_its_phases(run: Scene) -> None:
    """One root per request, its children are the phases in order and in time, its events what happened to it."""
    roots = {span["attributes"]["kvobs.request"]: span for span in run["spans"]
             if "kvobs.request" in span["attributes"]}
    assert set(roots) == set(run["lives"])
    for name, root in roots.items():
        children = sorted((span for span in run["spans"] if span["parent"] == root["id"]),
                          key=lambda span: span["start"])
        assert [span["name"] for span in children] == run["lives"][name]
        assert (children[0]["start"], children[-1]["end"]) == (root["start"], root["end"])
        names = [event["name"] for event in root["events"]]
        victims = [one for one in run["preemptions"] if one["request"] == name]
        assert names.count("kvobs.preempted") == len(victims)
        assert names.count("kvobs.scheduled") == len(victims) + 1
        assert [event["kvobs.tokens_lost"] for event in root["events"] if event["name"] == "kvobs.preempted"] == [
            one["tokens"] for one in victims]
        assert ("kvobs.allocation_failed" in names) == any(one[1] == name for one in run["failures"])
    evicted = sum(event.get("kvobs.blocks", 0) for root in roots.values() for event in root["events"]
                  if event["name"] == "kvobs.prefix_evicted")
    assert evicted == len(run["evictions"])


def test_metrics_and_store_have_what_the_events_say(run: Scene) -> None:
    """The last points and the rows that another process reads are the account's."""
    points, before = run["points"], run["looks"][-2]["account"]
    assert sum(points["kvobs.kv.preemptions"].values()) == COUNTS["preemptions"]
    assert sum(points["kvobs.kv.block.failures"].values()) == COUNTS["failures"]
    assert {key.rsplit("|", 1)[-1]: value for key, value in points["kvobs.kv.blocks"].items()} == {
        name: before[name] for name in ("used", "cached", "free", "pinned")}
    assert {key.rsplit("|", 1)[-1]: value for key, value in points["kvobs.kv.block.evictions"].items()} == {
        "pressure": COUNTS["evictions"], "dropped": 0}
    assert [one["request"] for one in run["store"]["preemptions"]] == [one["request"] for one in run["preemptions"]]
    assert sorted((one["request"], one["phase"]) for one in run["store"]["phases"]) == sorted(
        (one["request"], one["phase"]) for one in run["kvobs"]["phases"])
    last = run["store"]["pools"][-1]
    assert (last["evictions"], last["dropped"], last["pinned"]) == (COUNTS["evictions"], before["cached"], 1)


def test_an_emptied_pool_is_told_at_once(run: Scene) -> None:
    """A reset of the idle engine's prefix cache leaves 23 free blocks, and kvobs says so without a further step."""
    last = run["looks"][-1]
    assert (last["where"], last["kvobs"]["free"], last["kvobs"]["cached"]) == ("reset", 23, 0)


def test_the_engine_is_not_affected(run: Scene) -> None:
    """The tokens are the same with kvobs and without, and what it patched is restored by identity."""
    assert run["patched"] >= 15
    assert run["left"] == []
    assert run["published_off"] == 0
    assert run["tokens_off"] == run["tokens"]


def test_what_is_observed_is_said(run: Scene) -> None:
    """The engine core is observed, and a recount of all blocks found none changed unseen."""
    assert run["availability"]["vllm engine core"] == [True, ""]
    assert run["kvobs"]["failed"] == []
