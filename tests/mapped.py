"""An accelerator whose statistics are the twin's in every family, and caches and weights whose holders are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvobs import model
from kvobs.allocator.memory_map import Held
from kvobs.allocator.settings import Settings
from kvobs.bus import Bus
from kvobs.sources._torch import TorchSource
from tests.accelerator import Accelerator, Cache
from tests.fake_torch import stat, stats


class Mapped(Accelerator):
    """One device, which ``twin`` serves and counts."""

    def __init__(self, capacity: int, settings: Settings | None = None) -> None:
        super().__init__(capacity, settings)
        self.weights: list[int] = []
        self.caches: dict[str, Cache] = {}

    def _stats(self, index: int) -> dict[str, Any]:
        super()._stats(index)
        found, listed = self.twin.stats(), self.twin.snapshot_document()["segments"]
        active = sum(block["state"] != "inactive" for one in listed for block in one["blocks"])
        self.devices = [stats(reserved_bytes=stat(found.reserved), allocated_bytes=stat(found.allocated),
                              active_bytes=stat(found.active), requested_bytes=stat(found.requested),
                              segment=stat(len(listed)), active=stat(active), inactive_split=stat(0),
                              num_device_alloc=found.device_allocs, num_device_free=found.device_frees)]
        return self.devices[0]

    def held(self) -> list[Held]:
        """Whose the blocks are, as source transformers tells it."""
        found = [Held(address, "cuda:0", ("weights", "tiny", None)) for address in self.weights]
        for number, (session, cache) in enumerate(self.caches.items(), 1):
            found += [Held(tensor.address, "cuda:0", ("kv", session, number))
                      for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return found

    def grow(self, session: str) -> None:
        """A decode step of one cache."""
        for layer in self.caches[session].layers:
            for tensor in (layer.keys, layer.values):
                batch, heads, rows, width = tensor.shape
                old = tensor.address
                tensor.address = self.twin.alloc((rows + 1) * width * 2)
                tensor.shape = (batch, heads, rows + 1, width)
                self.twin.free(old)


def source_on(fake: Mapped, watched: Callable[[], bool], held: Callable[[], Iterable[Held]] | None = None,
              share: float = 0.05, emit: Callable[[model.Event], None] = lambda event: None) -> TorchSource:
    """A source torch on it, installed, that is told whether somebody looks."""
    made = TorchSource(Bus(8), fake)
    made.maps.watch(watched, fake.held if held is None else held, share)
    made.install(emit)
    return made
