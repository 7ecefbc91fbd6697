"""Models on the virtual GPU: the CPU's tokens, whatever the family, the type, the attention and the way to decode."""

from __future__ import annotations

from typing import Any

import pytest

from kvobs.lab.demo._cache import NAME, damage_of, models_directory
from tests import vgpu_scenes
from tests.vgpu import needs_vgpu

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")
pytestmark = [pytest.mark.torch, needs_vgpu()]
DAMAGE = damage_of(models_directory() / NAME)


TOGETHER = ("single_precision", "half_precision", "instrumented", "other_ways", "split", "loaded")


def scene(name: str) -> Any:
    return vgpu_scenes.scene("tests.vgpu_scenes_models", name, TOGETHER if name in TOGETHER else (name,))


def test_single_precision_gives_the_cpu_s_tokens() -> None:
    """Seven families, SDPA and eager, greedy, sampled, beams, a static cache, with left padding: the CPU's tokens."""
    seen = scene("single_precision")
    assert [label for label, same in seen.items() if not same] == []
    assert len(seen) == 6 * 4 + 3 + 5


def test_half_precision_differs_no_more_than_its_logits(record_property: Any) -> None:
    """In bfloat16 and float16 a token differs only where the best two logits are closer than logits differ at all."""
    seen = scene("half_precision")
    record_property("largest difference of logits", max(each["largest"] for each in seen.values()))
    print({label: each["largest"] for label, each in seen.items()})
    assert [label for label, each in seen.items() if each["unexplained"]] == []
    assert max(each["distinct"] for each in seen.values()) > 10


def test_half_precision_uses_the_cpu_s_kernels() -> None:
    """The logits of every family in bfloat16 and float16 are the CPU's to the bit: attention and linear are its own."""
    assert {label: each["largest"] for label, each in scene("half_precision").items() if each["largest"]} == {}


def test_tokens_are_the_same_under_observation() -> None:
    """With source transformers installed each family gives the tokens of the unobserved CPU, as one turn on vgpu:0."""
    assert {family: told for family, told in scene("instrumented").items()
            if told != [True, ["Turn"], ["vgpu:0"]]} == {}


def test_other_ways_to_decode() -> None:
    """Assisted decoding, prompt look-up, several returned beams and four threads at once give the CPU's tokens."""
    assert scene("other_ways") == {"assisted": True, "look-up": True, "sequences": True, "threads": True}


def test_a_model_split_over_two_devices() -> None:
    """Layers and their caches lie on both devices, hidden states are copied between them, tokens are the CPU's."""
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    seen = scene("split")
    assert seen.pop("layers") == ["vgpu:0", "vgpu:0", "vgpu:1"]
    assert seen == dict.fromkeys(("greedy", "sampled", "beams", "static", "copied"), True)


def test_safetensors_are_loaded_and_saved() -> None:
    """from_pretrained onto one device or two, or load_file and .to: the CPU's tokens; saved again it is the same."""
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    assert scene("loaded") == {"tokens": [True, True, True], "halves": "vgpu:1", "again": True}


@pytest.mark.slow
@pytest.mark.skipif(bool(DAMAGE), reason=f"{NAME} is not prepared ({DAMAGE}); kvobs demo downloads it.")
def test_smollm2_gives_the_cpu_s_tokens(record_property: Any) -> None:
    """SmolLM2 in float32 gives the CPU's 32 tokens, observed by kvobs or not; in bfloat16 within its margins."""
    seen = scene("smollm2")
    record_property("largest difference of logits in bfloat16", seen["bfloat16"]["largest"])
    assert (seen["float32"]["differ"], seen["observed"]) == (0, [True, True])
    assert seen["bfloat16"]["unexplained"] == 0
    assert seen["float32"]["distinct"] > 5
