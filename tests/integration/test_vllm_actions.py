"""A breaker's orders on vLLM's real engine: what each does, what it leaves alone, and that it can be taken back."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, child_environment, run_child
from tests.vllm_engine import WHY_NOT, Scene, interpreters

BLOCK_BYTES = 2 * 2 * 2 * 32 * 32 * 2  # K and V, layers, heads, head size, tokens, bytes of bfloat16
LIMITS_NS = {1: 200_000_000, 2: 1_200_000_000, 3: 3_000_000_000}


@functools.cache
def played(python: str) -> dict[str, Any]:
    """What the scenes saw in this Python."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "seen.json"
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "TMPDIR": directory, "PYTHONPATH": str(ROOT)}
        done = run_child([python, "-m", "tests.vllm_action_scenes", target], env=child_environment(**settings),
                         cwd=ROOT, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return found


@pytest.fixture(scope="module", params=interpreters() or [""])
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    """All scenes of one version; a skip without vLLM, a failure where a scene raised."""
    if not request.param:
        pytest.skip(WHY_NOT)
    found = played(request.param)
    for scene in found.values():
        assert "raised" not in scene, scene["raised"]
    return found


def outcome(answers: list[dict[str, Any]]) -> list[tuple[str, bool, bool, int]]:
    """Of each answer: the kind, whether it was an undoing, whether it was done, and the bytes."""
    return [(one["kind"], one["undo"], one["done"], one["bytes"]) for one in answers]


def knows_admission(seen: dict[str, Any]) -> bool:
    """Whether this version of vLLM has a limit that may be lowered while it runs."""
    return seen["admission"]["limit_after"] is not None


def test_admission_by_what_fits_ends_the_preemptions(seen: dict[str, Any]) -> None:
    """The reference run's four preemptions are none, all requests finish with the same tokens, and three begin.

    23 blocks hold three requests of 170 tokens, which take six blocks each; a fourth is let in when the first three are
    so far that it cannot get in their way. Where vLLM has no such limit, the order is refused and nothing changes.
    """
    scene: Scene = seen["admission"]
    (answer,) = scene["answer"]
    assert scene["preempted"] == 4
    assert scene["tokens_admitted"] == scene["tokens"]
    if not knows_admission(seen):
        assert not answer["done"]
        assert answer["reason"] == f"The scheduler of vLLM {seen['version']} has no max_num_active_reqs."
        assert scene["preempted_admitted"] == 4
        return
    assert answer["done"]
    assert scene["preempted_admitted"] == 0
    assert scene["ran"][0] == 3
    assert max(scene["ran"]) < 8
    assert min(scene["fits"]) >= 1
    assert scene["fits"][-1] == scene["limit_after"] == scene["slots"] == 8


def test_what_was_ordered_at_rest_or_twice_changes_nothing(seen: dict[str, Any]) -> None:
    """With nobody in the engine all fit, so no attribute of the scheduler differs; nor after a second order."""
    scene: Scene = seen["admission"]
    assert scene["at_rest"] == scene["again"] == []
    done = knows_admission(seen)
    assert outcome(scene["answer_again"]) == [("kv_aware_admission", False, done, 0)]
    assert outcome(scene["undone"]) == [("kv_aware_admission", True, True, 0)]


def test_tokens_without_orders_are_those_without_kvobs(seen: dict[str, Any]) -> None:
    """Actuators that wait change no token; uninstrumenting takes back a limit that is in force."""
    scene: Scene = seen["admission"]
    assert scene["tokens"] == scene["tokens_off"]
    if knows_admission(seen):
        assert scene["limit_held"] < scene["limit_off"] == 8


def test_a_reset_drops_exactly_the_cached_blocks(seen: dict[str, Any]) -> None:
    """What the pool's own map can find is gone afterwards, in blocks and bytes; requests get the same tokens again."""
    scene: Scene = seen["emptied"]
    assert scene["cached"] > 0
    assert scene["planned"] == scene["cached"] * BLOCK_BYTES
    assert outcome(scene["reset"]) == [("prefix_cache_reset", False, True, scene["cached"] * BLOCK_BYTES)]
    assert scene["reset"][0]["reason"] == f"{scene['cached']} cached blocks lost their content."
    assert (scene["left"], scene["told"]) == (0, 0)
    assert scene["outputs"]["running"] == scene["outputs"]["hit"]


def test_a_reset_is_refused_while_blocks_are_held(seen: dict[str, Any]) -> None:
    """The reason names how many; the content that could be found still can. A second reset has nothing to do."""
    scene: Scene = seen["emptied"]
    assert outcome(scene["busy"]) == [("prefix_cache_reset", False, False, 0)]
    assert scene["busy"][0]["reason"].startswith(f"Requests hold {scene['used']} blocks;")
    assert scene["kept"] > 0
    assert outcome(scene["again"]) == [("prefix_cache_reset", False, True, 0), ("prefix_cache_reset", True, False, 0)]
    assert scene["uncached"] == "Prefix caching is off, so there is no cache to reset."
    assert scene["names"] == ["vllm", "vllm-2"]


def test_clamped_answers_end_early_and_others_do_not(seen: dict[str, Any]) -> None:
    """Of 60 tokens sheddable sessions get 20, what they were promised, or one more than they had; others get all."""
    scene: Scene = seen["clamped"]
    whole = scene["whole"]
    assert scene["generated"] == 31
    lengths = {"early": 32, "normal": 60, "waits": 20, "promised": 45, "new": 20, "critical": 60}
    assert scene["held"] == lengths | {"early": None}  # it has ended by then
    for (name, length), tokens in zip(lengths.items(), whole, strict=True):
        assert scene["outputs"][name] == tokens[:length], name
    assert [one["reason"] for one in scene["answers"]] == ["3 requests are cut.", ""]


def test_limits_are_given_back_to_those_that_have_not_ended(seen: dict[str, Any]) -> None:
    """After undoing, and after uninstrumenting, requests generate all that they had asked for."""
    scene: Scene = seen["clamped"]
    assert (scene["back_held"], scene["after_held"], scene["off_held"]) == (20, 20, 60)
    assert scene["given_back"] == scene["whole"][:2]
    assert outcome(scene["undone"]) == [("clamp_tokens", True, True, 0), ("clamp_tokens", False, True, 0)]


def test_a_pause_admits_nobody_until_it_is_undone(seen: dict[str, Any]) -> None:
    """The three that run go on alone; from the step after the undoing on the others are let in."""
    ran = seen["paused"]["undone"]["ran"]
    first = {"undone0", "undone1", "undone2"}
    assert all(set(who) <= first and state == "PAUSED_NEW" for who, state in ran[:6])
    assert all(state == "UNPAUSED" for _, state in ran[6:])
    assert {name for who, _ in ran for name in who} == {f"undone{number}" for number in range(6)}
    assert outcome(seen["paused"]["undone"]["answers"]) == [("pause", False, True, 0), ("pause", True, True, 0)]


def test_a_pause_ends_by_itself_when_nobody_runs(seen: dict[str, Any]) -> None:
    """Once the three have ended, those that wait are let in although nobody undid anything; all get their tokens."""
    scene: Scene = seen["paused"]
    ran = scene["lifted"]["ran"]
    (empty,) = [step for step, (who, _) in enumerate(ran) if not who]
    assert all(set(who) <= {"lifted0", "lifted1", "lifted2"} for who, _ in ran[:empty])
    assert ran[empty + 1] == [["lifted3", "lifted4", "lifted5"], "UNPAUSED"]
    assert not scene["idle"][0]["done"]
    for name, tokens in scene["outputs"].items():
        number = int(name[-1])
        assert tokens == scene["whole"][number][:12 - number], name


def test_somebody_elses_pause_is_theirs(seen: dict[str, Any]) -> None:
    """A pause set over ours is neither ended by us nor by undoing ours, and no other is laid over it."""
    scene: Scene = seen["paused"]["overruled"]
    assert [state for _, state in scene["ran"]] == ["PAUSED_NEW"] * 14
    assert scene["theirs"] == "PAUSED_NEW"
    assert outcome(scene["refused"]) == [("pause", True, True, 0), ("pause", False, False, 0)]
    assert scene["refused"][1]["reason"] == "The engine is paused already, and not by kvobs."


def test_an_order_wakes_an_idle_engine_core(seen: dict[str, Any]) -> None:
    """The real loop, blocked on its queue, carries the order out and goes on waiting; it is unhooked in the end."""
    scene: Scene = seen["idle"]
    assert scene["cached"] > 0
    assert outcome(scene["answers"]) == [("prefix_cache_reset", False, True, scene["cached"] * BLOCK_BYTES)]
    assert (scene["alive"], scene["kept"], scene["ended"], scene["loop"]) == (True, 0, True, False)
    assert scene["left"] == []


def test_orders_that_nobody_can_carry_out_are_answered(seen: dict[str, Any]) -> None:
    """Without a loop the drain thread says that the deadline has passed; uninstrumenting says that it is over."""
    scene: Scene = seen["idle"]
    assert outcome(scene["overdue"]) == [("prefix_cache_reset", False, False, 0)]
    assert "deadline had passed" in scene["overdue"][0]["reason"]
    assert outcome(scene["closed"]) == [("kv_aware_admission", False, False, 0)]
    assert scene["closed"][0]["reason"] == "vllm is not observed any more."


def test_every_action_keeps_its_time_limit(seen: dict[str, Any]) -> None:
    """All answers of all scenes took less than the 0.2 s, 1.2 s and 3 s of their levels; the longest are printed."""
    longest: dict[str, int] = {}
    for scene in seen.values():
        groups = [one for one in scene.values() if isinstance(one, list)] if isinstance(scene, dict) else []
        for answer in [one for group in groups for one in group if isinstance(one, dict) and "duration_ns" in one]:
            assert answer["duration_ns"] < LIMITS_NS[answer["level"]]
            longest[answer["kind"]] = max(longest.get(answer["kind"], 0), answer["duration_ns"])
    print(f"\nvLLM {seen['version']}: " + ", ".join(f"{kind} {ns / 1e6:.2f} ms" for kind, ns in longest.items()))
    assert set(longest) == {"kv_aware_admission", "prefix_cache_reset", "clamp_tokens", "pause"}
