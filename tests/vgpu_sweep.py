"""Operators on the virtual GPU beside the CPU, to the bit: torch's own samples of all of them, attention and linear."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
OF_THE_HOST = ("tensor_split",)  # takes its indices on the host, as for CUDA


def _there(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("vgpu").requires_grad_(value.requires_grad)
    return torch.device("vgpu") if value == "cpu" or value == torch.device("cpu") else value


def _here(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _bits(tensor: Any) -> Any:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    return plain.clone(memory_format=torch.contiguous_format).view(torch.uint8) if plain.numel() else plain


def _told(first: Any, second: Any) -> str:
    pairs = list(zip(tree_leaves(first), tree_leaves(second), strict=True))
    for one, other in pairs:
        if not isinstance(one, torch.Tensor):
            if one != other and not (one != one and other != other):
                return f"{one} and {other}"
        elif other.device.type != "vgpu":
            return f"the result is on {other.device}"
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
        elif one.numel() and one.stride() != other.stride():
            return f"strides {one.stride()} and {other.stride()}"
        elif not torch.equal(_bits(one), _bits(other)):
            return "other bits"
    return ""


def _outcome(function: Any, move: Any, given: Any, with_backward: bool) -> tuple[Any, Any, Exception | None]:
    torch.manual_seed(1)
    args, kwargs = tree_map(move, given)
    try:
        result = function(*args, **kwargs)
        return result, _gradients(result, (args, kwargs)) if with_backward else [], None
    except Exception as error:
        return None, [], error


def _unsettled(function: Any, given: Any, with_backward: bool) -> bool:
    """Whether the CPU's own bits change with what its free memory holds: LAPACK's gelsy reads pivots never written."""
    def bits() -> list[Any]:
        outcome = _outcome(function, _here, given, with_backward)
        return [_bits(leaf) for leaf in tree_leaves(outcome[:2]) if isinstance(leaf, torch.Tensor)]

    first = bits()
    for number in range(64):
        scribbled = [torch.full((size,), number % 8 * 0x01010101, dtype=torch.int32) for size in range(1, 64)]
        del scribbled
        if any(not torch.equal(one, other) for one, other in zip(first, bits(), strict=True)):
            return True
    return False


def _gradients(result: Any, inputs: Any) -> list[Any]:
    outs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    ins = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not outs or not ins:
        return []
    seeds = [torch.ones(out.shape, dtype=out.dtype).to(out.device) for out in outs]
    return [grad for grad in torch.autograd.grad(outs, ins, seeds, allow_unused=True) if grad is not None]


def sweep(dtypes: list[str], samples: int, backward: bool, inplace: bool) -> dict[str, Any]:
    """Every operator with its first samples on both devices: how many were compared, and what differs in a bit."""
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    done: Counter[str] = Counter()
    differ: dict[str, str] = {}
    unsettled: set[str] = set()

    def compare(label: str, function: Any, given: Any, with_backward: bool) -> None:
        outcomes = [_outcome(function, move, given, with_backward) for move in (_here, _there)]
        (one, one_grads, failed), (other, other_grads, raised) = outcomes
        if failed is not None:
            return
        done[label.split()[0]] += 1
        if raised is not None:
            differ.setdefault(label, f"{type(raised).__name__}: {raised}"[:400])
            return
        found, of_gradients = _told(one, other), _told(one_grads, other_grads)
        if "other bits" in (found, of_gradients) and _unsettled(function, given, with_backward):
            unsettled.add(label)
        elif found or of_gradients:
            differ.setdefault(label, found or f"gradients: {of_gradients}")

    for dtype in dtypes:
        kind = getattr(torch, dtype)
        for op in op_db:
            if kind not in op.dtypes or op.name in UNDEFINED or op.name in OF_THE_HOST:
                continue
            wants = backward and op.supports_autograd and kind in op.backward_dtypes
            torch.manual_seed(0)
            for number, sample in zip(range(samples), op.sample_inputs("cpu", kind, requires_grad=wants), strict=False):
                given = ([sample.input, *sample.args], sample.kwargs)
                compare(f"{dtype} {op.formatted_name}", op, given, wants)
                if inplace and number == 0 and not wants and op.inplace_variant is not None:
                    compare(f"{dtype} {op.formatted_name} in place", op.inplace_variant, given, False)
    return {"checks": done, "differ": differ, "unsettled": sorted(unsettled)}


def kernels() -> dict[str, Any]:
    """Attention and linear over shapes, masks and types: how many were compared, and which differ in a bit."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    differ: list[str] = []
    compared = 0

    def compare(label: str, function: Any, tensors: list[Any], grad: bool) -> None:
        nonlocal compared
        compared += 1
        outs = []
        for move in (_here, _there):
            moved = [move(tensor.requires_grad_(grad)) if tensor is not None else None for tensor in tensors]
            out = function(*moved)
            outs.append([out, *(_gradients(out, moved) if grad else [])])
        if _told(outs[0], outs[1]):
            differ.append(f"{label}: {_told(outs[0], outs[1])}")

    types = (torch.float32, torch.bfloat16, torch.float16)
    shapes = ((5, 64), (1, 1, 64), (2, 7, 64), (3, 1, 64), (2, 3, 5, 64), (64,), (0, 64))
    for kind, shape, bias, grad in itertools.product(types, shapes, (False, True), (False, True)):
        given = torch.randn(shape, dtype=kind)
        weight, offset = torch.randn(48, 64, dtype=kind), torch.randn(48, dtype=kind) if bias else None
        compare(f"linear {kind} {shape} bias={bias} grad={grad}", functional.linear, [given, weight, offset], grad)
        if shape == (2, 7, 64):
            compare(f"linear {kind} strided bias={bias} grad={grad}", functional.linear,
                    [torch.randn(7, 2, 64, dtype=kind).transpose(0, 1), weight, offset], grad)
    masks = ("none", "causal", "boolean", "additive")
    for kind, (heads, shared), (new, old), mask, width, grad in itertools.product(
            types, ((4, 4), (4, 2), (6, 1)), ((1, 33), (17, 17), (5, 40)), masks, (16, 20, 64), (False, True)):
        query, key = torch.randn(2, heads, new, width, dtype=kind), torch.randn(2, shared, old, width, dtype=kind)
        value = torch.randn(2, shared, old, width, dtype=kind)
        allowed = torch.rand(2, 1, new, old) > 0.3
        added = torch.zeros(2, 1, new, old, dtype=kind).masked_fill(~allowed, -1e4)
        given = {"boolean": allowed, "additive": added}.get(mask)

        def attend(query: Any, key: Any, value: Any, mask_kind: str = mask, given: Any = given,
                   grouped: bool = heads != shared) -> Any:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=None if given is None else given.to(query.device),
                is_causal=mask_kind == "causal", enable_gqa=grouped)

        compare(f"attention {kind} heads={heads}/{shared} {new}x{old}x{width} {mask} grad={grad}", attend,
                [query, key, value], grad)
    return {"compared": compared, "differ": differ}
