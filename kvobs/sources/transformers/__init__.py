"""Hugging Face transformers 5.x: every cache class, every way to call a model, without user code.

Facts. One hook per forward pass (``PreTrainedModel.__call__``, outermost call only) sweeps the cache it used;
``get_compiled_call`` covers the compiled decode of ``generate``, whose traced code never sees the hook. The
calls that rearrange a cache between passes (``reorder_cache``, ``crop`` and the like) and those that move a
layer (``offload``, ``prefetch``) are hooked too, since a sweep cannot see through two changes at once. The
forward argument is ``cache`` from 5.24 and ``past_key_values`` before.
"""

from kvobs.sources.transformers._source import SUPPORTED, TransformersSource

__all__ = ["SUPPORTED", "TransformersSource"]
