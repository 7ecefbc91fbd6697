"""What the next decode step will ask of the allocator for its cache. Estimated, from shapes and addresses alone.

A growing layer makes its next K and then its next V by concatenation: two requests of the size it will have. The old
one is given back as soon as the new one has taken its place (a sliding layer replaces both after both were made),
unless somebody else holds it, as autograd may. Requests of the model itself (activations, workspace) are not among
them, nor are copies that a beam search makes between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvobs.allocator.forecast import Demand, Forecast, Growth
from kvobs.sources.transformers._layers import IN_PLACE, STATES, kind_of, layers_of, stored

OFFLOADED = "A cache that is offloaded moves its layers between devices; what that asks for is not known."
UNKNOWN = "How a layer of type {layer} grows is not known."
FAILED = "A cache could not be looked at ({error}); what it asks for is not known."


def forecast(caches: Iterable[Any]) -> Forecast:
    """The next step of each cache, in order; what is not known is said once, whatever goes wrong with a cache."""
    growths: list[Growth] = []
    unknown: list[str] = []
    for cache in caches:
        try:
            layers = layers_of(cache)
            if layers is None:
                continue
            if getattr(cache, "offloading", False):
                unknown.append(OFFLOADED)
                continue
            growths += [Growth(demand, _address(layers, demand.device)) for demand in demands(layers)]
        except ValueError as error:
            unknown.append(str(error))
        except Exception as error:
            unknown.append(FAILED.format(error=type(error).__name__))
    return Forecast(tuple(growths), tuple(dict.fromkeys(unknown)))


def demands(layers: list[Any]) -> list[Demand]:
    """The requests of a step of one position per sequence, per device in the order in which they are made.

    Layers that are filled in place ask for nothing, nor do states of linear attention or cross-attention that has been
    filled. Nothing is read from a device; the stream is told as the default one, for want of better knowledge.

    Raises:
        ValueError: a layer is not one whose growth is known, such as a quantized one.
    """
    sizes: dict[str, list[int]] = {}
    returns: dict[str, list[tuple[int, ...]]] = {}
    shared = _shared(layers)
    for layer in layers[:getattr(layers, "own", None)]:
        kind = kind_of(layer)
        if kind in IN_PLACE:
            continue
        names = {name.split(".")[0] for name, _ in stored(layer)} - STATES
        if not names and not hasattr(layer, "keys"):
            continue
        if kind == "other" or not names <= {"keys", "values"}:
            raise ValueError(UNKNOWN.format(layer=type(layer).__name__))
        old: list[int] = []
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if tensor is None or (tensor.dim() != 4 and not tensor.numel()):
                continue  # nothing is in it yet
            if tensor.dim() != 4:
                raise ValueError(UNKNOWN.format(layer=type(layer).__name__))
            batch, heads, rows, width = tensor.shape
            device = str(tensor.device)
            sizes.setdefault(device, []).append(int(batch * heads * (rows + 1) * width) * int(tensor.element_size()))
            address = int(tensor.untyped_storage().data_ptr())
            old += [address] if address and address not in shared and not tensor.requires_grad else []
            now = kind != "sliding" or tensor is layer.values
            returns.setdefault(device, []).append(tuple(old) if now else ())
            old = [] if now else old
    return [Demand(device, 0, 0, tuple(found), tuple(returns[device]) if any(returns[device]) else ())
            for device, found in sizes.items()]


def _shared(layers: list[Any]) -> set[int]:
    """Addresses of storages that more than one tensor lies in: none of them gives them back alone."""
    seen: set[int] = set()
    shared: set[int] = set()
    for layer in layers:
        for _, tensor in stored(layer):
            address = int(tensor.untyped_storage().data_ptr())
            (shared if address in seen else seen).add(address)
    return shared


def _address(layers: list[Any], device: str) -> int:
    """Where a buffer on a device begins."""
    return next((int(tensor.untyped_storage().data_ptr()) for layer in layers for _, tensor in stored(layer)
                 if str(tensor.device) == device and tensor.numel()), 0)
