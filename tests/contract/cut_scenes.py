"""A session whose cache is cut, and its uncut twin, which plain transformers runs under a 4-D mask instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from tests.contract import tiny
from tests.contract.actuators import Caches, caches

LEAST = torch.finfo(torch.float32).min


def standing(cut: Any, whole: Any) -> Any:
    """Positions of a cut cache's keys: where the first layer of the uncut one holds the same key.

    Those depend on the token and its position alone, so that masks elsewhere cannot change them.
    """
    one, other = (cache.layers[0].keys[0].transpose(0, 1).flatten(1) for cache in (cut, whole))
    far = torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")
    assert (far.amin(1) < 1e-5).all()
    return far.argmin(1)


class Talk:
    """``cache`` is there to be cut; ``feed`` passes tokens to both and tells how far their logits are apart.

    ``padding`` are the first tokens of each row that are no tokens.
    """

    def __init__(self, model: Any, rows: int = 1, padding: Sequence[int] = ()) -> None:
        self.model, self.rows = model, rows
        self.cache, self.whole = (transformers.DynamicCache(config=model.config) for _ in range(2))
        self.padding = torch.tensor(list(padding) or [0] * rows)
        self.there = torch.zeros(0, dtype=torch.bool)
        self.seed = 0

    def kept(self) -> None:
        """The twin learns what is there: from now on it masks the rest."""
        length = self.whole.layers[0].keys.shape[2]
        self.there = torch.zeros(length, dtype=torch.bool)
        self.there[standing(self.cache, self.whole)] = True

    def feed(self, ids: Any, **more: Any) -> tuple[float, Any]:
        """The largest difference of logits, and the next greedy tokens."""
        new, length = int(ids.shape[1]), int(ids.shape[1]) + len(self.there)
        flat = torch.arange(length) >= self.padding[:, None]
        positions = (flat.long().cumsum(-1) - 1).clamp(min=0)[:, -new:]
        self.there = torch.cat([self.there, torch.ones(new, dtype=torch.bool)])
        seen = torch.ones(length, length).tril()[-new:].bool() & self.there & flat[:, None]
        mask = torch.where(seen[:, None], 0.0, LEAST)
        padded = {"attention_mask": flat.long(), "position_ids": positions} if bool(self.padding.any()) else {}
        with torch.no_grad():
            found = self.model(ids, use_cache=True, **{tiny.CACHE: self.cache}, **(padded | more))[0]
            wanted = self.model(ids, use_cache=True, **{tiny.CACHE: self.whole}, attention_mask=mask,
                                position_ids=positions)[0]
        rows = seen.any(-1)  # a query that sees nothing, in front of a row's first token, has no meaning
        return float((found - wanted).abs()[rows].max()), wanted[:, -1:].argmax(-1)

    def say(self, length: int, new: int) -> float:
        """A turn: a prompt and some greedy steps; the largest difference of logits."""
        self.seed += 1
        far, ids = self.feed(tiny.prompt(length, self.rows, self.seed))
        for _ in range(new):
            step, ids = self.feed(ids)
            far = max(far, step)
        return far

    def physical(self) -> int:
        return int(self.cache.layers[0].keys.shape[2])


def sharp(factor: float = 100.0, **changes: Any) -> Any:
    """A tiny model whose attention prefers some tokens: its queries are made longer."""
    model = tiny.llama(**changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(factor)
    return model


@contextmanager
def cutting(**settings: Any) -> Iterator[Caches]:
    """The source with every decode step sampled, where caches may be cut."""
    with caches(**({"deep": True, "overhead_percent": 100.0, "cut_pending_evict": True} | settings)) as found:
        found.watch.bus.deep = True
        if found.watch.source._deep is not None:
            found.watch.source._deep._budget = 1e9
        yield found
