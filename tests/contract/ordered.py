"""Generation with orders at random steps, and rearrangements at random beside the same without kvobs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.contract import tiny
from tests.contract.actuators import Caches

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": {"do_sample": True, "temperature": 1.3}, "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "two rows": {"rows": 2}, "assisted": {"assisted": True},
}


class Disturber:
    """A logits processor that orders something in about half of the steps, done or undone."""

    def __init__(self, caches: Caches, seed: int) -> None:
        self._caches, self._random = caches, random.Random(seed)
        self.kinds = list(caches.point.capabilities())

    def __call__(self, ids: Any, scores: Any) -> Any:
        if self._random.random() < 0.5:
            one = self._random.choice(self.kinds)
            self._caches.submit(one.kind, undo=one.reversible and self._random.random() < 0.4)
        return scores


def generated(model: Any, device: str, new: int, way: dict[str, Any], each: Callable[[Any, Any], Any] | None,
              assistant: Any) -> tuple[Any, Any]:
    """Tokens of a generate call of one way, and its logits, both on the CPU."""
    settings = dict(way)
    rows = settings.pop("rows", 1)
    if settings.pop("assisted", False):
        settings["assistant_model"] = assistant
    torch.manual_seed(3)
    out = tiny.greedy(model, tiny.prompt(9, rows).to(device), new, return_dict_in_generate=True, output_logits=True,
                      logits_processor=[each] if each is not None else [], **settings)
    return out.sequences.cpu(), torch.stack([step.cpu() for step in out.logits])


def disturbed(caches: Caches, way: str, seed: int, new: int = 80) -> dict[str, Any]:
    """One way of generating, without orders and with them at random steps."""
    assistant = tiny.llama(layers=1, seed=5).to(caches.device)
    caches.watch.bus.active = False
    expected = generated(caches.model, caches.device, new, WAYS[way], None, assistant)
    caches.watch.bus.active = True
    found = generated(caches.model, caches.device, new, WAYS[way], Disturber(caches, seed), assistant)
    caches.reach()
    taken = caches.answers()
    return {"tokens": torch.equal(expected[0], found[0]), "logits": torch.equal(expected[1], found[1]),
            "far": float((expected[1] - found[1]).abs().max()),
            "done": sorted({f"{'un' if one.undo else ''}{one.kind}" for one in taken if one.done}),
            "raised": [one.reason for one in taken if "raised" in one.reason]}


def rearranged(caches: Caches, seed: int, steps: int = 60) -> bool:
    """Two caches are fed, cropped, reordered, repeated, selected from alike; one of them is acted on.

    The other has layers of a class of their own, which kvobs leaves alone.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    class Plain(DynamicLayer):  # type: ignore[misc]
        """Grows by concatenation, whatever is ordered."""

    draw, kinds = random.Random(seed), list(caches.point.capabilities())
    model, generator = caches.model, torch.Generator().manual_seed(seed)
    one, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    other.layers = [Plain() for _ in other.layers]
    rows, outputs = 2, []
    for _ in range(steps):
        length = one.get_seq_length()
        choice = draw.choice(["feed", "feed", "feed", "feed", "crop", "reorder", "repeat", "select", "order", "undo"])
        if choice == "feed" or not length:
            ids = torch.randint(3, tiny.VOCAB, (rows, draw.choice([1, 1, 1, 5, 30])), generator=generator)
            with torch.no_grad():
                outputs = [model(ids.to(caches.device), use_cache=True, **{tiny.CACHE: cache})[0]
                           for cache in (one, other)]
            if not torch.equal(*outputs):
                return False
        elif choice == "order":
            caches.submit(draw.choice(kinds).kind)
        elif choice == "undo":
            caches.submit(draw.choice([kind for kind in kinds if kind.reversible]).kind, undo=True)
        else:
            number = draw.randrange(1, 4)
            order = torch.tensor([draw.randrange(rows) for _ in range(rows)]).to(caches.device)
            for cache in (one, other):
                if choice == "crop":
                    cache.crop(-min(number, length - 1))
                elif choice == "reorder":
                    cache.reorder_cache(order)
                elif choice == "repeat" and rows < 6:
                    cache.batch_repeat_interleave(2)
                elif choice == "select":
                    cache.batch_select_indices(order[:2])
            rows = rows * 2 if choice == "repeat" and rows < 6 else min(rows, 2) if choice == "select" else rows
        if any(not torch.equal(getattr(left, name).cpu(), getattr(right, name).cpu())
               for left, right in zip(one.layers, other.layers, strict=True) if right.is_initialized
               for name in ("keys", "values")):
            return False
    return not any("raised" in taken.reason for taken in caches.answers())
