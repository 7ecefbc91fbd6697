"""What the next decode step will ask of the allocator for its cache. Estimated, from shapes alone.

A growing layer makes its next K and then its next V by concatenation: two requests of the size it will have. Requests
of the model itself (activations, workspace) are not among them, and that the old tensors are freed in between is not
counted either: it is the most that the cache can ask for.
"""

from __future__ import annotations

from typing import Any

from kvobs.allocator.verdict import Demand
from kvobs.sources.transformers._layers import IN_PLACE, kind_of


def next_step(layers: list[Any], tokens: int = 1, stream: int = 0) -> list[Demand]:
    """The requests of a step of ``tokens`` positions per sequence, per device in the order in which they are made.

    Layers that are filled in place ask for nothing. Nothing is read from a device. ``stream`` is the stream on which
    the step runs.

    Raises:
        ValueError: a layer is not one whose growth is known, such as a quantized one.
    """
    sizes: dict[str, list[int]] = {}
    for layer in layers:
        kind = kind_of(layer)
        if kind in IN_PLACE:
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if kind == "other":
            raise ValueError(f"How a layer of type {type(layer).__name__} grows is not known.")
        for tensor in (keys, values):
            if tensor is not None and tensor.dim() == 4:
                batch, heads, rows, width = tensor.shape
                sizes.setdefault(str(tensor.device), []).append(
                    int(batch * heads * (rows + tokens) * width) * int(tensor.element_size()))
    return [Demand(device, stream, 0, tuple(found)) for device, found in sizes.items()]
