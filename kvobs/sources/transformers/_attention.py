"""What one decode step's attention says of the KV cache: who is read (S4) and how near (S7), without eager attention.

Vectorised and without synchronising a device. Of each layer two products are taken while its tensors are at hand,
the dot products of query and keys and the keys' norms; what follows from them is computed for many layers at once,
and the few numbers are read once per step. Sources: the reference article, S4 and S7; attention sinks after
StreamingLLM (arXiv:2309.17453), whose four first tokens take mass without being read for.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch

from kvobs.sources.transformers._lifecycle import LifeCycle
from kvobs.sources.transformers._masks import additive, identity, valid_keys

WINDOW_TOKENS = 64
SINK_TOKENS = 4
ALIVE_COSINE = 0.15
_TINY = 1e-30
_HELD = 1 << 18  # dot products of so many pairs of query head and key wait to be looked at together (1 MiB)
_SLICE = 1 << 22  # pairs that are looked at in one go at most: rows beyond are taken apart (16 MiB a tensor)


class Sample(NamedTuple):
    """Sums over rows, heads and layers of one kind in one step; the fields are those of ``kvobs.model.Attention``."""

    tokens: int
    queries: int
    local_sum: float
    chance_sum: float
    entries: int
    alive: int
    blocks: int
    pending: int
    to_pending: int
    to_active: int
    reclaimable_bytes: int


class _Alike(NamedTuple):
    """What layers have in common that are looked at together: kind, rows, and how and what their queries see."""

    kind: str
    first_row: int
    heads: int
    keys: tuple[int, ...]  # rows, KV heads, length
    device: Any
    mask: Any
    window: int | None
    softcap: float | None
    sinks: bool
    bias: tuple[int, ...] | None
    token_bytes: int


class _Group:
    """Such layers, and what waits of them."""

    def __init__(self, alike: _Alike, key: Any, mask: Any, sinks: int, window: int) -> None:
        self.alike = alike
        self.rows, self.kv_heads, self.length = alike.keys
        self.mask = mask  # held so that another mask cannot take its place and pass for it
        self.valid = valid_keys(mask, key, alike.window)
        self.additive = additive(mask, self.valid, self.length)
        self.counted: Any = None  # [rows, 1, length], 1.0 for keys that are no sinks
        self.near: Any = None  # and for those of them that are near the query
        if self.valid is not None:
            rank = self.valid.cumsum(-1)
            counted = self.valid & (rank > sinks)
            self.counted, self.near = (which[:, None].float() for which in (
                counted, counted & (rank[:, -1:] - rank <= window)))
        self.room = _room(key)
        self.layers: list[int] = []
        self.waiting: list[tuple[Any, ...]] = []
        self.local: list[Any] = []
        self.alive: list[Any] = []
        self.scores: list[Any] = []


class AttentionProbe:
    """What is remembered of one cache between sampled steps: the life-cycle states, no key, value or query.

    Args:
        window: tokens that count as near, in front of the query; its own key has the distance 0.
        sinks: first tokens of a row that are left out of locality.
    """

    def __init__(self, *, window: int = WINDOW_TOKENS, sinks: int = SINK_TOKENS) -> None:
        self._window, self._sinks = window, sinks
        self._cycle = LifeCycle()
        self._groups: dict[_Alike, _Group] = {}
        self._seen, self._consecutive = 0, False
        self._waiting: tuple[Any, Any, list[tuple[str, list[Any]]]] | None = None
        self.biased = False  # a bias by position was among what it was given

    def reset(self) -> None:
        """The cache was rearranged: nothing is known of its blocks any more."""
        self._cycle = LifeCycle()
        self._groups = {}

    def pending(self, layers: int) -> list[bool]:
        """Which blocks of tokens are Pending Evict everywhere; see :meth:`LifeCycle.pending`."""
        return self._cycle.pending(layers)

    def begin(self, seen: int, consecutive: bool) -> None:
        """A sampled step begins. ``seen`` is the token positions in the cache, this step's included."""
        self._groups = {}
        self._seen, self._consecutive = seen, consecutive

    def layer(self, index: int, kind: str, query: Any, key: Any, mask: Any, *, token_bytes: int, scaling: float,
              softcap: float | None = None, sinks: Any = None, bias: Any = None, window: int | None = None) -> None:
        """One layer's attention call.

        Args:
            query: [rows, query heads, 1, dim].
            key: [rows, KV heads, length, dim], after the cache was updated.
            mask: None, 4-D (bool: True attends; float: additive), or 2-D [rows, length or more] (1 is a token).
            token_bytes: of K and V of one token and row in this layer.
            sinks: learnable logits per query head that only take part in the softmax.
            bias: additive position bias, 4-D.
            window: the sliding window, where the attention function applies it and not the mask.
        """
        self.biased = self.biased or bias is not None
        rows, heads, length = int(query.shape[0]), int(query.shape[1]), int(key.shape[2])
        # By powers of two, so that rows are taken apart alike from step to step and blocks keep their states.
        together = max(1, _SLICE // (heads << (length - 1).bit_length()))
        with torch.no_grad():
            for first in range(0, rows, together):
                some, keys, seen, offset = (_rows(tensor, rows, first, together) for tensor in (query, key, mask, bias))
                group = self._group(keys, seen, _Alike(
                    kind, first, heads, tuple(keys.shape[:3]), keys.device, identity(seen), window, softcap,
                    sinks is not None, None if offset is None else tuple(offset.shape), token_bytes))
                group.layers.append(index)
                group.waiting.append((*_products(some, keys, scaling, group.room), sinks, offset))
                if len(group.waiting) * group.rows * heads * length >= _HELD:
                    self._look(group)

    def end(self) -> dict[str, Sample] | None:
        """The sums by kind: this step's on the CPU, elsewhere the latest step's that has finished, if any.

        Elsewhere the numbers travel to the host behind the step's own work; nobody waits for them. A kind whose
        logits are not numbers has no sums.
        """
        groups, self._groups = self._groups, {}
        if not groups:
            return None
        with torch.no_grad():
            found = [(group.alike.kind, self._sums(group)) for group in groups.values()]
            unread = [field for _, fields in found for field in fields if isinstance(field, torch.Tensor)]
            device = next((field.device for field in unread if field.device.type != "cpu"), unread[0].device)
            numbers = torch.stack([field.to(device, torch.float64, non_blocking=True) for field in unread])
        if device.type == "cpu":
            return _samples(numbers.tolist(), found)
        ready = self._waiting
        result = None
        if ready is not None and ready[1].query():
            result, ready = _samples(ready[0].tolist(), ready[2]), None
        if ready is None:
            known = [(kind, [None if isinstance(field, torch.Tensor) else field for field in fields])
                     for kind, fields in found]
            self._waiting = (*_to_host(numbers), known)
        return result

    # -- inside ----------------------------------------------------------------------------------------

    def _group(self, key: Any, mask: Any, alike: _Alike) -> _Group:
        group = self._groups.get(alike)
        if group is None:
            group = self._groups[alike] = _Group(alike, key, mask, self._sinks, self._window)
        return group

    def _look(self, group: _Group) -> None:
        """Weights, locality and alive entries of the layers that wait."""
        waiting, group.waiting = group.waiting, []
        products, scaled, key_norms, sinks, biases = zip(*waiting, strict=True)
        dots = torch.stack(products).float()  # [layers, rows, KV heads, query heads of each, length]
        weights = _softmax(dots.flatten(2, 3), group, sinks, biases)
        group.scores.append(weights.amax(2))
        group.local.append(self._locality(group, weights))
        # The weights have been taken: from here on the products are free to be overwritten.
        query_norms = torch.linalg.vector_norm(torch.stack(scaled), dim=-1, keepdim=True, dtype=torch.float32)
        best = dots.div_(query_norms.clamp_min_(_TINY)).amax(3)
        alive = best.gt_(torch.stack(key_norms).mul_(ALIVE_COSINE))
        if group.valid is not None:
            alive.mul_(group.valid[:, None])
        group.alive.append(alive.sum(-1).sum(dtype=torch.float64))

    def _locality(self, group: _Group, weights: Any) -> Any:
        if group.valid is None:
            first = max(self._sinks, group.length - 1 - self._window)
            near, mass = weights[..., first:].sum(-1), weights[..., self._sinks:].sum(-1)
        else:
            near, mass = (weights * group.near).sum(-1), (weights * group.counted).sum(-1)
        return (near / mass.clamp_min(_TINY)).sum(dtype=torch.float64)

    def _sums(self, group: _Group) -> list[Any]:
        """The fields of a sample: tensors where they are known on the device only."""
        if group.waiting:
            self._look(group)
        alike, layers = group.alike, len(group.layers)
        states = self._cycle.step(
            (alike.kind, alike.first_row, *group.layers), torch.cat(group.scores), group.valid,
            max(0, self._seen - group.length), alike.token_bytes, consecutive=self._consecutive)
        if group.valid is None:
            keys = group.length - self._sinks
            tokens: Any = group.length
            entries: Any = group.length * group.rows
            queries: Any = group.rows if keys > 0 else 0
            chance: Any = queries * min(keys, self._window + 1) / max(keys, 1)
        else:
            each = group.valid.sum(-1)
            tokens, entries = each.max(), each.sum()
            counted, near = group.counted.sum(-1), group.near.sum(-1)
            queries, chance = (counted > 0).sum(), (near / counted.clamp_min(1)).sum(dtype=torch.float64)
        return [tokens, queries * alike.heads * layers, torch.stack(group.local).sum(), chance * alike.heads * layers,
                entries * group.kv_heads * layers, torch.stack(group.alive).sum(), *states]


def _rows(tensor: Any, rows: int, first: int, count: int) -> Any:
    """``count`` of its rows; all of it where that is all of them, or it is the same for every row, or None."""
    return tensor if tensor is None or count >= rows or tensor.shape[0] == 1 else tensor[first:first + count]


def _room(key: Any) -> Any:
    """On CPUs, most of which multiply halves several times slower than they convert them: where to convert keys to."""
    if key.device.type != "cpu" or key.element_size() >= 4 or key.numel() > _SLICE:
        return None
    with torch.inference_mode(False):  # so that it may be written to whatever mode the next layer is in
        return torch.empty(key.shape, dtype=torch.float32)


def _no_autocast(device: str) -> Any:
    """Entering ``autocast`` takes longer than most operations here, so only where there is something to switch off."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _products(query: Any, key: Any, scaling: float, room: Any) -> tuple[Any, Any, Any]:
    """Dots [rows, KV heads, query heads of each, length], the scaled queries of them, norms of the keys (float32).

    In the tensors' own type as the back end takes them, or in float32 where there is ``room`` for such keys.
    """
    if room is not None:
        query, key = query.float(), room.copy_(key)
    scaled = query.reshape(key.shape[0], key.shape[1], -1, key.shape[3]) * scaling
    with _no_autocast(key.device.type):
        dots = torch.matmul(scaled, key.transpose(2, 3))
    return dots, scaled, torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32)


def _softmax(dots: Any, group: _Group, sinks: tuple[Any, ...], biases: tuple[Any, ...]) -> Any:
    """Attention weights [layers, rows, query heads, length] in float32, as the model's own attention has them."""
    logits = dots
    if group.alike.softcap is not None:
        logits = torch.tanh(logits / group.alike.softcap) * group.alike.softcap
    if group.alike.bias is not None:
        logits = logits + torch.stack([bias[:, :, -1, :group.length] for bias in biases]).float()
    if group.additive is not None:
        logits = logits + group.additive
    if not group.alike.sinks:
        return torch.softmax(logits, -1)
    extra = torch.stack(sinks).float()[:, None, :, None].expand(-1, group.rows, -1, 1)
    return torch.softmax(torch.cat([logits, extra], -1), -1)[..., :-1]


def _samples(numbers: list[float], found: list[tuple[str, list[Any]]]) -> dict[str, Sample]:
    """By kind: the numbers put in the places of the tensors (or None) among the fields, groups of a kind added up."""
    read = iter(numbers)
    sums: dict[str, list[float]] = {}
    for kind, fields in found:
        values = [next(read) if field is None or isinstance(field, torch.Tensor) else field for field in fields]
        before = sums.get(kind)
        if before is not None:
            values = [max(before[0], values[0]), *(a + b for a, b in zip(before[1:], values[1:], strict=True))]
        sums[kind] = values
    return {kind: Sample(*(value if field.endswith("_sum") else round(value)  # type: ignore[arg-type]
                           for field, value in zip(Sample._fields, values, strict=True)))
            for kind, values in sums.items() if math.isfinite(values[2])}


def _to_host(numbers: Any) -> tuple[Any, Any]:
    """A copy in pinned memory and the event behind it."""
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.Event(numbers.device.type)
    event.record()
    return host, event
