"""What attention weights say, by plain Python loops over numbers: the oracle of deep sampling.

Written after the definitions (the article's S4 and S7), not after the product: no tensor operation, no vectorising.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK, WINDOW, SINKS, COSINE, QUIET, STEPS = 16, 64, 4, 0.15, 0.08, 3
Vector = Sequence[float]


@dataclass
class Block:
    quiet: int = 0
    pending: bool = False


@dataclass
class Sums:
    tokens: int = 0
    queries: int = 0
    local_sum: float = 0.0
    chance_sum: float = 0.0
    entries: int = 0
    alive: int = 0
    blocks: int = 0
    pending: int = 0
    to_pending: int = 0
    to_active: int = 0
    reclaimable_bytes: int = 0


def locality(weights: Vector, valid: Sequence[bool], window: int = WINDOW, sinks: int = SINKS,
             ) -> tuple[float, float] | None:
    """(share of the mass near the query, what uniform attention would give) over the keys that are no sinks."""
    keys = [index for index, there in enumerate(valid) if there][sinks:]
    if not keys:
        return None
    near = [index for place, index in enumerate(keys) if len(keys) - 1 - place <= window]
    return sum(weights[i] for i in near) / sum(weights[i] for i in keys), len(near) / len(keys)


def cosine(a: Vector, b: Vector) -> float:
    size = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / size if size else 0.0


@dataclass
class Reference:
    """The states of one cache's blocks by (layer, row, block)."""

    token_bytes: int
    states: dict[tuple[int, int, int], Block] = field(default_factory=dict)

    def row(self, sums: Sums, layer: int, row: int, weights: Sequence[Vector], valid: Sequence[bool], seen: int, *,
            consecutive: bool = True) -> None:
        """One row of one layer in one step: weights per query head and key."""
        first = max(0, seen - len(valid))
        sums.tokens = max(sums.tokens, sum(valid))
        for head in weights:
            found = locality(head, valid)
            if found is not None:
                sums.queries += 1
                sums.local_sum += found[0]
                sums.chance_sum += found[1]
        blocks: dict[int, list[int]] = {}
        for index, there in enumerate(valid):
            if there:
                blocks.setdefault((first + index) // BLOCK, []).append(index)
        for number, members in blocks.items():
            state = self.states.setdefault((layer, row, number), Block())
            score = max(head[index] for head in weights for index in members)
            if not consecutive:
                state.quiet = 0
            state.quiet = state.quiet + 1 if score < QUIET else 0
            before = state.pending
            state.pending = score < QUIET and (before or state.quiet >= STEPS)
            sums.blocks += 1
            sums.pending += state.pending
            sums.to_pending += state.pending and not before
            sums.to_active += before and not state.pending
            sums.reclaimable_bytes += len(members) * self.token_bytes * state.pending
        for key in [key for key in self.states if key[:2] == (layer, row) and key[2] not in blocks]:
            del self.states[key]


def entries(sums: Sums, queries: Sequence[Vector], keys: Sequence[Sequence[Vector]], valid: Sequence[bool]) -> None:
    """One row of one layer: a query vector per query head, a key vector per KV head and token."""
    group = len(queries) // len(keys)
    for number, head in enumerate(keys):
        for index, there in enumerate(valid):
            if there:
                sums.entries += 1
                sums.alive += any(cosine(queries[number * group + q], head[index]) > COSINE for q in range(group))
