"""What happens to caches between forward passes: rearranged, cropped, moved from device to device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvobs.bus import Bus
from kvobs.model import CacheGone, Migration, Origin, Resized, Rewrite
from kvobs.sources._patch import Patches
from kvobs.sources.transformers._actions import Actions
from kvobs.sources.transformers._caches import SOURCE, CacheRecord, CacheRegistry
from kvobs.sources.transformers._local import Local

Function = Callable[..., Any]


class Between:
    """Makes the wrappers of ``Cache`` methods that rearrange, and of a layer's ``offload`` and ``prefetch``."""

    def __init__(self, bus: Bus, patches: Patches, caches: CacheRegistry, local: Local,
                 is_compiling: Callable[[], bool], actions: Actions) -> None:
        self._bus, self._patches, self._caches, self._local = bus, patches, caches, local
        self._is_compiling, self._actions = is_compiling, actions

    def resweep(self, cache: Any) -> None:
        """A pass failed half way: what its cache holds now is told all the same."""
        record = self._caches.find(cache) if cache is not None else None
        if record is not None and not record.blind:
            try:
                self.rewritten(record, lengths=True)
            except Exception:
                self.lose_sight(record)  # its device may be lost

    def lose_sight(self, record: CacheRecord) -> None:
        """A cache cannot be measured any more: its last sizes are taken back rather than left to go stale."""
        record.blind = True
        self._bus.publish(CacheGone(time.monotonic_ns(), record.id))

    def rewriting(self, name: str) -> Callable[[Function], Function]:
        """Around a ``Cache`` method that rearranges buffers between passes."""

        def make(original: Function) -> Function:
            bus, caches, is_compiling, between = self._bus, self._caches, self._is_compiling, self

            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if is_compiling() or not bus.active:
                    return original(self, *args, **kwargs)
                record = caches.find(self)
                between._actions.begins(record)
                try:
                    result = original(self, *args, **kwargs)
                finally:
                    between._actions.ends(record)
                if record is not None and not record.blind:
                    try:
                        between.rewritten(record, lengths=name in ("crop", "reset"))
                    except Exception as error:
                        between._patches.fail(f"Cache.{name}", error)
                return result

            return method

        return make

    def rewritten(self, record: CacheRecord, *, lengths: bool) -> None:
        """Sweep a cache that was rearranged, and tell what it holds now."""
        layers = record.layers()
        if layers is None:
            return
        if record.epoch != self._bus.epoch:
            record.begin_again(layers, self._bus.epoch)
        if record.deep is not None:
            record.deep.probe.reset()
        delta = record.sweep.rewritten(layers, lengths=lengths)
        turn = self._local.turn or record.bare
        if turn is not None and record.id in turn.records:
            turn.rewrote(record, delta)
        now = time.monotonic_ns()
        cache = record.ref() if record.ref is not None else None
        origin = record.origin
        if origin is None or delta.by_device or delta.moves:
            origin = record.identify(cache, layers)
        if delta.reallocations:
            self._bus.publish(Rewrite(now, origin, record.id, delta.reallocations, delta.copied))
        self._bus.publish(Resized(now, origin, record.id, delta.held, delta.reserved, delta.largest, delta.by_device))
        for src, dst, buffers, size in delta.moves:
            self._bus.publish(Migration(now, origin, record.id, src, dst, buffers, size, None))

    def moving(self, name: str) -> Callable[[Function], Function]:
        """Around a layer's ``offload`` or ``prefetch``: bytes between devices and the host time of the call."""

        def make(original: Function) -> Function:
            bus, is_compiling, between = self._bus, self._is_compiling, self

            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                keys = getattr(self, "keys", None)
                if keys is None or is_compiling() or not bus.active:
                    return original(self, *args, **kwargs)
                source, before = keys.device, _addresses(self)
                began = time.monotonic_ns()
                result = original(self, *args, **kwargs)
                ended = time.monotonic_ns()
                try:
                    if self.keys.device != source and self.keys.numel():
                        between._moved(self, str(source), before, began, ended)
                except Exception as error:
                    between._patches.fail(f"CacheLayerMixin.{name}", error)
                return result

            return method

        return make

    def _moved(self, layer: Any, src: str, before: dict[str, int], began: int, ended: int) -> None:
        dst = str(layer.keys.device)
        size = layer.keys.nbytes + layer.values.nbytes
        found = self._caches.locate(layer)
        origin = Origin(SOURCE, "unknown", type(layer).__name__, dst, str(layer.keys.dtype).removeprefix("torch."))
        record_id = 0
        turn = self._local.turn
        if found is not None:
            record, index = found
            record.sweep.moved(index, layer, before)
            origin, record_id = record.origin or origin, record.id
            turn = turn or record.bare
        if turn is not None:
            turn.moved(ended, src, dst, 2, size, ended - began)
        self._bus.publish(Migration(ended, origin, record_id, src, dst, 2, size, ended - began))
        if found is not None and not self._local.busy:  # within a pass the sweep at its end tells the sizes
            self.rewritten(record, lengths=False)


def _addresses(layer: Any) -> dict[str, int]:
    try:
        return {name: getattr(layer, name).untyped_storage().data_ptr() for name in ("keys", "values")}
    except Exception:  # a stand-in without memory
        return {}
