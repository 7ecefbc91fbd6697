"""Who holds which memory of an accelerator: the storages of live caches and of models that were seen, by address.

Asked for while somebody looks at a memory map, from any thread. Nothing is kept, nothing is read from a device. What
is rearranged at that very moment is left out rather than guessed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvobs.allocator.memory_map import KV, WEIGHTS, Held, HolderName
from kvobs.sources.transformers._caches import CacheRecord
from kvobs.sources.transformers._calls import model_name
from kvobs.sources.transformers._layers import stored

_CPU = "cpu"


def held(records: Iterable[CacheRecord], models: Iterable[Any], shown: Callable[[str], str]) -> list[Held]:
    """The storages of each; ``shown`` says a session's name as events have it."""
    found: list[Held] = []
    for record in records:
        if not record.blind:
            session = shown(record.session)[:80] if record.session else ""
            found += _places((KV, session, record.id), _of_cache(record))
    for model in models:
        found += _places((WEIGHTS, model_name(model)[:80], None), itertools.chain(model.parameters(), model.buffers()))
    return found


def _of_cache(record: CacheRecord) -> Iterator[Any]:
    for layer in record.layers() or ():
        for _, tensor in stored(layer):
            yield tensor


def _places(name: HolderName, tensors: Iterator[Any]) -> Iterator[Held]:
    """One entry per tensor that lies on an accelerator, as far as the tensors can be told."""
    with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
        for tensor in tensors:
            if tensor.device.type != _CPU:
                yield Held(tensor.untyped_storage().data_ptr(), str(tensor.device), name)
