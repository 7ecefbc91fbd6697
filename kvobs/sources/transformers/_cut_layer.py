"""A growing layer from whose middle token positions were removed: its length is the logical one, its masks physical.

What a model derives from a cache stays as it was: ``get_seq_length`` counts what was removed, so that the next tokens
get the positions (and rotations) that they would have had; ``get_mask_sizes`` gives the number of keys that are there,
with an offset that knows where each of them stands. transformers adds it to the keys' indices before it looks up the
caller's 2-D mask and compares with the query's position, and so causality and padding are those of the uncut cache.

It needs no hook: a cut cache goes on, is copied and pickled when kvobs is not installed any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

_SUMS = frozenset({torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.add})


class Offset(int):
    """How many positions are missing, as a number; added to key indices, the position at which each key stands."""

    positions: Any

    @classmethod
    def of(cls, missing: int, positions: Any) -> Offset:
        """``positions`` [n] are those of the first n keys; behind them none is missing."""
        made = cls(missing)
        made.positions = positions
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Sums of a tensor and an offset are looked up; for all else it is a number."""
        if function in _SUMS and len(args) == 2 and not kwargs:
            first, second = args
            if isinstance(second, Offset):
                return second.stands(int(first) if isinstance(first, Offset) else first)
            return first.stands(second)
        return function(*(int(one) if isinstance(one, Offset) else one for one in args), **(kwargs or {}))

    def stands(self, keys: Any) -> Any:
        """The positions of keys, given their indices."""
        known = len(self.positions)
        behind = keys + int(self)
        if not known:
            return behind
        listed = self.positions.to(keys.device)[keys.clamp(max=known - 1)]
        return torch.where(keys < known, listed, behind)


class CutLayer(DynamicLayer):  # type: ignore[misc]
    """``cut_tokens`` positions are missing; ``positions`` [n] (int64, on the host) are those of the first n keys."""

    kvobs_cut = True
    keys: Any
    values: Any
    positions: Any
    cut_tokens: int

    def get_seq_length(self) -> int:
        """The logical length: what is there and what was removed."""
        return self._held() + self.cut_tokens if self.is_initialized else 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """The number of keys that attention will see, and where they stand. Takes positions before 5.x had lengths."""
        new = int(query_length.shape[0]) if hasattr(query_length, "shape") else int(query_length)
        return self._held() + new, Offset.of(self.cut_tokens, self.positions)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """As a plain layer of this logical length crops; what was cut out of its end is missing no more."""
        if not self.is_initialized:
            return
        length = plain_length(self.get_seq_length(), *args, **kwargs)
        if length == self.get_seq_length():
            return
        behind = length - self.cut_tokens
        if behind < len(self.positions):
            behind = int((self.positions < length).sum())
            self.positions = self.positions[:behind]
        self.keys, self.values = self.keys[..., :behind, :], self.values[..., :behind, :]
        self.cut_tokens = length - behind

    def reset(self) -> None:
        """From 5.24 on a reset layer is empty, and nothing is missing; before, it keeps its length and holds zeros."""
        super().reset()
        if not self.is_initialized:
            self.positions, self.cut_tokens = self.positions[:0], 0

    def _held(self) -> int:
        return int(self.keys.shape[-2]) if self.is_initialized and self.keys.dim() == 4 else 0


def plain_length(length: int, *args: Any, **kwargs: Any) -> int:
    """The length after a plain layer's ``crop``, whose argument's meaning has changed from version to version."""
    plain = DynamicLayer()
    plain.keys = plain.values = torch.empty((1, 1, length, 1), device="meta")
    plain.is_initialized = True
    plain.crop(*args, **kwargs)
    return int(plain.keys.shape[-2])


def cut(layers: Sequence[Any], kept: Any) -> None:
    """Keep only some keys of a cache's layers: of all, or (where memory runs out) of none. Layers keep their identity.

    Args:
        layers: plain or cut ones of one physical length.
        kept: [n] int64, rising indices of the keys that stay.
    """
    first = layers[0]
    held = int(first.keys.shape[-2])
    indices = torch.arange(held)
    if isinstance(first, CutLayer):
        indices = Offset.of(first.cut_tokens, first.positions).stands(indices)
        missing = first.cut_tokens
    else:
        missing = 0
    positions = indices[kept]
    with torch.no_grad():
        fresh = [tuple(tensor.index_select(2, kept.to(tensor.device)) for tensor in (layer.keys, layer.values))
                 for layer in layers]
    for layer, (keys, values) in zip(layers, fresh, strict=True):
        layer.__class__ = CutLayer
        layer.keys, layer.values = keys, values
        layer.positions, layer.cut_tokens = positions, missing + held - len(positions)
