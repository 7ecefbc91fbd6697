"""Which keys a query may attend, out of the masks that transformers hands to attention functions."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

_FLOOR = torch.finfo(torch.float32).min / 2  # no weight is left, and a row of nothing else still has numbers


def identity(mask: Any) -> Any:
    """Equal for masks that are the same view of the same memory, which many models slice anew in every layer."""
    return None if mask is None else (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype)


def valid_keys(mask: Any, key: Any, window: int | None) -> Any:
    """[rows, length], True for keys that may be attended; None when all may be."""
    rows, length = int(key.shape[0]), int(key.shape[2])
    valid = None
    if mask is not None and mask.dim() == 4:
        first = mask[:, 0, -1, :length]
        valid = first if first.dtype == torch.bool else first > torch.finfo(first.dtype).min / 2
        valid = valid.expand(rows, length)
    elif mask is not None:
        valid = mask[:, -length:] > 0
        valid = functional.pad(valid, (0, length - int(valid.shape[1]))).expand(rows, length)
    if window is not None and window < length:
        inside = torch.arange(length, device=key.device) >= length - window
        valid = inside.expand(rows, length) if valid is None else valid & inside
    return valid


def additive(mask: Any, valid: Any, length: int) -> Any:
    """[rows or 1, query heads or 1, length] float32 to be added to logits; None when all keys may be attended."""
    if valid is None:
        return None
    there = valid[:, None]
    if mask is None or mask.dim() != 4 or mask.dtype == torch.bool:
        return torch.where(there, 0.0, _FLOOR)
    return torch.where(there, mask[:, :, -1, :length].float(), _FLOOR)
