"""One sampled forward pass: what the attention calls and cache updates in it show. Never raises into the pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvobs.spans import LayerCall

if TYPE_CHECKING:
    from kvobs.sources.transformers._attention import AttentionProbe

Function = Callable[..., Any]
ATTENTION = "attention"  # the subject of availability


class PassSample:
    """Collects while the pass runs. ``probe`` is None where attention itself is not to be looked at."""

    def __init__(self, probe: AttentionProbe | None, failed: Callable[[str, Exception], None]) -> None:
        self.probe = probe
        self.calls: list[LayerCall] = []
        self.updates: list[tuple[int, int]] = []
        self.reason = ""
        self.spent_ns = 0
        self.seen = 0  # attention calls that the probe took
        self._failed = failed

    def attending(self, function: Function, implementation: str) -> Function:
        """The attention function, looked at; its arguments and its result pass unchanged."""

        def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.monotonic_ns()
            result = function(module, *args, **kwargs)
            ended = time.monotonic_ns()
            try:
                self._saw(module, args, kwargs, implementation, began, ended)
            except Exception as error:
                self.probe = None
                self._failed("AttentionInterface.get_interface", error)
            self.spent_ns += time.monotonic_ns() - ended
            return result

        return attend

    def _saw(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], implementation: str, began: int,
             ended: int) -> None:
        window = kwargs.get("sliding_window")
        kind = "sliding" if window else "full"
        index = getattr(module, "layer_idx", None)
        layer = index if isinstance(index, int) else len(self.calls)
        if not _of_decoder(module, kwargs):
            return
        self.calls.append(LayerCall(layer, kind, implementation, began, ended))
        if self.probe is None:
            return
        query, key, value, mask = _tensors(args, kwargs)
        reason = _unreadable(module, query, key, mask, kwargs, implementation)
        if reason:  # sums over some of the layers would not be what they say
            self.probe, self.seen, self.reason = None, 0, reason
            return
        scaling = kwargs.get("scaling")
        item = key.element_size() * int(key.shape[1])
        masked = mask is not None and mask.dim() == 4
        self.probe.layer(
            layer, kind, query, key, mask, token_bytes=item * (int(key.shape[3]) + int(value.shape[3])),
            scaling=float(scaling) if scaling is not None else int(query.shape[3]) ** -0.5,
            softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"), bias=kwargs.get("position_bias"),
            window=int(window) if window and not masked else None)
        self.seen += 1

    def updating(self, update: Function, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``Cache.update``, timed."""
        began = time.monotonic_ns()
        result = update(cache, *args, **kwargs)
        duration = time.monotonic_ns() - began
        index = args[2] if len(args) > 2 else kwargs.get("layer_idx")
        if isinstance(index, int):
            self.updates.append((index, duration))
        return result


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Query, key, value and mask of an attention call, however they are passed."""
    names = ("query", "key", "value", "attention_mask")
    found = [args[position] if position < len(args) else kwargs.get(name) for position, name in enumerate(names)]
    return found[0], found[1], found[2], found[3]


def _of_decoder(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it is a decoder's self-attention: what it reads grows with every step."""
    causal = kwargs.get("is_causal")
    if (causal if causal is not None else getattr(module, "is_causal", True)) is False:
        return False
    return not getattr(module, "is_cross_attention", False) and "Cross" not in type(module).__name__


def _unreadable(module: Any, query: Any, key: Any, mask: Any, kwargs: dict[str, Any], implementation: str) -> str:
    """Why the weights of this call cannot be known from what it was given; empty when they can."""
    if mask is not None and not hasattr(mask, "dim"):
        return f"the masks of {implementation} are functions, which cannot be read"
    if mask is not None and mask.dim() == 4 and int(mask.shape[1]) > 1 and not mask.is_floating_point():
        return f"{implementation} is given a mask of its own for each head"
    if query is None or query.dim() != 4 or key.dim() != 4 or int(query.shape[2]) != 1:
        return f"{implementation} is called with other tensors than one query per row"
    if int(query.shape[1]) % int(key.shape[1]) or query.shape[3] != key.shape[3]:
        return f"{implementation} does not share its keys between whole groups of query heads"
    if getattr(module, "is_kv_shared_layer", False):
        return "some of its layers read the keys and values of others"
    if kwargs.get("sinks") is not None or kwargs.get("block_indices") is not None or (
            kwargs.get("indices") is not None and implementation not in ("eager", "sdpa")):  # there the mask has them
        return f"{implementation} chooses keys or weighs them in a way that kvobs does not know"
    return ""
