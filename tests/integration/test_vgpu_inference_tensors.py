"""Tensors, storages, modules, generators, threads and processes on the virtual GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests import vgpu_scenes
from tests.vgpu import needs_vgpu

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")
pytestmark = [pytest.mark.torch, needs_vgpu()]

SAME_DEVICE = "RuntimeError: Expected all tensors to be on the same device"


def scene(name: str) -> Any:
    return vgpu_scenes.scene("tests.vgpu_scenes_tensors", name)


def test_views_share_memory() -> None:
    """Every kind of view lies in its base's storage, and what is written through views is what the CPU has."""
    assert [name for name, holds in scene("views").items() if not holds] == []


def test_outputs_and_storages_are_resized() -> None:
    """out=, resize_ and set_ leave what the CPU leaves; a storage grows in the device's memory, its content is kept."""
    seen = scene("resizing")
    assert seen["same"]
    assert seen["shares"]
    assert seen["kept"] == [0, 1, 2, 3, 4, 5]
    assert seen["grew"] == 4096 - 24
    assert "cannot take a storage of cpu" in seen["foreign"]


def test_types_scalars_and_empty_tensors() -> None:
    """Every type goes to the device and is made there as on the CPU; scalars are read; empty tensors have no memory."""
    seen = scene("kinds")
    assert [name for name, holds in seen.items() if name.startswith("torch.") and not holds] == []
    assert seen["scalars"] == [3.5, 3, True, 0, "3.5", 8]
    assert seen["host scalar"] == [2.0, 2.0]
    assert seen["empty"] == [[0.0, 0.0, 0.0], 0]
    assert seen["printed"] == "tensor([0, 1, 2], device='vgpu:1')"
    assert seen["numpy"].startswith("TypeError: can't convert vgpu:0 device type tensor to numpy.")


def test_tensors_of_other_devices_are_refused_as_torch_does() -> None:
    """Mixing devices is the error that CUDA users know; indices of the host are allowed, as for CUDA."""
    seen = scene("other_devices")
    assert seen.pop("index of the host") == ""
    assert seen.pop("index of another").startswith("RuntimeError: indices should be either on cpu or on")
    assert seen.pop("attention").startswith("RuntimeError: Expected query, key, and value to have the same device type")
    assert seen.pop("overlap").startswith("RuntimeError: unsupported operation: more than one element")
    assert seen.pop("no such device") != ""
    assert [name for name, text in seen.items() if not text.startswith(SAME_DEVICE)] == []


def test_random_numbers_are_the_host_s() -> None:
    """A generator of the device draws what the host's draws from the same seed; those of another device are refused."""
    seen = scene("generators")
    assert seen.pop("of the host") == "RuntimeError: Expected a 'vgpu' device type for generator but found 'cpu'"
    assert seen.pop("for the host") == "RuntimeError: Expected a 'cpu' device type for generator but found 'vgpu'"
    assert seen == {"same": True, "again": True, "default": True, "forked": True}


def test_what_is_saved_comes_back() -> None:
    """torch.save, pickle, deepcopy and state dicts keep content, device (or map it) and shared storages."""
    seen = scene("serialised")
    assert seen["tensors"] == [True] * 3
    assert seen["devices"] == ["vgpu:1", "cpu", "vgpu:0"]
    assert seen["shared"]
    assert seen["copies"] == [True, True]
    assert seen["storage"] == ["vgpu:1", True]
    assert seen["modules"] == {"pickle": ["vgpu:1", True], "deepcopy": ["vgpu:1", True], "states": ["vgpu:0", True]}


def test_training_has_the_cpu_s_gradients() -> None:
    """Three steps of a transformer layer leave the CPU's parameters and gradients to the bit; autocast comes close."""
    seen = scene("training")
    assert seen["same"]
    assert seen["second"] == [6.0, 6.0, 6.0]
    assert 0 < seen["mixed"] < 0.1


def test_autocast_chooses_types_as_on_cuda() -> None:
    """Matrix products are taken in bfloat16 and equal the CPU's, softmax in float32; weights stay what they are."""
    seen = scene("autocast")
    assert seen == {"same": True, "types": ["torch.bfloat16", "torch.float32", "torch.bfloat16", "torch.float32"]}


def test_modes() -> None:
    """inference_mode, no_grad, default devices and vmap hold; torch.compile works without code generation only."""
    seen = scene("modes")
    assert (seen["inference"], seen["gradient"], seen["vmap"]) == (True, False, True)
    assert seen["made"] == ["vgpu:0", "vgpu:0", "vgpu:1"]
    assert seen["eager"] == pytest.approx([1.8414709848] * 3)
    assert seen["compiled"].startswith("InductorError:")


def test_what_is_not_supported_says_so() -> None:
    """Sparse, nested and quantized tensors and fused LSTM cells are refused by torch's own error."""
    for name, text in scene("refusals").items():
        assert text.startswith("NotImplementedError: Could not run 'aten::"), name


def test_threads_compute_at_the_same_time() -> None:
    """Four threads on two devices get the results of their own tensors."""
    assert scene("threads") == []


def test_a_forked_child_goes_on_with_a_copy() -> None:
    """A child has the tensors and an allocator of its own; the parent's is not changed; DataLoader workers run."""
    seen = scene("processes")
    assert seen["child"] == "300.0 512"
    assert seen["parent"] == [100.0, 0]
    assert seen["loaded"] == sum(range(20))
