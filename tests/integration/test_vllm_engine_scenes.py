"""Scenes on vLLM's real engine beside the reference run: prefixes, aborts, policies, groups of layers, drafts."""

from __future__ import annotations

import itertools

import pytest

from tests.vllm_engine import differences, interpreters, lives, phases_by_request, scene

SIZE = 32


@pytest.fixture(scope="module", params=interpreters() or [""])
def python(request: pytest.FixtureRequest) -> str:
    """A Python with vLLM."""
    return str(request.param)


@pytest.mark.parametrize("name", ["prefixes", "aborts", "priorities", "overlapped", "sliding", "drafts"])
def test_every_figure_is_the_accounts_at_every_call(python: str, name: str) -> None:
    """States, counts, tokens, victims, moments, phases and first tokens are those of the account, whatever happens."""
    seen = scene(python, name)
    # Of several groups of layers evicted content is not looked for.
    assert differences(seen, *(["recomputed_evicted_tokens"] if name == "sliding" else [])) == []
    assert all(look["unexplained"] == 0 for look in seen["looks"])
    assert [(one["step"], one["request"], one["blocks"], one["cause"], one["wanted_by"], one["tokens_lost"])
            for one in seen["kvobs"]["preemptions"]] == [
        (one["step"], one["request"], one["blocks"], one["cause"], one["wanted_by"], one["tokens"])
        for one in seen["preemptions"]]
    assert lives(seen) == seen["lives"]
    for _, phases in phases_by_request(seen):
        assert all(one["t_ns"] == then["start_ns"] for one, then in itertools.pairwise(phases))
    turns = {turn["session"]: turn for turn in seen["kvobs"]["turns"]}
    for request, (after, before) in seen["first"].items():
        assert after <= turns[request]["start_ns"] + turns[request]["ttft_ns"] <= before, request
    assert seen["kvobs"]["failed"] == []


def test_shared_prefixes_are_hits_and_touches(python: str) -> None:
    """Two of three requests find the two full blocks they share; one of two samples finds its prompt's first block."""
    seen = scene(python, "prefixes")
    first = seen["sums_between"][0]
    assert (first["touches"], first["hit_tokens"]) == (2 * 2 + 1, (2 * 2 + 1) * SIZE)
    assert first["queried_tokens"] == 3 * 100 + 2 * 64


def test_a_prefix_that_was_evicted_is_recomputed_and_told_so(python: str) -> None:
    """The second turn recomputes the blocks that were evicted; asked again, they are there, and nothing is told."""
    seen = scene(python, "prefixes")
    evicted = [sums["recomputed_evicted_tokens"] for sums in seen["sums_between"]]
    assert evicted[3] == 0 < evicted[4] == evicted[5] == evicted[6]
    again = seen["kvobs"]["turns"][-3]
    assert again["prompt_tokens"] // SIZE * SIZE == again["cached_tokens"] + evicted[4] + SIZE  # one block is new


def test_each_sample_of_a_prompt_is_a_request(python: str) -> None:
    """Two samples of 40 tokens are two requests, and two turns."""
    seen = scene(python, "prefixes")
    assert [len(tokens) for (request,) in [seen["samples"]] for tokens in request] == [40, 40]
    assert [turn["new_tokens"] for turn in seen["kvobs"]["turns"]][3:5] == [40, 40]


def test_aborts_end_turns_as_cancelled(python: str) -> None:
    """One aborted while running, one in the queue, one that never ran; the others end as they should."""
    seen = scene(python, "aborts")
    names = {known: name for name, known in seen["names"].items()} | {"large": "large"}
    ends = {names[turn["session"]]: (turn["outcome"], turn["new_tokens"]) for turn in seen["kvobs"]["turns"]}
    assert ends.pop("r0") == ("cancelled", len(seen["outputs"]["r0"]))
    assert ends == {"r5": ("cancelled", 0), "large": ("cancelled", 0), "paused": ("ok", 3)} | {
        f"r{number}": ("ok", 20) for number in range(1, 5)}
    phases = dict(phases_by_request(seen))
    assert [(one["phase"], one["outcome"]) for one in phases[seen["names"]["r5"]]] == [("queued", "cancelled")]


def test_an_operators_reset_is_the_cause_of_preemptions(python: str) -> None:
    """All that run lose their blocks, and nobody wanted them."""
    preemptions = scene(python, "aborts")["kvobs"]["preemptions"]
    assert len(preemptions) == 4
    assert {(one["cause"], one["wanted_by"]) for one in preemptions} == {("reset", "")}


def test_who_waits_is_told_with_the_reason(python: str) -> None:
    """For a slot, because the engine pauses, because the pool will never do."""
    seen = scene(python, "aborts")
    assert (seen["slots"]["counts"], seen["slots"]["slots"]) == ([["waiting", "slots", 2], ["running", "", 4]], 4)
    assert seen["slots"]["next_request"] == seen["names"]["r4"]
    assert (seen["slots"]["next_needs"], seen["slots"]["next_verdict"]) == (3, "SERVED")
    assert seen["paused"]["counts"] == [["waiting", "paused", 1]]
    assert (seen["large"]["next_verdict"], seen["large"]["next_needs"]) == ("CAPACITY", 24)
    assert seen["large"]["counts"] == [["waiting", "blocks", 1]]


def test_victims_are_those_of_the_lowest_priority(python: str) -> None:
    """Under the policy of priorities who is preempted has the largest number of all that run."""
    seen = scene(python, "priorities")
    numbers = dict(zip(seen["lives"], [3, 0, 5, 1, 7, 2, 6, 4], strict=True))
    for one in seen["kvobs"]["preemptions"]:
        assert numbers[one["request"]] == max(numbers[name] for name, _ in one["holders"])


def test_a_first_token_that_comes_after_a_preemption_is_the_first_one(python: str) -> None:
    """Planned a step ahead, a victim's first token is under way: its time to first token ends with it, not later."""
    seen = scene(python, "overlapped")
    late = seen["names"]["late"]
    assert next(one["request"] for one in seen["preemptions"]) == late
    assert lives(seen)[late][:3] == ["queued", "prefill", "preempted"]
    (turn,) = (turn for turn in seen["kvobs"]["turns"] if turn["session"] == late)
    resumed = next(phase for phase in dict(phases_by_request(seen))[late] if phase["phase"] == "preempted")["t_ns"]
    assert turn["start_ns"] + turn["ttft_ns"] < resumed


def test_two_groups_of_layers_are_one_pool(python: str) -> None:
    """A block holds keys and values of one group's two layers; tables of both groups are counted."""
    seen = scene(python, "sliding")
    assert sorted(seen["groups"]) == [["FullAttentionSpec", SIZE, 2], ["SlidingWindowSpec", SIZE, 2]]
    assert seen["block_bytes"] == 2 * 2 * 2 * 32 * SIZE * 2  # K and V, layers, heads, head size, tokens, bytes
    assert seen["sums"]["preemptions"] > 0


def test_kvobs_may_begin_and_end_while_requests_run(python: str) -> None:
    """Counts begin at zero, states are the pool's, and a request that was there before has no turn."""
    for name in ("first", "second"):
        seen = scene(python, "between")[name]
        assert differences(seen) == []
        assert [turn["session"] for turn in seen["kvobs"]["turns"]] == [seen["names"][name]]


def test_a_cache_that_is_off_was_not_asked(python: str) -> None:
    """Without a prefix cache there are no look-ups, as vLLM's own counters say."""
    seen = scene(python, "between")["uncached"]
    assert differences(seen) == []
    assert seen["sums"]["queried_tokens"] == seen["reported"]["queries"] == 0


@pytest.mark.parametrize(("broken", "hook"), [
    ("handed_out", "BlockPool.get_new_blocks"), ("forgot", "BlockPool._maybe_evict_cached_block"),
    ("touching", "BlockPool.touch"), ("freed", "BlockPool.free_blocks")])
def test_a_hook_that_raises_is_detached_and_the_engine_goes_on(python: str, broken: str, hook: str) -> None:
    """The tokens are the same, the hook is named once, and what is left is restored."""
    seen = scene(python, "failing")
    assert seen[broken]["tokens"] == seen["expected"]
    assert seen[broken]["failed"] == [hook]
    available, reason = seen[broken]["availability"]["vllm engine core"]
    assert (available, hook in reason, seen[broken]["left"]) == (False, True, [])
