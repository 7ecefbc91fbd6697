"""Dropping Pending-Evict tokens (S4) from live caches: which caches allow it, what goes, and the cut itself.

Sound only where a removed key leaves nothing behind but its absence: positions are in the cached keys already, every
layer holds the same tokens, masks are made from the cache's own sizes. Whatever else is met is refused. A block of 16
tokens goes when it is Pending Evict in every layer and every row; the newest block never does.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from kvobs.model import Effect
from kvobs.sources._safe_point import Result, refused
from kvobs.sources.transformers._actions_growth import Growth
from kvobs.sources.transformers._actions_use import Uses
from kvobs.sources.transformers._caches import CacheRecord
from kvobs.sources.transformers._calls import query_shape

BLOCK_TOKENS = 16
VERIFIED = (5, 24)  # of transformers: how masks are made from a cache's sizes is its own affair
LOOKED_AT = ("eager", "sdpa")
_ALIBI = ("build_alibi_tensor", "build_mpt_alibi_tensor")
NOTHING = "No block of tokens is Pending Evict in every layer and row of a cache that may be cut."
NO_CACHES = "No cache is alive that has been seen in a pass."
BUSY = "Every cache that may be cut was in use."
UNSEEN = "A cache is not cut before its attention was looked at, which deep sampling does (KVOBS_DEEP=on)."


class Cuts:
    """Cuts what ``records`` hold; ``tell`` is called with each that was cut."""

    def __init__(self, uses: Uses, growth: Growth, records: Callable[[], Iterable[CacheRecord]],
                 tell: Callable[[CacheRecord], None]) -> None:
        self._uses, self._growth, self._records, self._tell = uses, growth, records, tell

    def passing(self, record: CacheRecord, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A pass over a cache begins: who runs it, and under what mask. A caller's 4-D mask of the logical width loses
        the columns of keys that are not there.
        """
        if record.host is None or record.host() is not model:
            record.host = weakref.ref(model)
        mask: Any = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        record.flat = mask is None or getattr(mask, "ndim", 0) == 2
        layer = next(iter(record.layers() or ()), None)
        if record.flat or layer is None or not getattr(layer, "cut_tokens", 0) or "attention_mask" not in kwargs:
            return
        new = query_shape(args, kwargs)[1]
        if getattr(mask, "ndim", 0) == 4 and mask.shape[-1] == layer.get_seq_length() + new:
            import torch

            keys, offset = layer.get_mask_sizes(new)
            kwargs["attention_mask"] = mask.index_select(-1, torch.arange(keys, device=mask.device) + offset)

    # -- the action ------------------------------------------------------------------------------------

    def plan(self) -> Effect:
        """Bytes that would go now."""
        known, reasons = self._judged()
        found = sum(_bytes(record, len(gone)) for record in known if (gone := pending_slots(record)))
        if known:
            return Effect(found, None, "" if found else NOTHING)
        return Effect(None, None, " ".join(reasons) or NO_CACHES)

    def carry_out(self, deadline_ns: int) -> Result:
        """Cut each cache that may be cut; bytes of its storages, before less after."""
        known, reasons = self._judged()
        if not known:
            return refused(" ".join(reasons) or NO_CACHES)
        freed = tokens = cut_caches = held_caches = 0
        for record in known:
            if time.monotonic_ns() > deadline_ns:
                break
            with self._uses.taking(record) as held:
                if not held or refusal(record, self._growth):
                    continue
                held_caches += 1
                if gone := pending_slots(record):
                    freed += self._cut(record, gone)
                    tokens += len(gone)
                    cut_caches += 1
        if not held_caches:
            return refused(BUSY)
        said = f"{tokens} token positions were removed from {cut_caches} of {len(known)} caches." if tokens else NOTHING
        return Result(True, freed, " ".join((said, *reasons)))

    def _cut(self, record: CacheRecord, gone: list[int]) -> int:
        import torch

        from kvobs.sources.transformers._cut_layer import cut

        layers = record.layers() or []
        before = _stored(layers)
        kept = torch.ones(int(layers[0].keys.shape[2]), dtype=torch.bool)
        kept[gone] = False
        cut(layers, kept.nonzero().flatten())
        for layer in layers:
            self._growth.forget(layer)
        self._tell(record)
        return max(0, before - _stored(layers))

    def _judged(self) -> tuple[list[CacheRecord], list[str]]:
        """Caches that may be cut, and why others may not."""
        known: list[CacheRecord] = []
        reasons: dict[str, None] = {}
        for record in self._records():
            if record.cache() is None:
                continue
            if why := refusal(record, self._growth):
                reasons[why] = None
            else:
                known.append(record)
        return known, list(reasons)


# -- what allows a cut ---------------------------------------------------------------------------------


def version_refusal() -> str:
    """Why nothing is cut under this transformers; empty where it may be. 5.0 pads by keys and not by positions."""
    version = str(getattr(sys.modules.get("transformers"), "__version__", "0"))
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    known = ".".join(map(str, VERIFIED))
    older = f"transformers {version} is older than {known}, with which cuts were verified."
    return "" if numbers >= VERIFIED else older


def refusal(record: CacheRecord, growth: Growth) -> str:
    """Why this cache may not be cut now, as a sentence; empty where it may."""
    cache, layers = record.cache(), record.layers() or []
    if why := version_refusal():
        return why
    module = sys.modules.get("transformers.cache_utils")
    if module is None or type(cache) is not module.DynamicCache or getattr(cache, "offloading", False):
        return f"A {type(cache).__name__} is not cut, only a plain DynamicCache is."
    if others := sorted({type(layer).__name__ for layer in layers if not growth.growing(layer)}):
        return f"A cache with layers of {', '.join(others)} is not cut, only one whose layers all keep every token."
    if not layers or len({layer.keys.shape[2] if layer.is_initialized and layer.keys.dim() == 4 else -1
                          for layer in layers}) != 1 or not layers[0].is_initialized:
        return "A cache whose layers are empty or hold different numbers of tokens is not cut."
    if any(layer.keys.requires_grad or layer.values.requires_grad for layer in layers):
        return "A cache through which gradients flow is not cut."
    if any(map(growth.is_away, layers)):
        return "A cache that lies in host memory is not cut."
    model = record.host() if record.host is not None else None
    if model is None:
        return "A cache whose model is not known, or is gone, is not cut."
    if why := model_refusal(model):
        return why
    if not record.flat:
        return "A cache whose last pass was given a mask that is not 2-D is not cut."
    if record.deep is None or record.deep.quantized:
        return UNSEEN
    if record.deep.probe.biased:
        return f"The cache of {type(model).__name__} is not cut, since its attention adds a bias by position."
    return ""


def model_refusal(model: Any) -> str:
    """Why caches of this model are not cut, as a sentence; empty where they may be."""
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if getattr(config, "is_encoder_decoder", False):
        return f"The cache of {name} is not cut, since it is an encoder-decoder."
    module = sys.modules.get(type(model).__module__)
    if not type(model).__module__.startswith("transformers.models.") or not hasattr(module, "create_causal_mask"):
        return f"The cache of {name} is not cut, since its code may make masks in a way that is not known."
    if getattr(text, "alibi", any(hasattr(module, build) for build in _ALIBI)):
        return f"The cache of {name} is not cut, since ALiBi takes distances from where keys lie."
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None):
        return f"The cache of {name} is not cut, since not all of its layers attend to every token."
    implementation = getattr(text, "_attn_implementation", None)
    if implementation not in LOOKED_AT:
        return f"The cache of {name} is not cut under the attention {implementation}, only under eager and sdpa."
    return ""


def pending_slots(record: CacheRecord) -> list[int]:
    """Indices of keys in blocks that are Pending Evict in every layer and row; never of the newest block."""
    layers = record.layers() or []
    rows = int(layers[0].keys.shape[2])
    pending = record.deep.probe.pending(len(layers))
    newest = (rows - 1) // BLOCK_TOKENS
    return [slot for block in range(min(newest, len(pending))) if pending[block]
            for slot in range(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)]


def _stored(layers: list[Any]) -> int:
    return sum(int(tensor.untyped_storage().nbytes()) for layer in layers for tensor in (layer.keys, layer.values))


def _bytes(record: CacheRecord, tokens: int) -> int:
    return sum(tokens * int(tensor.nbytes) // int(tensor.shape[2]) for layer in record.layers() or ()
               for tensor in (layer.keys, layer.values))
