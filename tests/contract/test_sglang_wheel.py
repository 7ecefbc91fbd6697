"""SGLang 0.5.23's real classes, driven by hand and by random programs, beside an account of the slots themselves.

Not run here: a server, CUDA, the scheduler's own loop (a stand-in calls its two hooked methods), PrefillAdder, Mamba
pools, HiCache.
"""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import Any

import pytest

from tests import sglang_wheel
from tests.sglang_world import LAYERS, TOKEN_BYTES


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return sglang_wheel.told()


@pytest.fixture(scope="module")
def programs(told: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = told["programs"]
    return found


def test_states_are_those_of_the_slots(programs: list[dict[str, Any]]) -> None:
    """After every operation each state has the blocks that the slots themselves say, and all are the pool."""
    for program in programs:
        for step in program["steps"]:
            slots, said = step["census"], step["told"]
            assert slots["nowhere"] == 0
            assert (said["used"], said["cached"], said["free"]) == (
                slots["locked"] + slots["own"] if step["live"] else 0, slots["cached"], slots["free"])
            assert said["used"] + said["cached"] + said["free"] + said["pinned"] == program["pages"]


def test_no_leak_is_said_where_none_is(programs: list[dict[str, Any]]) -> None:
    """A request's own tokens, cached or not, never count as unexplained, and every hook found its place and held."""
    for program in programs:
        assert {step["told"]["unexplained"] for step in program["steps"]} == {0}
        assert program["facts"] == {"sglang": [True, ""], "sglang accounting": [True, ""]}
        assert program["failed"] == []


def test_counts_are_those_of_the_program(programs: list[dict[str, Any]]) -> None:
    """Allocations, refusals, evictions and tails are, after every operation, what the program itself counted."""
    for program in programs:
        for step in program["steps"]:
            said = step["told"]
            assert (said["allocations"], said["failures"], said["evictions"], said["tail_tokens"]) == (
                step["allocated"], step["refused"], step["evicted"], step["tail"])
        assert program["told_evicted"] == program["steps"][-1]["evicted"]


def test_the_programs_reach_what_they_are_for(programs: list[dict[str, Any]]) -> None:
    """For each tree and page size there were refusals, evictions, locked nodes and cached blocks."""
    assert {(program["tree"], program["page"]) for program in programs} == {
        (tree, page) for tree in ("radix", "unified") for page in (1, 4, 16)}
    for program in programs:
        last = program["steps"][-1]
        assert last["refused"]
        assert last["evicted"]
        assert any(step["census"]["cached"] for step in program["steps"])
    for tree in ("radix", "unified"):
        assert any(step["census"]["locked"] for program in programs if program["tree"] == tree
                   for step in program["steps"])


def test_block_bytes_are_the_pools(programs: list[dict[str, Any]]) -> None:
    """A block's bytes are layers x heads x dimension x 2 x item size x page, though kvobs reads them from the pool."""
    for program in programs:
        assert program["steps"][0]["told"]["block_bytes"] == TOKEN_BYTES * program["page"]
        name = "TokenToKVPoolAllocator" if program["page"] == 1 else "PagedTokenToKVPoolAllocator"
        assert program["cache"] == f"{name}/full"


def test_full_and_sliding_pools_are_told_apart(told: dict[str, Any]) -> None:
    """Of a model with sliding layers each pool has its own states, bytes and refusals, as its slots say."""
    for program in told["sliding"]:
        for step in program["steps"]:
            for name, slots in step["census"].items():
                assert slots["nowhere"] == 0
                assert step["told"][name] == [slots["locked"] + slots["own"], slots["cached"], slots["free"]]
            assert step["unexplained"] == [0, 0]
            assert step["failures"] == step["refused"]
            # One layer has full attention, two slide; pages of four tokens.
            assert step["bytes"] == {"full": 4 * TOKEN_BYTES // LAYERS, "swa": 4 * TOKEN_BYTES // LAYERS * 2}
        assert program["facts"] == {"sglang": [True, ""], "sglang accounting": [True, ""]}
        assert program["failed"] == []
        assert program["steps"][-1]["refused"]


def test_pages_that_sglang_itself_loses_are_said(told: dict[str, Any]) -> None:
    """Its allocator of two pools loses a page when only one has one (a decode nobody asked for): as many are said."""
    lost = False
    for program in told["unasked"]:
        for before, step in pairwise(program["steps"]):
            slots = step["census"]
            known = {name: slots[name]["nowhere"] for name in slots}
            had = {name: before["census"][name]["nowhere"] for name in slots}
            for position, name in enumerate(("full", "swa")):
                # A gap is believed when the second reading has it too, and an idle engine's at once.
                if had[name] or not known[name]:
                    assert step["unexplained"][position] == known[name]
                    lost |= known[name] > 0
        assert program["failed"] == []
    assert lost


@pytest.mark.parametrize("tree", ["radix", "unified"])
def test_a_retraction_names_its_victim(told: dict[str, Any], tree: str) -> None:
    """SGLang's retract_decode takes one of three requests: kvobs names it, its tokens, its blocks and all holders."""
    seen = told[f"retract {tree}"]
    (victim,), aborted = seen["gone"]
    assert aborted == []
    lengths = seen["lengths"]
    assert seen["preemptions"] == [{
        "request": victim, "cause": "blocks", "lost": lengths[victim], "blocks": -(-lengths[victim] // 4),
        "holders": sorted(([name, -(-length // 4)] for name, length in lengths.items()), key=lambda one: -one[1])}]
    assert (seen["told"]["preemptions"], seen["told"]["failures"]) == (1, 1)
    assert seen["told"]["used"] == seen["census"]["own"] + seen["census"]["locked"]
    assert seen["failed"] == []


@pytest.mark.parametrize("tree", ["radix", "unified"])
def test_a_leak_is_said_with_its_numbers(told: dict[str, Any], tree: str) -> None:
    """Three pages that vanish under load are said at the second reading; two in an idle engine at once."""
    seen = told[f"leak {tree}"]
    unexplained = {name: seen[name][0]["unexplained"] for name in ("sound", "once", "twice", "mended", "idle")}
    assert unexplained == {"sound": 0, "once": 0, "twice": 3, "mended": 0, "idle": 2}
    holds = {name: seen[name][1]["sglang accounting"] for name in unexplained}
    assert [holds[name][0] for name in unexplained] == [True, True, False, True, False]
    assert holds["twice"][1] == (
        "SGLang's full pool has 96 tokens, and 12 of them belong to nobody (a leak): available 72 + evictable 0 + "
        "protected 0 + held by sessions 0 + uncached of requests 12 = 84.")
    assert seen["failed"] == []


@pytest.mark.parametrize("tree", ["radix", "unified"])
def test_evicted_blocks_have_an_age(told: dict[str, Any], tree: str) -> None:
    """Five blocks that waited are evicted: age and idle time lie between the wait and the whole time, to 10 ms."""
    seen = told[f"ages {tree}"]
    ((blocks, ages, idles),) = seen["told"]
    assert blocks == seen["evictions"] == 5
    for total in (ages, idles):
        assert seen["at_least"] - 10e6 <= total / blocks <= seen["at_most"] + 20e6
    assert idles <= ages
    assert seen["failed"] == []


def test_one_way_at_a_time(told: dict[str, Any]) -> None:
    """Patched by kvobs the registry has nothing, as a plugin only the registry wraps; both end by identity."""
    seen = told["registry"]
    assert (seen["by_patches"], seen["in_registry_then"], seen["still"]) == ([1, 1, 1], 0, [1, 1, 1])
    assert (seen["before_apply"], seen["applied"]) == ([0, 0, 0], [1, 1, 1])
    assert "sglang.srt.mem_cache.radix_cache.RadixCache.evict" in seen["registered"]
    assert all(seen["restored"] + seen["restored_again"])
    assert (seen["left"], seen["patched"]) == ([], [])


def test_the_scheduler_has_what_is_hooked() -> None:
    """SGLang's own Scheduler, which cannot be imported here, has the methods and attributes that the stand-in has."""
    tree = ast.parse(sglang_wheel.source_of("sglang.srt.managers.scheduler"))
    (scheduler,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Scheduler"]
    methods = {node.name: node for node in scheduler.body if isinstance(node, ast.FunctionDef)}
    assert {"get_next_batch_to_run", "on_idle", "is_fully_idle"} <= set(methods)
    assigned = {target.attr for node in ast.walk(scheduler) if isinstance(node, ast.Assign)
                for target in node.targets if isinstance(target, ast.Attribute)}
    assert {"pool_stats_observer", "invariant_checker", "tree_cache", "dllm_config"} <= assigned
    for loop in ("event_loop_normal", "event_loop_overlap"):
        called = [node.func.attr for node in ast.walk(methods[loop])
                  if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        assert {"get_next_batch_to_run", "on_idle", "self_check_during_busy"} <= set(called)
