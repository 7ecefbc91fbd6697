"""Actions on the virtual GPU: the contract, the same tokens, and the bytes that the allocator itself counts."""

from __future__ import annotations

from typing import Any

import pytest

from kvobs.sources._torch_threshold import threshold
from tests import vgpu_scenes
from tests.vgpu import needs_vgpu

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")
pytestmark = [pytest.mark.torch, needs_vgpu()]


def scene(name: str) -> Any:
    return vgpu_scenes.scene("tests.vgpu_scenes_actions", name)


def test_both_actuators_keep_the_contract() -> None:
    """Every promise of an actuator holds for caches and for the allocator on a device."""
    assert scene("contract") == {}


def test_orders_at_random_steps_change_no_token() -> None:
    """Greedy, sampled, beams, batches, assisted, with caches moved to host memory at any step: the same tokens."""
    seen = scene("tokens")
    assert {way: told["tokens"] for way, told in seen.items()} == dict.fromkeys(seen, True)
    assert max(told["far"] for told in seen.values()) < 1e-5
    assert [told["raised"] for told in seen.values()] == [[]] * len(seen)
    assert {"chunked_growth", "compact", "offload", "unoffload"} <= {done for told in seen.values()
                                                                      for done in told["done"]}


def test_caches_that_are_away_can_be_rearranged() -> None:
    """Crops, reorders, repeats and selections of caches in host memory leave what they leave on the device."""
    assert scene("rearrangements") == [True] * 3


def test_emptying_gives_back_what_the_allocator_counts() -> None:
    """Planned, told and measured by the allocator: the two idle segments of 30 MiB, and nothing that is in use."""
    seen = scene("emptied")
    assert seen["planned"] == seen["told"] == seen["fell"] >= 60 << 20
    assert seen["kept"] == 2


def test_idle_sessions_are_offloaded_and_come_back() -> None:
    """The allocator gets the caches' bytes back; a used, copied or recalled session is on its device, unchanged."""
    seen = scene("offloaded")
    assert seen["planned"] == seen["size"] == seen["moved"]
    assert seen["told"] == seen["fell"] >= seen["size"]
    assert (seen["away"], seen["used"], seen["copied"], seen["back"]) == (["cpu"], ["vgpu:0"], ["vgpu:0"], ["vgpu:0"])
    assert seen["reply"]
    assert seen["same"]
    assert seen["undone"]
    assert seen["restored"]
    assert not seen["late"]


def test_what_is_recalled_leaves_room() -> None:
    """Three sessions come back, since half of the device stays free then; the others come back when they are used."""
    seen = scene("recalled")
    assert 3 * seen["size"] <= seen["came"] < 4 * seen["size"]
    assert seen["away"] == 5
    assert seen["done"]
    assert "5 caches" in seen["told"]
    assert seen["same"]
    assert seen["back"] == ["vgpu:0"]


def test_the_end_of_observation_brings_everything_back() -> None:
    """What was left in host memory to keep half of a device free is brought back once nobody would act again."""
    seen = scene("ended")
    assert (seen["before"], seen["after"]) == (5, 0)


def test_what_is_away_comes_back_where_nobody_watches() -> None:
    """While observation pauses, and after it has ended, a session in host memory answers as ever."""
    assert scene("unseen") == {"before": ["cpu"], "paused": True, "closed": ["vgpu:0"], "later": True}


def test_a_session_without_room_raises_torch_s_own_error() -> None:
    """Where the device has no room for a session that comes back, its pass raises OutOfMemoryError, as torch would."""
    assert scene("crowded") == {"error": "OutOfMemoryError", "free": True, "goes on": True}


def test_compaction_lets_pinned_segments_go() -> None:
    """Of segments that a few sessions pin, compaction returns some, by the allocator's count; no value changes."""
    seen = scene("compacted")
    assert seen["told"] == seen["fell"] > 0
    assert seen["after"] == seen["allocated"]
    assert seen["same"]
    assert not seen["late"]


def test_the_threshold_is_the_formula_s_and_is_put_back() -> None:
    """It acts only with a memory fraction, changes one key, and undoing restores the text and what was in effect."""
    seen = scene("threshold")
    assert not seen["without"][0]
    assert "memory fraction" in seen["without"][1]
    rate = (seen["allocated"] - seen["largest"]) / seen["allocated"]
    assert seen["threshold"] == pytest.approx(threshold(rate), abs=1e-4)
    assert (seen["split"], seen["divisions"], seen["fraction"]) == (64 << 20, True, 0.5)
    assert "[256:1,512:2,>:4]" in seen["text"]
    assert (seen["done"], seen["again"], seen["undone"], seen["exact"], seen["after"]) == (
        True, [True, 0], True, True, True)
    assert seen["others"] == [128 << 20, 0.0]
