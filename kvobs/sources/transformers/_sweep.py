"""One sweep over a cache after a step: what moved, what was written, what is held.

No tensor, layer or cache is kept: only addresses, sizes and device names, so that nothing lives longer because it
is observed.

The usual case (every layer holds K and V and grows alike) is decided from two addresses per layer and one
shape per group of equal layers; anything else takes the exact path, which looks at every tensor.

Rules. A re-allocation is a K or V storage that is replaced by another one with content; a static layer's first
buffer is its reservation and not a re-allocation, a dynamic layer's first fill replaces the empty buffer it was
created with. Of the bytes in replaced storages, those of new tokens are *written* and the others *copied*. For
quantized and other unusual layers written is the net growth of stored bytes, so written + copied is always the
size of the replaced storages. A static layer is written in place, every token once; the in-place shifts of its full
sliding window are not counted as copies. States of linear attention are held and reserved, never written or copied.
A buffer on another device than at the last sweep was moved before the step: what it held then was moved, and what the
step did to it there counts as ever.
"""

from __future__ import annotations

import operator
from typing import Any

import msgspec

from kvobs.sources.transformers._layers import IN_PLACE, STATES, filled, kind_of, row_bytes, seen_length, stored

_NOWHERE = -1
GROWING = frozenset({"dynamic", "sliding"})  # every step that feeds such a layer puts new buffers into it


class Delta(msgspec.Struct, gc=False):
    """What one step did to a cache and what it holds now; bytes. ``moves`` is (src, dst, buffers, bytes)."""

    reallocations: int = 0
    written: int = 0
    copied: int = 0
    held: int = 0
    reserved: int = 0
    largest: int = 0
    moves: tuple[tuple[str, str, int, int], ...] = ()
    by_device: tuple[tuple[str, int, int, int], ...] = ()


class _Buffer(msgspec.Struct, gc=False):
    address: int
    device: str
    storage_bytes: int


class _Group(msgspec.Struct):
    """Layers of one kind and shape: ``row_bytes`` is one token position of all their K and V.

    The first of ``layers`` stands for all; ``slot`` is where its K address is found.
    """

    kind: str
    slot: int
    batch: int
    rows: int
    storage_rows: int
    row_bytes: int
    key_row_bytes: int
    largest_row_bytes: int
    layers: list[int]


class CacheSweep:
    """Follows one cache from step to step."""

    __slots__ = ("_addresses", "_attention", "_buffers", "_devices", "_fast", "_groups", "_held", "_length",
                 "_number", "_sliding")

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._devices: list[Any] = []
        self._attention: list[int] = []
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        self._groups: list[_Group] = []
        self._held: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._sliding: frozenset[int] = frozenset()
        self._number = -1
        self._fast = False

    # -- the engine's thread ---------------------------------------------------------------------------

    def baseline(self, layers: list[Any]) -> None:
        """Take the cache as it is: what it holds already was neither written nor moved under our eyes."""
        for index, layer in enumerate(layers):
            self._length[index] = seen_length(layer)
        self._exact(layers, 0)

    def length(self) -> int:
        """Token positions per sequence that the cache has seen, by its first layer that counts them."""
        return next((length for length in self._length.values() if length), 0)

    def step(self, layers: list[Any], query_length: int) -> Delta:
        """Compare with the state after the previous step, ``query_length`` token positions per row ago."""
        if self._fast and len(layers) == self._number:
            delta = self._quick(layers, query_length)
            if delta is not None:
                return delta
        return self._exact(layers, query_length)

    def rewritten(self, layers: list[Any], *, lengths: bool = True) -> Delta:
        """After a call that rearranges the cache between steps (beam reorder, crop, reset): all is copied.

        ``lengths`` says whether it may have changed how many positions are held: only then are they read again.
        """
        self._settle()
        if lengths:
            for index, layer in enumerate(layers):
                self._length[index] = seen_length(layer)
        delta = self._exact(layers, 0)
        delta.copied += delta.written
        delta.written = 0
        return delta

    def moved(self, index: int, layer: Any, before: dict[str, int]) -> None:
        """A layer's move between devices was counted by the call that made it: take it as known.

        ``before`` are the addresses ahead of the move: what had been replaced since the last step stays to be counted.
        """
        self._settle()
        for name, tensor in stored(layer):
            buffer = self._buffers.get((index, name))
            if buffer is not None and name in before:
                seen = buffer.address == before[name]
                buffer.address = tensor.untyped_storage().data_ptr() if seen else _NOWHERE
                buffer.device = str(tensor.device)

    # -- the usual case --------------------------------------------------------------------------------

    def _quick(self, layers: list[Any], query_length: int) -> Delta | None:
        addresses: list[int] = []
        devices: list[Any] = []
        sliding = self._sliding
        add, add_device = addresses.append, devices.append
        for index in self._attention:
            layer = layers[index]
            keys = layer.keys
            if index in sliding:  # a window is a view into its storage; every other tensor begins its own
                add(keys.untyped_storage().data_ptr())
                add(layer.values.untyped_storage().data_ptr())
            else:
                add(keys.data_ptr())
                add(layer.values.data_ptr())
            add_device(keys.device)
        if devices != self._devices:
            return None
        changed = sum(map(operator.ne, addresses, self._addresses))
        delta = Delta(reallocations=changed)
        expected = 0
        lengths: list[tuple[int, int, int]] = []
        for group in self._groups:
            keys = layers[group.layers[0]].keys
            batch, _, rows, _ = keys.shape
            if batch != group.batch:
                return None
            length = self._length[group.layers[0]] + query_length
            storage_rows = group.storage_rows
            if group.kind == "static":
                held_rows, new = min(length, rows), min(query_length, rows)
            elif addresses[group.slot] == self._addresses[group.slot]:
                # Grown into spare room (see _actions_growth), or untouched in this step, as cross-attention is.
                new = rows - group.rows
                if new and not (group.kind == "dynamic" and new == query_length):
                    return None
                held_rows, length = rows, rows if new else length - query_length
            elif group.kind == "cross":
                return None
            else:
                expected += 2 * len(group.layers)
                held_rows = rows
                key_row = group.key_row_bytes
                storage_rows = keys.untyped_storage().nbytes() // key_row if key_row else rows
                if group.kind == "dynamic":  # what its storage has beyond the rows is spare room, and was not copied
                    new, length, replaced = rows - group.rows, rows, rows
                else:
                    new, replaced = query_length, storage_rows
                if not 0 <= new <= replaced:
                    return None
                delta.copied += (replaced - new) * group.row_bytes
            delta.written += new * group.row_bytes
            delta.held += held_rows * group.row_bytes
            delta.reserved += storage_rows * group.row_bytes
            delta.largest = max(delta.largest, storage_rows * group.largest_row_bytes)
            lengths.append((length, rows, storage_rows))
        if changed != expected:
            return None
        self._addresses = addresses
        for group, (length, group.rows, group.storage_rows) in zip(self._groups, lengths, strict=True):
            self._length[group.layers[0]] = length
        return delta

    # -- every other case ------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Write what the quick path knows per group back to every layer, then let the exact path take over."""
        for group in self._groups:
            length = self._length[group.layers[0]]
            rows = min(length, group.rows) if group.kind == "static" else group.rows
            one_row = group.row_bytes // len(group.layers)
            for index in group.layers:
                self._length[index] = length
                self._held[index] = rows * one_row
                self._buffers[index, "keys"].storage_bytes = group.storage_rows * group.key_row_bytes
                self._buffers[index, "values"].storage_bytes = group.storage_rows * (one_row - group.key_row_bytes)
        if self._groups:
            for slot, index in enumerate(self._attention):
                self._buffers[index, "keys"].address = self._addresses[2 * slot]
                self._buffers[index, "values"].address = self._addresses[2 * slot + 1]
        self._groups, self._fast = [], False

    def _exact(self, layers: list[Any], query_length: int) -> Delta:
        self._settle()
        delta = Delta()
        buffers: dict[tuple[int, str], _Buffer] = {}
        held_now: dict[int, int] = {}
        devices: dict[str, list[int]] = {}
        moves: dict[tuple[str, str], list[int]] = {}
        seen: dict[int, str] = {}
        own = getattr(layers, "own", len(layers))
        for index, layer in enumerate(layers):
            kind = kind_of(layer, cross=index >= own)
            length = self._length.get(index, 0) + query_length
            if kind == "dynamic":
                length = layer.keys.shape[2] if layer.keys is not None and layer.keys.dim() == 4 else 0
            elif kind == "cross":  # its first pass fills it, later ones only read it
                length = layer.keys.shape[2] if length and layer.keys is not None else 0
            held = states = replaced = in_place = shown = 0
            for name, tensor in stored(layer):
                storage = tensor.untyped_storage()
                address, size, device = storage.data_ptr(), storage.nbytes(), str(tensor.device)
                buffers[index, name] = _Buffer(address, device, size)
                bytes_held = filled(name, tensor, length) if kind in IN_PLACE else int(tensor.nbytes)
                held += bytes_held
                if kind == "static" and name.split(".")[0] not in STATES:
                    in_place += filled(name, tensor, query_length)
                if name.split(".")[0] in STATES:
                    states += bytes_held
                totals = devices.setdefault(device, [0, 0, 0])
                totals[0] += bytes_held
                if size and (address == 0 or address not in seen):
                    seen[address] = name
                    totals[1] += size
                    totals[2] = max(totals[2], size)
                before = self._buffers.get((index, name))
                moved = before is not None and before.device != device
                if before is not None and moved:
                    move = moves.setdefault((before.device, device), [0, 0])
                    move[0] += 1
                    move[1] += min(tensor.nbytes, before.storage_bytes or tensor.nbytes)  # it grew after it had moved
                if (query_length and kind in GROWING) if moved else _replaced(before, address, size, kind, name):
                    delta.reallocations += 1
                    replaced += min(size, tensor.nbytes) if kind == "dynamic" else size
                elif kind == "dynamic" and before is not None and before.address == address and query_length:
                    shown += int(tensor.nbytes)  # grown into spare room, where it grew
            growth = held - states - self._held.get(index, 0)
            if kind == "static":
                written = in_place
            elif kind == "sliding" and query_length:
                written = min(row_bytes(layer) * query_length, replaced)
            else:
                written = max(0, growth) if kind == "cross" else min(max(0, growth), replaced + shown)
            delta.written += written
            delta.copied += max(0, replaced - written)
            delta.held += held
            held_now[index] = held - states
            self._length[index] = length
        delta.reserved = sum(total[1] for total in devices.values())
        delta.largest = max((total[2] for total in devices.values()), default=0)
        delta.moves = tuple((src, dst, count, size) for (src, dst), (count, size) in moves.items())
        if len(devices) > 1:
            delta.by_device = tuple((device, *total) for device, total in devices.items())  # type: ignore[misc]
        self._buffers, self._held = buffers, held_now
        self._number = len(layers)
        self._plan(layers, delta)
        return delta

    def _plan(self, layers: list[Any], delta: Delta) -> None:
        """Group equal layers for the quick path, or switch it off where its assumptions do not hold."""
        self._fast = False
        groups: dict[tuple[Any, ...], _Group] = {}
        attention: list[int] = []
        own = getattr(layers, "own", len(layers))
        for index, layer in enumerate(layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None:
                if any(True for _ in stored(layer)):
                    return
                continue
            kind = kind_of(layer, cross=index >= own)
            if kind == "other" or keys.dim() != 4 or not keys.shape[2] or sum(1 for _ in stored(layer)) != 2:
                return
            if kind == "cross" and not self._length[index]:
                return
            if kind != "sliding" and (keys.storage_offset() or values.storage_offset()):
                return
            rows = keys.shape[2]
            key_row, value_row = keys.nbytes // rows, values.nbytes // rows
            attention.append(index)
            storage_rows = keys.untyped_storage().nbytes() // key_row if key_row else rows
            shape = (kind, keys.shape, values.shape, keys.dtype, storage_rows, self._length[index])
            group = groups.get(shape)
            if group is None:
                groups[shape] = _Group(kind, 2 * len(attention) - 2, keys.shape[0], rows, storage_rows,
                                       key_row + value_row, key_row, max(key_row, value_row), [index])
            else:
                group.layers.append(index)
                group.row_bytes += key_row + value_row
        self._addresses = [self._buffers[index, name].address for index in attention for name in ("keys", "values")]
        if len(set(self._addresses)) < len(self._addresses) or delta.by_device or not attention:
            return
        self._groups = list(groups.values())
        self._attention = attention
        self._sliding = frozenset(index for group in self._groups if group.kind == "sliding" for index in group.layers)
        self._devices = [layers[index].keys.device for index in attention]
        self._fast = True


def _replaced(before: _Buffer | None, address: int, size: int, kind: str, name: str) -> bool:
    if not size or name.split(".")[0] in STATES:
        return False
    if before is None or not before.storage_bytes:
        return kind not in IN_PLACE
    return before.address != address
