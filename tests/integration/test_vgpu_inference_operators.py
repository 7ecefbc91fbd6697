"""The virtual GPU against the CPU, operator by operator: torch's own samples of its operators are the programs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vgpu import needs_vgpu, on_vgpu

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
pytestmark = [pytest.mark.torch, needs_vgpu()]

# torch's own NotImplementedError names the operator and the back end.
SPARSE = ("sparse_sampled_addmm", "sparse_mm_reduce", "to_sparse")
# Its Python code chooses the types that it sums in by the device's name, and knows no vgpu.
BY_NAME = ("nn_functional_linear_cross_entropy_chunked", "nn_functional_linear_cross_entropy_chunked_none")


def sweep(dtypes, samples, backward, inplace):  # type: ignore[no-untyped-def]  # sent by its source
    from tests.vgpu_sweep import sweep

    return sweep(dtypes, samples, backward, inplace)


def kernels():  # type: ignore[no-untyped-def]  # sent by its source
    from tests.vgpu_sweep import kernels

    return kernels()


def differing(found: dict[str, Any]) -> dict[str, str]:
    """What differs, without what is known to."""
    return {label: text for label, text in found["differ"].items()
            if not (label.split()[1] in SPARSE and text.startswith("NotImplementedError: Could not run"))
            and not (label.split()[1] in BY_NAME and label.startswith("bfloat16") and text == "other bits")}


@pytest.mark.slow
def test_operators_have_the_bits_of_the_cpu(record_property: Any) -> None:
    """Every operator of torch's database computes on vgpu what it computes on the CPU, to the bit, in place as well."""
    pytest.importorskip("expecttest", reason="torch's samples of operators need expecttest: pip install expecttest")
    found = on_vgpu(sweep, dtypes=["float32", "bfloat16"], samples=2, backward=False, inplace=True)
    record_property("compared", found["checks"])
    assert differing(found) == {}
    assert (found["checks"]["float32"] > 1_300, found["checks"]["bfloat16"] > 1_000) == (True, True)


@pytest.mark.slow
def test_operators_have_the_gradients_of_the_cpu(record_property: Any) -> None:
    """Where an operator has a gradient, it is the CPU's to the bit."""
    pytest.importorskip("expecttest", reason="torch's samples of operators need expecttest: pip install expecttest")
    found = on_vgpu(sweep, dtypes=["float32"], samples=1, backward=True, inplace=False)
    record_property("compared", found["checks"])
    assert differing(found) == {}
    assert found["checks"]["float32"] > 600


def test_attention_and_linear_are_the_cpu_s_own_kernels() -> None:
    """In three types, with and without bias, masks, shared heads and gradients: attention and linear to the bit."""
    found = on_vgpu(kernels)
    assert found["differ"] == []
    assert found["compared"] == 3 * 2 * 2 * 8 + 3 * 3 * 3 * 4 * 3 * 2
