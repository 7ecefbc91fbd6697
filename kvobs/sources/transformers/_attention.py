"""What one decode step's attention says of the KV cache: who is read (S4) and how near (S7), without eager attention.

Vectorised and without synchronising a device: per layer a dozen small operations on the tensors that the
attention function was given, per step one read of a few numbers. Sources: the reference article, S4 and S7;
attention sinks after StreamingLLM (arXiv:2309.17453), whose four first tokens take mass without being read for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from kvobs.sources.transformers._lifecycle import LifeCycle

WINDOW_TOKENS = 64
SINK_TOKENS = 4
ALIVE_COSINE = 0.15
_TINY = 1e-30


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


class _Group:
    """The layers of one kind that see the same keys: same length, same mask."""

    def __init__(self, key: Any, valid: Any, seen: int) -> None:
        self.rows, self.length = int(key.shape[0]), int(key.shape[2])
        self.offset = max(0, seen - self.length)
        self.valid = valid
        self.layers: list[int] = []
        self.queries: list[Any] = []
        self.local: list[Any] = []
        self.chance: list[Any] = []
        self.alive: list[Any] = []
        self.scores: list[Any] = []
        self.kv_heads = 0
        self.token_bytes: list[int] = []


class AttentionProbe:
    """What is remembered of one cache between sampled steps: the life-cycle states, no key, value or query.

    Args:
        window: tokens that count as near, in front of the query; its own key has the distance 0.
        sinks: first tokens of a row that are left out of locality.
    """

    def __init__(self, *, window: int = WINDOW_TOKENS, sinks: int = SINK_TOKENS) -> None:
        self._window, self._sinks = window, sinks
        self._cycle = LifeCycle()
        self._groups: dict[tuple[str, int, int], _Group] = {}
        self._seen, self._consecutive = 0, False
        self._waiting: tuple[Any, Any, list[tuple[str, list[int]]]] | None = None

    def reset(self) -> None:
        """The cache was rearranged: nothing is known of its blocks any more."""
        self._cycle = LifeCycle()
        self._groups.clear()

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
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            name = (kind, int(key.shape[2]), id(mask))
            group = self._groups.get(name)
            if group is None:
                group = self._groups[name] = _Group(key, _valid(mask, key, window), self._seen)
            rows, heads, dim = int(query.shape[0]), int(query.shape[1]), int(query.shape[3])
            kv_heads, length = int(key.shape[1]), group.length
            grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)
            dots = torch.matmul(grouped, key.transpose(2, 3))
            weights = _softmax(dots.view(rows, heads, length), scaling, softcap, sinks, bias, mask, group.valid)
            group.layers.append(index)
            group.token_bytes.append(token_bytes)
            group.kv_heads += kv_heads
            group.scores.append(weights.amax(1))
            self._locality(group, weights)
            norms = torch.linalg.vector_norm(grouped, dim=-1, keepdim=True, dtype=torch.float32).clamp_min(_TINY)
            best = (dots / norms).amax(2)
            alive = best > ALIVE_COSINE * torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32)
            if group.valid is not None:
                alive = alive & group.valid[:, None]
            group.alive.append(alive.sum())

    def end(self) -> dict[str, Sample] | None:
        """The sums by kind: this step's on the CPU, elsewhere the latest step's that has finished, if any.

        Elsewhere the numbers travel to the host behind the step's own work; nobody waits for them.
        """
        groups, self._groups = self._groups, {}
        if not groups:
            return None
        with torch.no_grad():
            found = [(name[0], *self._sums(name, group)) for name, group in groups.items()]
            numbers = torch.stack([number for _, numbers, _ in found for number in numbers])
        known = [(kind, fixed) for kind, _, fixed in found]
        if numbers.device.type == "cpu":
            return _samples(numbers.tolist(), known)
        ready = self._waiting
        result = None
        if ready is not None and ready[1].query():
            result, ready = _samples(ready[0].tolist(), ready[2]), None
        if ready is None:
            self._waiting = (*_to_host(numbers), known)
        return result

    # -- inside ----------------------------------------------------------------------------------------

    def _locality(self, group: _Group, weights: Any) -> None:
        rows, heads, length = weights.shape
        if group.valid is None:
            first = max(self._sinks, length - 1 - self._window)
            if length <= self._sinks:
                return
            group.local.append((weights[..., first:].sum(-1)
                                / weights[..., self._sinks:].sum(-1).clamp_min(_TINY)).sum())
            group.chance.append(rows * heads * (length - first) / (length - self._sinks))
            group.queries.append(rows * heads)
            return
        rank = group.valid.cumsum(-1)
        counted = group.valid & (rank > self._sinks)
        near = counted & (rank[:, -1:] - rank <= self._window)
        mass = (weights * counted[:, None]).sum(-1)
        group.local.append(((weights * near[:, None]).sum(-1) / mass.clamp_min(_TINY)).sum())
        keys = counted.sum(-1)
        group.chance.append((near.sum(-1) / keys.clamp_min(1)).sum() * heads)
        group.queries.append((keys > 0).sum() * heads)

    def _sums(self, name: tuple[str, int, int], group: _Group) -> tuple[list[Any], list[int]]:
        device = group.scores[0].device
        scores = torch.stack(group.scores)
        states = self._cycle.step((name[0], tuple(group.layers)), scores, group.valid, group.offset,
                                  torch.tensor(group.token_bytes, device=device), consecutive=self._consecutive)
        # A CPU scalar of a constant costs nothing to make on the host; elsewhere it is a copy behind the queue.
        tokens = _scalar(group.length, device) if group.valid is None else group.valid.sum(-1).max()
        entries = (_scalar(group.rows * group.length, device) if group.valid is None else group.valid.sum())
        numbers = [tokens, _total(group.queries, device), _total(group.local, device), _total(group.chance, device),
                   entries * group.kv_heads, torch.stack(group.alive).sum(), *states]
        return [number.double() for number in numbers], [len(group.layers)]


def _scalar(value: float, device: Any) -> Any:
    return torch.full((), value, dtype=torch.float64, device=device)


def _total(parts: list[Any], device: Any) -> Any:
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    rest = _scalar(sum(part for part in parts if not isinstance(part, torch.Tensor)), device)
    return torch.stack(tensors).sum().double() + rest if tensors else rest


def _samples(numbers: list[float], known: list[tuple[str, list[int]]]) -> dict[str, Sample]:
    width = len(Sample._fields)
    found: dict[str, Sample] = {}
    for position, (kind, _) in enumerate(known):
        values = numbers[position * width:(position + 1) * width]
        before = found.get(kind)
        if before is not None:
            values = [max(before[0], values[0]), *(a + b for a, b in zip(before[1:], values[1:], strict=True))]
        found[kind] = Sample(*values)  # type: ignore[arg-type]
    return {kind: Sample(*(value if field.endswith("_sum") else round(value)  # type: ignore[arg-type]
                           for field, value in zip(Sample._fields, sample, strict=True)))
            for kind, sample in found.items()}


def _to_host(numbers: Any) -> tuple[Any, Any]:
    """A copy in pinned memory and the event behind it."""
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.Event(numbers.device.type)
    event.record()
    return host, event


def _valid(mask: Any, key: Any, window: int | None) -> Any:
    """[rows, length], True for keys that may be attended; None when all may be."""
    rows, length = int(key.shape[0]), int(key.shape[2])
    valid = None
    if mask is not None and mask.dim() == 4:
        first = mask[:, 0, -1, :length]
        valid = first if first.dtype == torch.bool else first > torch.finfo(first.dtype).min / 2
        valid = valid.expand(rows, length)
    elif mask is not None:
        valid = mask[:, -length:] > 0
        valid = functional.pad(valid, (0, length - int(valid.shape[1]))).expand(rows, length)
    if window is not None and window < length:
        inside = torch.arange(length, device=key.device) >= length - window
        valid = inside.expand(rows, length) if valid is None else valid & inside
    return valid


def _softmax(dots: Any, scaling: float, softcap: float | None, sinks: Any, bias: Any, mask: Any, valid: Any) -> Any:
    """[rows, query heads, length] attention weights in float32, as the model's own attention computes them."""
    length = int(dots.shape[-1])
    logits = dots * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if bias is not None:
        logits = logits + bias[:, :, -1, :length]
    if mask is not None and mask.dim() == 4 and mask.dtype != torch.bool:
        logits = logits + mask[:, :, -1, :length]
    logits = logits.float()
    if valid is not None:
        logits = logits.masked_fill(~valid[:, None], float("-inf"))
    if sinks is None:
        return torch.softmax(logits, -1)
    extra = sinks.float().reshape(1, -1, 1).expand(logits.shape[0], -1, 1)
    return torch.softmax(torch.cat([logits, extra], -1), -1)[..., :-1]
