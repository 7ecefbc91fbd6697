"""The virtual GPU against the CPU, operator by operator: torch's own samples of its operators are the programs."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.vgpu import needs_vgpu, on_vgpu

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
pytestmark = [pytest.mark.torch, needs_vgpu()]

# torch's own NotImplementedError names the operator and the back end.
SPARSE = ("sparse_sampled_addmm", "sparse_mm_reduce", "to_sparse")
# Its Python code chooses the types that it sums in by the device's name, and knows no vgpu.
BY_NAME = ("nn_functional_linear_cross_entropy_chunked", "nn_functional_linear_cross_entropy_chunked_none")


def sweeps(plans):  # sent by its source
    from concurrent.futures import ThreadPoolExecutor

    from tests.vgpu_sweep import sweep

    # On a stack of its own: torch's samples look for the module of every frame below them, and this one has none.
    with ThreadPoolExecutor(1) as pool:
        return {name: pool.submit(sweep, **plan).result() for name, plan in plans.items()}


@functools.cache
def swept() -> dict[str, Any]:
    """Both sweeps, in one process for what it costs to import torch's samples."""
    pytest.importorskip("expecttest", reason="torch's samples of operators need expecttest: pip install expecttest")
    found: dict[str, Any] = on_vgpu(sweeps, plans={
        "forward": {"dtypes": ["float32", "bfloat16"], "samples": 4, "backward": False, "inplace": True},
        "backward": {"dtypes": ["float32"], "samples": 2, "backward": True, "inplace": False}})
    return found


def kernels():  # sent by its source
    from tests.vgpu_sweep import kernels

    return kernels()


def differing(found: dict[str, Any]) -> dict[str, str]:
    """What differs, without what is known to."""
    return {label: text for label, text in found["differ"].items()
            if not (label.split()[1] in SPARSE and text.startswith("NotImplementedError: Could not run"))
            and not (label.split()[1] in BY_NAME and label.startswith("bfloat16") and text == "other bits")}


@pytest.mark.slow
def test_operators_have_the_bits_of_the_cpu(record_property: Any) -> None:
    """Every operator of torch's database computes on vgpu what the CPU computes, to the bit, in place as well."""
    found = swept()["forward"]
    record_property("compared", found["checks"])
    record_property("the CPU's own bits change", found["unsettled"])
    assert len(found["unsettled"]) < 5
    assert differing(found) == {}
    assert (found["checks"]["float32"] > 2_000, found["checks"]["bfloat16"] > 1_500) == (True, True)


@pytest.mark.slow
def test_operators_have_the_gradients_of_the_cpu(record_property: Any) -> None:
    """Where an operator has a gradient, it is the CPU's to the bit."""
    found = swept()["backward"]
    record_property("compared", found["checks"])
    record_property("the CPU's own bits change", found["unsettled"])
    assert len(found["unsettled"]) < 5
    assert differing(found) == {}
    assert found["checks"]["float32"] > 1_000


def test_attention_and_linear_are_the_cpu_s_own_kernels() -> None:
    """In three types, with and without bias, masks, shared heads and gradients: attention and linear to the bit."""
    found = on_vgpu(kernels)
    assert found["differ"] == []
    assert found["compared"] == 3 * 2 * 2 * 8 + 3 * 3 * 3 * 4 * 3 * 2
