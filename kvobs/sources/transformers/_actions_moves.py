"""Moving the K and V of live caches: into exact buffers, to host memory, and back. Runs at the safe point.

Only layers whose class is known grow, crop and reorder by making new tensors; only those are moved, one layer at a
time, so that never more than one layer is there twice. Values stay what they were, to the bit.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from kvobs.sources._torch_handle import CUDA, Torch
from kvobs.sources._torch_stats import blocks
from kvobs.sources._torch_verdict import MOST_BLOCKS
from kvobs.sources.transformers._actions_growth import HOST, Growth
from kvobs.sources.transformers._actions_use import Uses
from kvobs.sources.transformers._caches import CacheRecord

MOST_SHARE = 0.5  # a segment that is used more than this is not worth emptying
PACKED = 0.8  # of the free bytes elsewhere, which lie in pieces
TRIES = 8
LEFT = 0.5  # of a device that stays free where something is brought back before it is used
_GROUP = ("device", "stream", "segment_pool_id", "segment_type")
_NAMES = ("keys", "values")


class Device(msgspec.Struct):
    """The accelerator's allocator, as far as it can be asked: ``torch`` is None where there is none."""

    torch: Torch | None
    kind: str

    def figure(self, family: str) -> int:
        """Bytes of all devices in a family of the allocator's statistics; 0 where there is no allocator."""
        if self.torch is None:
            return 0
        return sum(int(self.torch.stats(index)[family]["all"]["current"]) for index in range(self.torch.device_count()))

    def spare(self, left: float) -> list[float]:
        """Bytes that each device has free beyond the share ``left`` of what this process may have there."""
        found: list[float] = []
        for index in range(self.torch.device_count()) if self.torch is not None else ():
            assert self.torch is not None
            stats = self.torch.stats(index)
            reserved, allocated = (int(stats[family]["all"]["current"]) for family in ("reserved_bytes",
                                                                                       "allocated_bytes"))
            free, allowed = self.torch.free_bytes(self.kind, index) if reserved else (0, None)
            whole = reserved + (free if allowed is None else min(free, max(allowed - reserved, 0)))
            found.append((1 - left) * whole - allocated)
        return found

    def synchronise(self) -> None:
        """Wait for all devices: what is moved may have been written on another thread's stream."""
        if self.torch is not None:
            for index in range(self.torch.device_count()):
                self.torch.synchronise(index)

    def empty(self) -> None:
        """Return segments that hold nothing."""
        if self.torch is not None:
            self.torch.empty_cache()

    def segments(self) -> list[Mapping[str, Any]]:
        """The segments, where listing them costs little; else none."""
        torch = self.torch
        if torch is None or torch.unlisted(self.kind) or torch.resolves_stacks(self.kind):
            return []
        if sum(blocks(torch.stats(index)) for index in range(torch.device_count())) > MOST_BLOCKS:
            return []
        return torch.segments(self.kind)


def find_device() -> Device:
    """The accelerator that this process uses."""
    import torch

    handle = Torch(torch)
    kind = handle.in_use()
    return Device(handle if kind is not None else None, kind or HOST)


class Segments:
    """Address ranges of the segments that are to be emptied: those that hold nothing but movable tensors and little of
    those, the emptiest first, as far as the others of their device, stream and pool have room for what is in them.
    """

    def __init__(self, segments: Iterable[Mapping[str, Any]], movable: set[int]) -> None:
        groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
        for one in segments:
            groups.setdefault(tuple(str(one.get(key)) for key in _GROUP), []).append(one)
        found = sorted((int(one["address"]), int(one["total_size"])) for group in groups.values()
                       for one in _to_empty(group, movable))
        self._starts, self._ends = [start for start, _ in found], [start + size for start, size in found]

    def hold(self, address: int) -> bool:
        """Does an address lie in one of them?"""
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]


def _to_empty(group: list[Mapping[str, Any]], movable: set[int]) -> Iterator[Mapping[str, Any]]:
    room, moved = sum(one["total_size"] - _used(one) for one in group), 0
    for segment in sorted(group, key=_used):
        used = _used(segment)
        if used and used <= MOST_SHARE * segment["total_size"] and all(
                block["address"] in movable for block in segment["blocks"] if block["state"] != "inactive"):
            room -= segment["total_size"] - used
            if moved + used > PACKED * room:
                return
            moved += used
            yield segment


def _used(segment: Mapping[str, Any]) -> int:
    return sum(int(block["size"]) for block in segment["blocks"] if block["state"] != "inactive")


def waste(tensor: Any) -> int:
    """Bytes of a tensor's storage that it does not show."""
    return int(tensor.untyped_storage().nbytes() - tensor.numel() * tensor.element_size())


class Moves:
    """Moves what ``records`` hold, the caches whose use is known; of ``everything`` something may be away.

    ``tell`` is called with each that was rearranged.
    """

    def __init__(self, uses: Uses, growth: Growth, records: Callable[[], Iterable[CacheRecord]],
                 everything: Callable[[], Iterable[CacheRecord]], tell: Callable[[CacheRecord], None]) -> None:
        self._uses, self._growth, self._tell = uses, growth, tell
        self._records, self._everything = records, everything

    def layers(self, record: CacheRecord) -> list[Any]:
        """A cache's layers that hold something, if all are of a class that may be moved; else none."""
        cache = record.cache()
        if cache is None or getattr(cache, "self_attention_cache", None) is not None or getattr(
                cache, "offloading", False):
            return []
        layers = record.layers() or []
        if not all(self._growth.movable(layer) for layer in layers):
            return []
        return [layer for layer in layers if layer.is_initialized and layer.keys is not None and layer.keys.numel()
                and not layer.keys.requires_grad and not layer.values.requires_grad]

    def others(self) -> list[str]:
        """The classes of live caches' layers that are not moved."""
        return sorted({type(layer).__name__ for record in self._records() for layer in record.layers() or ()
                       if not self._growth.movable(layer)})

    # -- exact buffers ---------------------------------------------------------------------------------

    def wasted(self) -> int:
        """Bytes that exact buffers would save, without what a layer is about to grow into."""
        return sum(waste(tensor) for record in self._records() for layer in self.layers(record)
                   for tensor in self._wasteful(record, layer))

    def _wasteful(self, record: CacheRecord, layer: Any) -> list[Any]:
        if self._growth.spare(layer) and not self._uses.rested(record):
            return []
        return [tensor for tensor in (layer.keys, layer.values) if waste(tensor)]

    def compact(self, device: Device, deadline_ns: int) -> int:
        """Copy what wastes room or pins a segment, return empty segments; bytes given back by it, measured."""
        device.synchronise()
        reserved = device.figure("reserved_bytes")
        pins = Segments(device.segments(), self._addresses())
        plugs: list[Any] = []
        on_host = 0
        for record, layers in self._held(deadline_ns):
            changed = False
            for layer in layers:
                if time.monotonic_ns() > deadline_ns:
                    break
                wasteful = {id(tensor) for tensor in self._wasteful(record, layer)}
                for name in _NAMES:
                    tensor = getattr(layer, name)
                    pinned = pins.hold(tensor.untyped_storage().data_ptr())
                    if id(tensor) not in wasteful and not pinned:
                        continue
                    fresh = _elsewhere(tensor, pins, plugs, device) if pinned else _exact(tensor)
                    if fresh is not None:
                        on_host += waste(tensor) if tensor.device.type == HOST else 0
                        setattr(layer, name, fresh)
                        self._growth.forget(layer)
                        changed = True
                    tensor = fresh = None
            if changed:
                self._tell(record)
        plugs.clear()
        device.synchronise()
        device.empty()
        return on_host + max(0, reserved - device.figure("reserved_bytes"))

    def trim(self, deadline_ns: int) -> int:
        """Copy growing layers with spare room into exact buffers; bytes of their storages, before less after."""
        freed = 0
        for record, layers in self._held(deadline_ns):
            changed = 0
            for layer in layers:
                for name in _NAMES:
                    tensor = getattr(layer, name)
                    if self._growth.growing(layer) and waste(tensor) and time.monotonic_ns() <= deadline_ns:
                        changed += waste(tensor)
                        setattr(layer, name, _exact(tensor))
            if changed:
                self._tell(record)
            freed += changed
        return freed

    def _addresses(self) -> set[int]:
        """Storages that may be moved; what two tensors share may not."""
        found: dict[int, int] = {}
        for record in self._records():
            for layer in self.layers(record):
                for name in _NAMES:
                    address = getattr(layer, name).untyped_storage().data_ptr()
                    found[address] = found.get(address, 0) + 1
        return {address for address, count in found.items() if count == 1}

    def _held(self, deadline_ns: int) -> Iterator[tuple[CacheRecord, list[Any]]]:
        """Each cache that may be taken now, with its layers, while there is time."""
        import torch

        for record in self._records():
            if time.monotonic_ns() > deadline_ns:
                return
            with self._uses.taking(record) as held, torch.no_grad():
                if held and (layers := self.layers(record)):
                    yield record, layers

    # -- host memory -----------------------------------------------------------------------------------

    def idle(self) -> int:
        """Bytes of an accelerator that idle caches hold."""
        return sum(tensor.untyped_storage().nbytes() for record in self._records() if self._uses.rested(record)
                   for layer in self.layers(record) for tensor in (layer.keys, layer.values)
                   if tensor.device.type != HOST)

    def offload(self, device: Device, deadline_ns: int) -> int:
        """Move idle caches to host memory; how many bytes fewer are allocated afterwards, measured."""
        device.synchronise()
        before = device.figure("allocated_bytes")
        for record, layers in self._held(deadline_ns):
            there = [layer for layer in layers if layer.keys.device.type != HOST]
            if not there or not self._uses.rested(record):
                continue
            for layer in there:
                if time.monotonic_ns() > deadline_ns:
                    break
                self._growth.left(layer)
                self._growth.forget(layer)
                for name in _NAMES:
                    setattr(layer, name, _on_host(getattr(layer, name)))
                device.synchronise()
            self._tell(record)
        return max(0, before - device.figure("allocated_bytes"))

    def fetch(self, record: CacheRecord, device: Callable[[], Device]) -> bool:
        """Bring a cache back to its device, for a pass or for good; False where there is no room for it."""
        away = [layer for layer in record.layers() or () if self._growth.is_away(layer)]
        if not away:
            return True
        try:
            for layer in away:
                try:
                    self._growth.back(layer)
                except RuntimeError:  # out of memory
                    device().empty()
                    self._growth.back(layer)
        except RuntimeError:
            return False
        self._tell(record)
        return True

    def fetch_all(self, device: Device, left: float = LEFT) -> int:
        """Bring back what is away, the latest used first, while the share ``left`` of a device stays free; how many
        caches stay away.

        Whoever is used comes back anyway, and an engine that gave memory up because it was short would be so again.
        """
        room = device.spare(left)
        failed = 0
        for record in sorted(self._everything(), key=lambda one: one.used_ns or 0, reverse=True):
            away = [layer for layer in record.layers() or () if self._growth.is_away(layer)]
            sizes = Counter[int]()
            for layer in away:
                sizes[layer.device.index or 0] += layer.keys.nbytes + layer.values.nbytes
            fits = all(index >= len(room) or size <= room[index] for index, size in sizes.items())
            if away and not (fits and self.fetch(record, lambda: device)):
                failed += 1
                continue
            for index, size in sizes.items():
                if index < len(room):
                    room[index] -= size
        device.synchronise()
        return failed


def _exact(tensor: Any) -> Any:
    return tensor.new_empty(tensor.shape).copy_(tensor)


def _elsewhere(tensor: Any, pins: Segments, plugs: list[Any], device: Device) -> Any:
    """A copy outside the segments that are to be emptied, in memory that the allocator has; None where there is none.

    Copies that land inside them are kept as plugs meanwhile, so that the next one lands elsewhere.
    """
    reserved = device.figure("reserved_bytes")
    for _ in range(TRIES):
        try:
            fresh = tensor.new_empty(tensor.shape)
        except RuntimeError:  # out of memory
            return None
        if device.figure("reserved_bytes") > reserved:
            return None
        if not pins.hold(fresh.data_ptr()):
            return fresh.copy_(tensor)
        plugs.append(fresh)
    return None


def _on_host(tensor: Any) -> Any:
    if tensor.device.type != CUDA:
        return tensor.to(HOST)
    import torch

    try:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # the host has no more memory that may be pinned
        return tensor.to(HOST)
    return pinned.copy_(tensor, non_blocking=True)
