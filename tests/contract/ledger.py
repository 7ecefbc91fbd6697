"""A second, naive account of what a cache does: looks at every tensor's storage before and after each update.

Written without the product's code. Old tensors are kept alive while a layer is updated, so an address that
changed really is another storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NOT_CONTEXT = ("cumulative_length", "_sliding_window_tensor", "_pending_beam_idx", "indexer_cumulative_length")
_STATES = ("conv_states", "recurrent_states")


def flat(value: Any) -> Iterator[Any]:
    """All plain tensors inside a value."""
    import torch

    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from flat(getattr(value, name))
        else:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from flat(item)


def tensors_of(layer: Any, states: bool = True) -> dict[tuple[str, int], Any]:
    """Every stored tensor of a layer by attribute and position."""
    return {(name, i): tensor for name, value in vars(layer).items()
            if name not in _NOT_CONTEXT and (states or name not in _STATES)
            for i, tensor in enumerate(flat(value))}


def layers_in(cache: Any) -> list[Any]:
    own = getattr(cache, "self_attention_cache", None)
    return list(cache.layers) if own is None else [*own.layers, *cache.cross_attention_cache.layers]


def storages(cache: Any) -> dict[int, int]:
    """Address → bytes of every distinct storage of a cache."""
    found = {}
    for layer in layers_in(cache):
        for tensor in tensors_of(layer).values():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def reserved(cache: Any) -> int:
    return sum(storages(cache).values())


def largest(cache: Any) -> int:
    return max(storages(cache).values(), default=0)


class Counter:
    """Wraps the ``update`` of every layer class: re-allocations and the bytes of the new storages."""

    def __init__(self) -> None:
        self.reallocations = self.replaced_bytes = self.written = self.updates = 0
        self._undo: list[Any] = []

    def __enter__(self) -> Counter:
        import transformers.cache_utils as module

        for kind in list(vars(module).values()):
            if isinstance(kind, type) and hasattr(kind, "get_mask_sizes") and not hasattr(kind, "early_initialization"):
                for name in ("update", "update_indexer"):
                    if name in vars(kind):
                        original = vars(kind)[name]
                        self._undo.append((kind, name, original))
                        setattr(kind, name, self._wrap(original))
        return self

    def __exit__(self, *exc: object) -> None:
        for kind, name, original in reversed(self._undo):
            setattr(kind, name, original)
        self._undo = []

    def _wrap(self, original: Any) -> Any:
        depth = []

        def update(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if depth:
                return original(layer, *args, **kwargs)
            depth.append(1)
            before = tensors_of(layer, states=False)
            try:
                result = original(layer, *args, **kwargs)
            finally:
                depth.pop()
            self.updates += 1
            self.written += sum(x.nbytes for x in args if hasattr(x, "nbytes"))
            static = hasattr(layer, "max_cache_len")
            for key, tensor in tensors_of(layer, states=False).items():
                old, size = before.get(key), tensor.untyped_storage().nbytes()
                if not size or (static and (old is None or not old.numel())):
                    continue
                if old is None or old.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
                    self.reallocations += 1
                    self.replaced_bytes += size
            return result

        return update
