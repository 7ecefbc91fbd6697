"""Which caches are alive, under which session, and what the last sweep saw. Holds caches weakly."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from typing import Any

from kvobs.model import CacheGone, Emit, Origin
from kvobs.sources._identity import next_cache_id
from kvobs.sources.transformers._layers import layers_of, measurable
from kvobs.sources.transformers._sweep import CacheSweep

SOURCE = "transformers"
_INNER = ("self_attention_cache", "cross_attention_cache")


class CacheRecord:
    """What kvobs remembers of one cache. ``ref`` is weak; ``lock`` guards the turn of bare forward calls.

    ``adrift``: it was filled while observation paused, by a turn whose rest is not to be told as a turn. ``user`` is
    the thread that used it last, until ``used_ns``. ``host`` is the model of its latest pass (weak), ``flat`` whether
    that was given a 2-D mask or none; both only where caches may be cut.
    """

    __slots__ = ("adrift", "bare", "blind", "deep", "epoch", "flat", "host", "id", "keys", "lock", "model", "named",
                 "origin", "ref", "session", "sweep", "turns", "used_ns", "user")

    def __init__(self, model: str, epoch: int) -> None:
        self.id = next_cache_id()
        self.epoch = epoch
        self.deep: Any = None
        self.model = model
        self.session, self.named, self.turns = "", False, 0
        self.sweep = CacheSweep()
        self.origin: Origin | None = None
        self.blind = self.adrift = False
        self.host: weakref.ref[Any] | None = None
        self.flat = True
        self.bare: Any = None
        self.lock = threading.Lock()
        self.user, self.used_ns = threading.get_ident(), time.monotonic_ns()
        self.keys: list[int] = []
        self.ref: weakref.ref[Any] | None = None

    def belongs(self, session: str, turn: int, *, named: bool) -> None:
        """The session that the cache's next turn continues, and the number of its latest turn."""
        self.session, self.turns, self.named = session, turn, named

    def begin_again(self, layers: list[Any], epoch: int) -> None:
        """After a pause: what the cache holds now is its baseline, what happened meanwhile is not told."""
        self.epoch, self.deep, self.sweep = epoch, None, CacheSweep()
        self.sweep.baseline(layers)
        self.adrift = self.sweep.length() > 0

    def cache(self) -> Any:
        """The cache, or None when it is gone."""
        return self.ref() if self.ref is not None else None

    def layers(self) -> list[Any] | None:
        """The cache's layers now, or None when it is gone."""
        cache = self.cache()
        return None if cache is None else layers_of(cache)

    def missing(self) -> int:
        """Token positions that were cut out of it (see _actions_cut)."""
        return next((int(getattr(layer, "cut_tokens", 0)) for layer in self.layers() or ()), 0)

    def identify(self, cache: Any, layers: list[Any]) -> Origin:
        """Who this cache is, read from its first layer that holds keys."""
        device = dtype = "unknown"
        for layer in layers:
            keys = getattr(layer, "keys", None)
            if keys is None:
                keys = next(iter((getattr(layer, "recurrent_states", None) or {}).values()), None)
            if keys is not None:
                device, dtype = str(keys.device), str(keys.dtype).removeprefix("torch.")
                break
        kind = type(cache).__name__
        quantized = next((type(x).__name__ for x in layers if hasattr(x, "_quantized_keys")), "")
        if getattr(cache, "offloading", False):
            kind = f"{kind}(offloaded)"
        self.origin = Origin(SOURCE, self.model, quantized or kind, device, dtype)
        return self.origin


class CacheRegistry:
    """Records by cache identity; an encoder-decoder cache is also known by its two inner caches."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._records: dict[int, CacheRecord] = {}
        self._layers: dict[int, tuple[CacheRecord, int]] = {}
        self.gone: deque[CacheRecord] = deque()
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()  # whose forward passes made or filled a cache

    def find(self, cache: Any) -> CacheRecord | None:
        """The record of a cache (or of the one it is part of), if it is followed."""
        record = self._records.get(id(cache))
        if record is None or record.ref is None:
            return None
        owner = record.ref()
        inner = (getattr(owner, name, None) for name in _INNER)
        return record if owner is cache or any(part is cache for part in inner) else None

    def add(self, cache: Any, model: str, layers: list[Any], epoch: int = 0, *, fresh: bool = False) -> CacheRecord:
        """Begin to follow a cache; what it holds already is its baseline, unless the pass just made it (``fresh``)."""
        record = CacheRecord(model, epoch)
        record.blind = not measurable(layers)
        inner = [getattr(cache, name, None) for name in _INNER]
        for part in (cache, *inner):
            if part is not None:
                record.keys.append(id(part))
                self._records[id(part)] = record
        record.ref = weakref.ref(cache, functools.partial(self._drop, record))
        if not record.blind:
            record.sweep.baseline([] if fresh else layers)
            record.adrift = epoch > 0 and record.sweep.length() > 0
        return record

    def locate(self, layer: Any) -> tuple[CacheRecord, int] | None:
        """The followed cache that a layer belongs to, and its position there."""
        found = self._layers.get(id(layer))
        if found is not None:
            layers = found[0].layers()
            if layers is not None and found[1] < len(layers) and layers[found[1]] is layer:
                return found
        for record in list(self._records.values()):
            for index, candidate in enumerate(record.layers() or ()):
                if candidate is layer:
                    if len(self._layers) > 10_000:
                        self._layers.clear()
                    self._layers[id(layer)] = (record, index)
                    return record, index
        return None

    def records(self) -> list[CacheRecord]:
        """Every followed cache once."""
        return list({record.id: record for record in list(self._records.values())}.values())

    def _drop(self, record: CacheRecord, _: object) -> None:
        # Runs inside the garbage collector, on any thread: only appends and pops.
        for key in record.keys:
            if self._records.get(key) is record:
                del self._records[key]
        if record.bare is not None:
            self.gone.append(record)
        self._emit(CacheGone(time.monotonic_ns(), record.id))

    def clear(self) -> None:
        """Forget every cache."""
        for record in self.records():
            record.ref = None
        self._records.clear()
        self._layers.clear()
        self.models.clear()
        self.gone.clear()
