"""Actions that fail half way on the virtual GPU, and breakers that watch real generation."""

from __future__ import annotations

from typing import Any

import pytest

from tests import vgpu_scenes
from tests.vgpu import needs_vgpu

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")
pytestmark = [pytest.mark.torch, needs_vgpu()]


def scene(name: str) -> Any:
    return vgpu_scenes.scene("tests.vgpu_scenes_faults", name)


def test_an_action_that_runs_out_of_memory_anywhere_leaves_the_engine_as_before() -> None:
    """Whichever operator of an action fails: it is answered so, K and V have their values and are where they were,
    nothing (or, where undoing failed, the action) is in effect, sessions answer the same, and the next order works. A
    fetch that fails once succeeds at its second try.
    """
    seen = scene("half_way")
    for kind, told in seen.items():
        assert told["answers"] == told["failed"], kind
        for what in ("values", "devices", "in effect", "tokens"):
            assert told[what], (kind, what)
    assert min(seen[kind]["failed"] for kind in ("compact", "offload", "undo offload")) >= 6


def test_a_breaker_that_observes_changes_no_token() -> None:
    """While levels come and go during a generate call, observing gives the tokens and logits of a run without a
    breaker, to the bit, and orders nothing; acting gives the same tokens, and has done what it decided.
    """
    seen = scene("watched")
    assert seen["observe"]["levels"] == seen["act"]["levels"] == [0, 1, 2, 3]
    assert (seen["observe"]["tokens"], seen["observe"]["logits"], seen["observe"]["orders"]) == (True, True, 0)
    assert seen["observe"]["decided"] > 10
    assert seen["act"]["tokens"]
    assert "chunked_growth" in seen["act"]["done"]
