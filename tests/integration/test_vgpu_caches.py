"""Caches on the virtual GPU: every kind but the offloading ones, rearranged, moved, and in continuous batching."""

from __future__ import annotations

from typing import Any

import pytest

from tests import vgpu_scenes
from tests.vgpu import needs_vgpu

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")
pytest.importorskip("opentelemetry.sdk", reason="The ledger of continuous batching needs it: pip install 'kvobs[otel]'")
pytestmark = [pytest.mark.torch, needs_vgpu()]


def scene(name: str) -> Any:
    return vgpu_scenes.scene("tests.vgpu_scenes_caches", name)


def test_every_kind_of_cache_holds_what_it_holds_on_the_cpu() -> None:
    """Growing, sliding, static, mixed, cross-attention, state: tokens and cache content are the CPU's, on vgpu:0."""
    seen = scene("kinds")
    assert {name: told for name, told in seen.items() if told != [True, True, True]} == {}
    assert len(seen) >= 12 + 6


@pytest.mark.parametrize("backend", ["fp8", "quanto", "hqq"])
def test_quantized_caches(backend: str) -> None:
    """A quantized cache gives the CPU's tokens and holds the CPU's quantized content, where its back end is there."""
    told = scene("quantized")[backend]
    if isinstance(told, str):
        pytest.skip(told)
    assert told == [True, True, True]


def test_rearranged_caches() -> None:
    """Cropped, reordered, repeated, selected from, reset: a cache holds what the same change leaves on the CPU."""
    assert scene("rearranged") == {name: [True] * n for name, n in
                                   {"crop": 2, "reorder": 2, "repeat": 2, "select": 2, "reset": 3}.items()}


def test_migrations_are_the_device_s_own_copies() -> None:
    """Layers offloaded, fetched back and moved on: source transformers and the allocator count the same bytes."""
    seen = scene("moved")
    layer = seen["layer"]
    assert seen["away"] == ["cpu", "vgpu:0", "cpu"]
    assert seen["back"] == [{"vgpu:0 cpu": [4, 2 * layer], "cpu vgpu:0": [4, 2 * layer]}] * 2
    assert seen["across"] == [{"vgpu:0 vgpu:1": [6, 3 * layer]}] * 2
    assert (seen["hooks"], seen["kept"], seen["devices"]) == (0, True, ["vgpu:1"])


def test_a_session_goes_on_at_another_device() -> None:
    """A session moved half way to the other device, cache and all, ends with the tokens of one on the CPU."""
    assert scene("migrated_session") is True


def test_offloading_caches_need_cuda() -> None:
    """Caches with offloading=True copy on streams of CUDA, which transformers asks for by name; so the error says."""
    assert set(scene("offloading").values()) == {"AssertionError: Torch not compiled with CUDA enabled"}


def test_continuous_batching_gives_the_cpu_s_answers() -> None:
    """Requests in a small paged pool are answered as on the CPU, and the pool lies in the device's memory."""
    seen = scene("continuous_batching")
    assert seen["same"]
    assert seen["lengths"] == [12] * 4
    assert seen["peaks"][0] == 0
    assert seen["peaks"][1] >= seen["pool"]
