"""Hot blocks on vLLM's real pool and engine: the order of its queue, and what protecting them is worth."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, child_environment, run_child
from tests.vllm_engine import WHY_NOT, interpreters

PREFIX, BLOCK, ROUNDS = 128, 32, 3


@functools.cache
def played(python: str) -> dict[str, Any]:
    """What the scenes saw in this Python."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "seen.json"
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "TMPDIR": directory, "PYTHONPATH": str(ROOT)}
        done = run_child([python, "-m", "tests.vllm_hot_scenes", target], env=child_environment(**settings), cwd=ROOT,
                         timeout=600)
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


def test_the_real_queue_is_the_rules(seen: dict[str, Any]) -> None:
    """In 200 random programs the real pool's queue equals plain lists after every call, also after each undoing."""
    assert seen["programs"]["programs"] == 200
    assert seen["programs"]["with"] > 20  # programs in which a block was spared


def test_a_hot_prefix_outlives_scans(seen: dict[str, Any]) -> None:
    """Between scans that are longer than the pool the prefix is found whole each time, and never without protection;
    tokens are the same.
    """
    plain, protected = seen["engines"]["plain"], seen["engines"]["protected"]
    assert plain["before"] == protected["before"] == [0, PREFIX, PREFIX, PREFIX]
    assert plain["hits"] == [0] * ROUNDS
    assert protected["hits"] == [PREFIX] * ROUNDS
    assert plain["tokens"] == protected["tokens"]
    print(f"\nvLLM {seen['version']}: tokens found again, plain {sum(plain['hits'])}, protected "
          f"{sum(protected['hits'])}.")


def test_nothing_leaves_the_queue(seen: dict[str, Any]) -> None:
    """The queue has as many blocks as it says, and used, cached and free ones are the pool's 23 at every look."""
    for name in ("plain", "protected"):
        assert seen["engines"][name]["conserved"]
        assert set(seen["engines"][name]["blocks"]) == {23}


def test_what_was_spared_is_told_when_it_is_undone(seen: dict[str, Any]) -> None:
    """Four blocks in each of three rounds; nothing where nothing was protected, and twice changes nothing."""
    told = [[(one["undo"], one["done"], one["reason"]) for one in seen["engines"][name]["answers"]]
            for name in ("plain", "protected")]
    spared = PREFIX // BLOCK * ROUNDS
    done = f"Hot blocks were spared {spared} times, and hit in {spared} of their second rounds."
    assert told == [[(False, True, ""), (False, True, ""), (True, True, "")],
                    [(False, True, ""), (False, True, ""), (True, True, done)]]


def test_a_reset_spares_what_is_protected(seen: dict[str, Any]) -> None:
    """VLLM's reset is all or nothing: with hot blocks protected it is refused and nothing is lost, else all is."""
    plain, protected = seen["engines"]["plain"], seen["engines"]["protected"]
    assert (plain["reset"]["done"], plain["cached"]) == (True, 0)
    assert not protected["reset"]["done"]
    assert protected["reset"]["reason"] == "4 hot blocks are protected, and vLLM's reset is all or nothing."
    assert protected["cached"] > 4
    assert (plain["planned"], protected["planned"]) == ("No block is hot now.", "")


def test_it_is_refused_without_a_cache_and_leaves_nothing(seen: dict[str, Any]) -> None:
    """Without prefix caching there is nothing to protect; in the end vLLM's classes are what they were."""
    assert seen["engines"]["uncached"] == "Prefix caching is off, so there are no blocks to protect."
    assert seen["engines"]["left"] == []
