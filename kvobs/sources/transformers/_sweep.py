"""One sweep over a cache after a step: what moved, what was written, what is held.

Duck-typed over ``cache.layers`` of transformers 5.x, so this module imports neither torch nor transformers. No
tensor, layer or cache is kept: only addresses, sizes and device names, so that nothing lives longer because it
is observed.

The usual case (every layer holds K and V and grows alike) is decided from two addresses per layer and one
shape per group of equal layers; anything else takes the exact path, which looks at every tensor.

Rules. A re-allocation is a K or V storage that is replaced by another one with content; a static layer's first
buffer is its reservation and not a re-allocation, a dynamic layer's first fill replaces the empty buffer it was
created with. Of the bytes in replaced storages, those of new tokens are *written* and the others *copied*. For
quantized and other unusual layers written is the net growth of stored bytes, so written + copied is always the
size of the replaced storages. In-place shifts of a full static sliding window are not counted as copies.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import msgspec

# Tensors of a layer that are bookkeeping, not stored context.
_BOOKKEEPING = frozenset({"cumulative_length", "_sliding_window_tensor", "_pending_beam_idx", "cache_position"})
_STATES = frozenset({"conv_states", "recurrent_states"})


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


def layers_of(cache: Any) -> list[Any] | None:
    """The layers of any transformers cache (an encoder-decoder cache's self then cross layers), or None."""
    own = getattr(cache, "self_attention_cache", None)
    if own is not None:
        cross = getattr(cache, "cross_attention_cache", None)
        return [*own.layers, *(cross.layers if cross is not None else ())]
    layers = getattr(cache, "layers", None)
    return layers if isinstance(layers, list) else None


def kind_of(layer: Any) -> str:
    """``static``, ``sliding`` (dynamic with a window), ``dynamic``, or ``other`` (exact path only)."""
    if any(getattr(layer, name, None) is not None for name in ("_quantized_keys", "indexer_keys", *_STATES)):
        return "other"
    if not hasattr(layer, "keys"):
        return "other"
    if hasattr(layer, "max_cache_len"):
        return "static"
    return "sliding" if getattr(layer, "is_sliding", False) else "dynamic"


def _tensors(value: Any) -> Iterator[Any]:
    """The plain tensors inside a tensor, a wrapper subclass (quanto), or nested tuples, lists and dicts (HQQ)."""
    if hasattr(value, "untyped_storage"):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is not None:
            for name in flatten()[0]:
                yield from _tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _stored(layer: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(layer).items():
        if name not in _BOOKKEEPING and value is not None and not isinstance(value, int | str | bool):
            for position, tensor in enumerate(_tensors(value)):
                yield (name if not position else f"{name}.{position}"), tensor


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
            self._length[index] = _seen_length(layer)
        self._exact(layers, 0)

    def length(self) -> int:
        """Token positions per sequence that the longest layer has seen."""
        return max(self._length.values(), default=0)

    def step(self, layers: list[Any], query_length: int) -> Delta:
        """Compare with the state after the previous step, ``query_length`` token positions per row ago."""
        if self._fast and len(layers) == self._number:
            delta = self._quick(layers, query_length)
            if delta is not None:
                return delta
        return self._exact(layers, query_length)

    def rewritten(self, layers: list[Any]) -> Delta:
        """After a call that rearranges the cache between steps (beam reorder, crop, reset): all is copied."""
        self._settle()
        for index, layer in enumerate(layers):
            self._length[index] = _seen_length(layer)
        delta = self._exact(layers, 0)
        delta.copied += delta.written
        delta.written = 0
        return delta

    def moved(self, index: int, layer: Any) -> None:
        """A layer's move between devices was counted by the call that made it: take it as known."""
        self._settle()
        for name, tensor in _stored(layer):
            buffer = self._buffers.get((index, name))
            if buffer is not None:
                buffer.address, buffer.device = tensor.untyped_storage().data_ptr(), str(tensor.device)

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
                held_rows = min(length, rows)
                new = held_rows - min(length - query_length, rows)
            elif addresses[group.slot] == self._addresses[group.slot]:
                # Untouched in this step, as cross-attention is: the same buffers must hold the same rows.
                if rows != group.rows:
                    return None
                held_rows, new, length = rows, 0, length - query_length
            else:
                expected += 2 * len(group.layers)
                held_rows = rows
                if group.kind == "dynamic":
                    new, storage_rows, length = rows - group.rows, rows, rows
                else:
                    new = query_length
                    storage_rows = keys.untyped_storage().nbytes() // group.key_row_bytes
                if not 0 <= new <= storage_rows:
                    return None
                delta.copied += (storage_rows - new) * group.row_bytes
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
            for index in group.layers:
                self._length[index] = length
                self._held[index] = rows * group.row_bytes // len(group.layers)
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
        for index, layer in enumerate(layers):
            kind = kind_of(layer)
            length = self._length.get(index, 0) + query_length
            if kind == "dynamic":
                length = layer.keys.shape[2] if layer.keys is not None and layer.keys.dim() == 4 else 0
            held = states = replaced = 0
            for name, tensor in _stored(layer):
                storage = tensor.untyped_storage()
                address, size, device = storage.data_ptr(), storage.nbytes(), str(tensor.device)
                buffers[index, name] = _Buffer(address, device, size)
                bytes_held = _held(tensor, kind, length)
                held += bytes_held
                if name.split(".")[0] in _STATES:
                    states += bytes_held
                totals = devices.setdefault(device, [0, 0, 0])
                totals[0] += bytes_held
                if size and (address == 0 or address not in seen):
                    seen[address] = name
                    totals[1] += size
                    totals[2] = max(totals[2], size)
                before = self._buffers.get((index, name))
                if before is not None and before.device != device:
                    move = moves.setdefault((before.device, device), [0, 0])
                    move[0] += 1
                    move[1] += tensor.nbytes
                elif _replaced(before, address, size, kind, name):
                    delta.reallocations += 1
                    replaced += size
            growth = held - states - self._held.get(index, 0)
            written = _row_bytes(layer) * query_length if kind == "sliding" and query_length else max(0, growth)
            if kind != "static":
                written = min(written, replaced)
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
        for index, layer in enumerate(layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None:
                if any(True for _ in _stored(layer)):
                    return
                continue
            kind = kind_of(layer)
            if kind == "other" or keys.dim() != 4 or not keys.shape[2]:
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


def _seen_length(layer: Any) -> int:
    """Token positions a layer has seen. Reads a device scalar for static layers: only at first sight."""
    if not getattr(layer, "is_initialized", True):
        return 0
    read = getattr(layer, "get_seq_length", None)
    if read is None or getattr(layer, "keys", None) is None:
        return 0
    return int(read())


def _held(tensor: Any, kind: str, length: int) -> int:
    """Bytes of a tensor that hold tokens: all of it, but for a static layer only the rows filled so far."""
    size = int(tensor.nbytes)
    if kind != "static" or tensor.dim() != 4 or not tensor.shape[2]:
        return size
    return size // int(tensor.shape[2]) * min(length, int(tensor.shape[2]))


def _row_bytes(layer: Any) -> int:
    rows = layer.keys.shape[2] if layer.keys.dim() == 4 else 0
    return int((layer.keys.nbytes + layer.values.nbytes) // rows) if rows else 0


def _replaced(before: _Buffer | None, address: int, size: int, kind: str, name: str) -> bool:
    if not size or name.split(".")[0] in _STATES:
        return False
    if before is None or not before.storage_bytes:
        return kind != "static"
    return before.address != address
