"""The demo as users run it: SmolLM2-135M-Instruct, eight turns, on virtual GPUs where they can be had."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvobs.lab.demo import _script
from kvobs.lab.demo._cache import NAME, damage_of, models_directory
from tests.support import ROOT, child_environment, run_child

LAYERS, BYTES_PER_TOKEN = 30, 23_040  # 30 layers x K and V x 3 heads x 64 x 2 bytes
# The user's own cache directory: asked for before a test could redirect it.
MODEL = models_directory() / NAME

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@cache
def why_not() -> str:
    """The reason to skip, or nothing."""
    if os.environ.get("KVOBS_TEST_SMOLLM2") == "1":
        return ""
    damage = damage_of(MODEL)
    return f"{NAME} is not prepared ({damage}); kvobs demo or KVOBS_TEST_SMOLLM2=1 downloads it" if damage else ""


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if why_not():
        pytest.skip(why_not())
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")
    state = tmp_path_factory.mktemp("state")
    done = run_child([sys.executable, "-m", "kvobs", "demo", "--json", "--turns", "8"], cwd=ROOT, timeout=1800,
                     env=child_environment(XDG_STATE_HOME=str(state), KVOBS_PROMETHEUS="127.0.0.1:0",
                                           XDG_CACHE_HOME=str(Path(MODEL).parents[2])))
    assert done.returncode == 0, done.stderr
    return [line for line in map(json.loads, done.stdout.splitlines()) if line["conversation"] == _script.MAIN]


def test_the_figures_are_the_closed_forms(turns: list[dict[str, Any]]) -> None:
    """Over eight turns of one session every count follows from the numbers of tokens."""
    assert [turn["turn"] for turn in turns] == list(range(1, 9))
    assert len({turn["session"] for turn in turns}) == 1
    before = 0
    for turn in turns:
        prompt, new = turn["prompt_tokens"], turn["new_tokens"]
        after = prompt + new - 1
        assert turn["reallocations"] == 2 * LAYERS * new
        assert turn["kv_bytes"] == BYTES_PER_TOKEN * after
        assert turn["kv_largest_bytes"] == BYTES_PER_TOKEN * after // (2 * LAYERS)
        assert turn["article_fragmentation_rate"] == pytest.approx(1 - 1 / (2 * LAYERS))
        assert turn["bytes_written"] == BYTES_PER_TOKEN * (after - before)
        assert turn["bytes_copied"] == BYTES_PER_TOKEN * (before + sum(range(prompt, after)))
        before = after


def test_the_conversation_moves_half_way(turns: list[dict[str, Any]]) -> None:
    """On virtual GPUs the cache changes device before the fifth turn, with all that it held; on a CPU it never does."""
    moved = [(turn["migrations"], turn["bytes_migrated"]) for turn in turns]
    if turns[0]["device"] == "cpu":
        assert moved == [(0, 0)] * 8
    else:
        assert [turn["device"] for turn in turns] == ["vgpu:0"] * 4 + ["vgpu:1"] * 4
        assert moved == [(0, 0)] * 4 + [(2 * LAYERS, turns[3]["kv_bytes"])] + [(0, 0)] * 3


def test_copying_grows_with_the_conversation(turns: list[dict[str, Any]]) -> None:
    """In every turn more bytes are copied again per byte written than in the turn before."""
    ratios = [turn["bytes_copied"] / turn["bytes_written"] for turn in turns]
    assert all(earlier < later for earlier, later in pairwise(ratios)), ratios


def test_the_replies_are_coherent(turns: list[dict[str, Any]]) -> None:
    """Replies are English sentences on the subject, without a repeated run of six words or a repeated reply."""
    texts = [turn["text"] for turn in turns]
    assert len(set(texts)) == len(texts)
    for text in texts:
        words = re.findall(r"[a-z']+", text.lower())
        assert len(words) >= 5
        runs = [tuple(words[start:start + 6]) for start in range(len(words) - 5)]
        assert len(set(runs)) == len(runs), text
        assert {"the", "a", "to", "of", "is", "it", "and"} & set(words)
    assert re.search(r"basil|carrot|tomato", texts[0].lower())
    assert len(_script.LINES) == len(texts)
