"""A device whose allocator is the twin, and caches that lie in its blocks and grow as transformers' do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from kvobs.allocator.recorder import RecordingAllocator
from kvobs.allocator.settings import Settings
from kvobs.allocator.twin import OutOfMemory
from kvobs.allocator.verdict import Verdict
from tests.fake_torch import FakeTorch, stat, stats

ELEMENT = 2  # bytes, as of bfloat16


class Storage:
    """Where a tensor lies."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class Tensor:
    """K or V of one layer: batch x heads x rows x width."""

    def __init__(self, address: int, rows: int, row_bytes: int, device: str = "cuda:0", *, grad: bool = False) -> None:
        self.shape, self.device, self.requires_grad = (1, 1, rows, row_bytes // ELEMENT), device, grad
        self.address = address

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape[2] * self.shape[3]

    def element_size(self) -> int:
        return ELEMENT

    def untyped_storage(self) -> Storage:
        return Storage(self.address)


class Layer:
    """A layer that grows by concatenation."""

    def __init__(self, keys: Tensor, values: Tensor, *, sliding: bool = False) -> None:
        self.keys, self.values, self.is_sliding = keys, values, sliding


class Cache:
    """A cache; ``layers`` as transformers has them."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers


class Accelerator(FakeTorch):
    """A torch with one device of ``capacity`` bytes, which ``twin`` serves."""

    def __init__(self, capacity: int, settings: Settings | None = None, kind: str = "cuda") -> None:
        super().__init__(kind=kind)
        self.device = f"{kind}:0"
        self.capacity = capacity
        self.twin = RecordingAllocator(settings, self.capacity, max_entries=1, space=1 << 42)
        self.share = 1.0
        getattr(self, kind).get_per_process_memory_fraction = lambda index: self.share

    def cache(self, layers: int, rows: int, row_bytes: int, stream: int = 0, *, sliding: bool = False) -> Cache:
        """A new cache, whose K and V are allocated now."""
        size = rows * row_bytes
        return Cache([Layer(*(Tensor(self.twin.alloc(size, stream), rows, row_bytes, self.device) for _ in "kv"),
                            sliding=sliding) for _ in range(layers)])

    def step(self, caches: list[Cache], stream: int = 0) -> tuple[list[Verdict | None], RecordingAllocator]:
        """What a copy of the allocator does with the next step of each cache, per request; None is out of memory."""
        twin = copy.deepcopy(self.twin)
        done: list[Verdict | None] = []
        for size, old in (need for cache in caches for layer in cache.layers for need in _grow(layer)):
            before, taken = twin.stats(), twin.device.used  # type: ignore[attr-defined]
            try:
                twin.alloc(size, stream)
            except OutOfMemory:
                return [*done, None], twin
            after = twin.stats()
            # Whatever succeeds only after the device refused first gives memory back, in a retry or without one.
            again = after.retries > before.retries or after.device_frees > before.device_frees
            gave = twin.device.used > taken  # type: ignore[attr-defined]
            done.append(Verdict.RECLAIM if again else Verdict.GROW if gave else Verdict.SERVED)
            for address in old:
                twin.free(address)
        return done, twin

    def _snapshot(self, mempool_id: object = None, include_traces: bool = True) -> list[dict[str, Any]]:
        self.snapshot = self.twin.snapshot_document()["segments"]
        self.conf = self.twin.settings.conf()
        return super()._snapshot(mempool_id, include_traces)

    def _stats(self, index: int) -> dict[str, Any]:
        found = self.twin.stats()
        self.devices = [stats(reserved_bytes=stat(found.reserved), allocated_bytes=stat(found.allocated))]
        return super()._stats(index)

    def _info(self, index: int) -> tuple[int, int]:
        return self.capacity - self.twin.device.used, self.capacity  # type: ignore[attr-defined]


def _grow(layer: Layer) -> Iterator[tuple[int, list[int]]]:
    """A decode step as ``DynamicLayer.update`` does it: the bytes of each ``torch.cat``, and what is freed after it."""
    sizes = [(tensor.shape[2] + 1) * tensor.shape[3] * ELEMENT for tensor in (layer.keys, layer.values)]
    old = [layer.keys.address, layer.values.address]
    if layer.is_sliding:  # both windows are replaced after both concatenations
        yield sizes[0], []
        yield sizes[1], old
    else:
        yield sizes[0], old[:1]
        yield sizes[1], old[1:]
