"""The article's life cycle of KV (S4) for blocks of 16 tokens: Active, or Pending Evict.

A block's score is the largest attention weight that any of its tokens got from any query head of its layer. It
becomes Pending Evict when its score was below 0.08 in three consecutive steps, and Active again at 0.08 or more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

BLOCK_TOKENS = 16
QUIET_SCORE = 0.08
QUIET_STEPS = 3


class _State:
    """Per layer, row and block from ``base`` on: how many quiet steps running, and whether it is pending."""

    def __init__(self, base: int, quiet: Any, pending: Any) -> None:
        self.base, self.quiet, self.pending = base, quiet, pending


class LifeCycle:
    """The states of one cache's blocks, by the layers that are looked at together."""

    def __init__(self) -> None:
        self._states: dict[Any, _State] = {}

    def step(self, name: Any, weights: Any, valid: Any, offset: int, token_bytes: int, *,
             consecutive: bool) -> list[Any]:
        """Take one step's largest weights.

        Args:
            name: which layers these are.
            weights: [layers, rows, length], the largest weight of each token over the query heads.
            valid: [rows, length] bool, or None when all tokens are there.
            offset: token position of the first key in view; blocks lie at multiples of 16 positions.
            token_bytes: K and V of one token and row in each of these layers.
            consecutive: the step before was taken too; otherwise no run of quiet steps reaches into this one.
        Returns:
            Scalars on the device: blocks, pending, to_pending, to_active, bytes of tokens in pending blocks.
        """
        length = int(weights.shape[2])
        first, before = divmod(offset, BLOCK_TOKENS)
        after = -(before + length) % BLOCK_TOKENS
        if valid is not None:
            weights = torch.where(valid, weights, -1.0)
        score = functional.pad(weights, (before, after), value=-1.0).unflatten(-1, (-1, BLOCK_TOKENS)).amax(-1)
        there = torch.ones((1, length), dtype=torch.bool, device=weights.device) if valid is None else valid
        tokens = functional.pad(there, (before, after)).unflatten(-1, (-1, BLOCK_TOKENS)).sum(-1)
        exists = score >= 0
        old = self._aligned(name, first, score)
        low = exists & (score < QUIET_SCORE)
        quiet = torch.where(low, (old.quiet if consecutive else 0) + 1, 0).clamp(max=QUIET_STEPS)
        pending = low & ((quiet >= QUIET_STEPS) | old.pending)
        self._states[name] = _State(first, quiet, pending)
        return [exists.sum(), pending.sum(), (pending & ~old.pending).sum(), (old.pending & exists & ~pending).sum(),
                (pending * tokens).sum() * token_bytes]

    def pending(self, layers: int) -> list[bool]:
        """By block from the first token on: Pending Evict in every row of all so many layers; none where that is not
        known of all of them.
        """
        states = dict(self._states)
        seen: dict[int, int] = {}
        for _, row, *indices in states:
            seen[row] = seen.get(row, 0) + len(indices)
        if not states or set(seen.values()) != {layers} or any(state.base for state in states.values()):
            return []
        found = [state.pending.flatten(0, -2).all(0).tolist() for state in states.values()]
        return [all(block) for block in zip(*found, strict=False)]

    def _aligned(self, name: Any, first: int, score: Any) -> _State:
        """What is known of the blocks in view; new ones are Active, those before the view are gone."""
        known = self._states.get(name)
        blocks = int(score.shape[2])
        if known is None or known.base > first or known.quiet.shape[:2] != score.shape[:2] or (
                known.quiet.device != score.device):
            nothing = torch.zeros(score.shape, dtype=torch.int64, device=score.device)
            return _State(first, nothing, nothing.bool())
        skip = first - known.base
        quiet, pending = (state[..., skip:skip + blocks] for state in (known.quiet, known.pending))
        grown = (0, blocks - int(quiet.shape[2]))
        return _State(first, functional.pad(quiet, grown), functional.pad(pending, grown))
