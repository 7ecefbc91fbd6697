"""What is inside a cache of transformers 5.x: its layers, their tensors, and how those are filled.

Duck-typed, so this module imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Tensors of a layer that are bookkeeping, not stored context.
_BOOKKEEPING = frozenset({"cumulative_length", "indexer_cumulative_length", "_sliding_window_tensor",
                          "_pending_beam_idx", "cache_position", "positions"})
STATES = frozenset({"conv_states", "recurrent_states"})
# Allocated once and filled in place; "cross" ones are filled as a whole by their first pass.
IN_PLACE = frozenset({"static", "cross"})
# Tensors without memory of their own: nothing can be measured on them.
_WITHOUT_STORAGE = frozenset({"FakeTensor", "FunctionalTensor"})


class Layers(list[Any]):
    """The layers of an encoder-decoder cache: ``own`` of self-attention, then those of cross-attention."""

    own = 0


def layers_of(cache: Any) -> list[Any] | None:
    """The layers of any transformers cache (an encoder-decoder cache's self then cross layers), or None."""
    own = getattr(cache, "self_attention_cache", None)
    if own is not None:
        cross = getattr(cache, "cross_attention_cache", None)
        both = Layers([*own.layers, *(cross.layers if cross is not None else ())])
        both.own = len(own.layers)
        return both
    layers = getattr(cache, "layers", None)
    return layers if isinstance(layers, list) else None


def measurable(layers: list[Any]) -> bool:
    """Whether the cache's tensors have memory of their own (not so while something traces with stand-ins)."""
    for layer in layers:
        for _, tensor in stored(layer):
            if type(tensor).__name__ in _WITHOUT_STORAGE:
                return False
            try:
                tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):
                return False
            return True
    return True


def kind_of(layer: Any, *, cross: bool = False) -> str:
    """``static``, ``cross`` (static, of cross-attention), ``sliding`` (a growing window), ``dynamic`` or ``other``."""
    if not hasattr(layer, "keys") or hasattr(layer, "_quantized_keys"):
        return "other"
    if hasattr(layer, "max_cache_len"):
        return "cross" if cross else "static"
    return "sliding" if getattr(layer, "is_sliding", False) else "dynamic"


def _tensors(value: Any) -> Iterator[Any]:
    """The plain tensors inside a tensor, a wrapper subclass (quanto), or nested tuples, lists and dicts (HQQ)."""
    if hasattr(value, "untyped_storage"):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is not None:
            for name in flatten()[0]:
                yield from _tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def stored(layer: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor of a layer that holds context, by name."""
    for name, value in vars(layer).items():
        if name not in _BOOKKEEPING and value is not None and not isinstance(value, int | str | bool):
            for position, tensor in enumerate(_tensors(value)):
                yield (name if not position else f"{name}.{position}"), tensor


def seen_length(layer: Any) -> int:
    """Token positions a layer has seen. Reads a device scalar for static layers: only at first sight."""
    if not getattr(layer, "is_initialized", True):
        return 0
    read = getattr(layer, "get_seq_length", None)
    if read is None or getattr(layer, "keys", None) is None:
        return 0
    return int(read())


def filled(name: str, tensor: Any, rows: int) -> int:
    """Bytes of the first ``rows`` token positions of a static layer's tensor; all of a state, which has none."""
    size, dimension = int(tensor.nbytes), tensor.dim() - 2
    if name.split(".")[0] in STATES or dimension < 1 or not tensor.shape[dimension]:
        return size
    return size // int(tensor.shape[dimension]) * min(rows, int(tensor.shape[dimension]))


def row_bytes(layer: Any) -> int:
    """Bytes of one token position of a layer's K and V."""
    rows = layer.keys.shape[2] if layer.keys.dim() == 4 else 0
    return int((layer.keys.nbytes + layer.values.nbytes) // rows) if rows else 0
