"""The sweep against a naive ledger that looks at every storage after every operation on real caches."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings transformers.")

from hypothesis import event, given, settings
from hypothesis import strategies as st
from transformers import cache_utils

from kvobs.sources.transformers._sweep import CacheSweep, Delta

pytestmark = pytest.mark.torch

HEADS, WIDTH, LENGTH, WINDOW = 2, 4, 24, 6
ROW = HEADS * WIDTH * 4
POSITIONS = "cache_kwargs" in inspect.signature(cache_utils.StaticLayer.update).parameters
KINDS = {
    "dynamic": lambda: cache_utils.DynamicLayer(),
    "sliding": lambda: cache_utils.DynamicSlidingWindowLayer(sliding_window=WINDOW),
    "static": lambda: cache_utils.StaticLayer(max_cache_len=LENGTH),
    "static sliding": lambda: cache_utils.StaticSlidingWindowLayer(max_cache_len=LENGTH, sliding_window=WINDOW),
}
MIXES = [("dynamic",) * 3, ("sliding",) * 2, ("static",) * 2, ("dynamic", "sliding", "dynamic"),
         ("static", "static sliding"), ("static sliding",) * 2]
OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 5)), st.tuples(st.just("update"), st.just(1)),
    st.tuples(st.just("crop"), st.integers(1, 4)), st.tuples(st.just("reorder"), st.integers(0, 5)),
    st.tuples(st.just("repeat"), st.integers(2, 3)), st.tuples(st.just("select"), st.integers(0, 5)),
    st.tuples(st.just("reset"), st.just(0)))


class Ledger:
    """Performs operations on a cache and says what each did, from the tensors alone."""

    def __init__(self, kinds: tuple[str, ...], batch: int) -> None:
        self.kinds = kinds
        self.layers = [KINDS[kind]() for kind in kinds]
        self.cache = cache_utils.Cache(layers=self.layers)
        self.seen = 0
        self.batch = batch

    def tensors(self) -> list[Any]:
        return [getattr(layer, name) for layer in self.layers for name in ("keys", "values")]

    def allowed(self, name: str, amount: int) -> bool:
        """Whether transformers can do it on this cache now."""
        static = "static" in self.kinds or "static sliding" in self.kinds
        if name == "update":
            return self.seen + amount <= LENGTH
        if name == "crop":
            able = all(hasattr(layer, "crop") for layer in self.layers) and "static sliding" not in self.kinds
            return able and amount < self.seen and not ("sliding" in self.kinds and self.seen >= WINDOW)
        if name in ("repeat", "select"):
            return not static and self.seen > 0 and self.batch < 7
        drops = "reset" in vars(cache_utils.DynamicLayer)  # else a reset only zeroes, and goes on holding
        return self.seen > 0 and (name != "reset" or drops or all(kind.startswith("static") for kind in self.kinds))

    def run(self, name: str, amount: int) -> None:
        if name == "update":
            more = ({"cache_kwargs": {"cache_position": torch.arange(self.seen, self.seen + amount)}}
                    if POSITIONS else {})
            for layer in self.layers:
                layer.update(torch.ones(self.batch, HEADS, amount, WIDTH), torch.ones(self.batch, HEADS, amount, WIDTH),
                             **more)
            self.seen += amount
        elif name == "crop":
            self.cache.crop(-amount)
            self.seen -= amount
        elif name == "reorder":
            self.cache.reorder_cache(torch.arange(self.batch).roll(amount))
        elif name == "repeat":
            self.cache.batch_repeat_interleave(amount)
            self.batch *= amount
        elif name == "select":
            rows = torch.arange(self.batch)[: max(1, self.batch - amount % 3)]
            self.cache.batch_select_indices(rows)
            self.batch = len(rows)
        else:
            self.cache.reset()
            self.seen = 0

    def perform(self, name: str, amount: int) -> Delta:
        """Do it, and compare every storage with the one before (which is kept alive, so addresses differ)."""
        before = self.tensors()
        self.run(name, amount)
        delta, storages = Delta(), {}
        for position, (old, new) in enumerate(zip(before, self.tensors(), strict=True)):
            kind = self.kinds[position // 2]
            if new is None or not new.numel():
                continue
            storage = new.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            in_place = kind.startswith("static")
            rows = min(self.seen, new.shape[2]) if in_place else new.shape[2]
            delta.held += rows * ROW * self.batch
            written = 0
            if name == "update":
                written = (min(amount, new.shape[2]) if in_place else amount) * ROW * self.batch
            delta.written += written
            first = old is None or not old.numel()
            if (first and not in_place) or (
                    not first and old.untyped_storage().data_ptr() != storage.data_ptr()):
                delta.reallocations += 1
                delta.copied += storage.nbytes() - written
        delta.reserved = sum(storages.values())
        delta.largest = max(storages.values(), default=0)
        return delta


def sweep_after(sweep: CacheSweep, name: str, layers: list[Any], amount: int) -> Delta:
    if name == "update":
        return sweep.step(layers, amount)
    return sweep.rewritten(layers, lengths=name in ("crop", "reset"))


@settings(max_examples=150)
@given(kinds=st.sampled_from(MIXES), batch=st.integers(1, 3), program=st.lists(OPERATIONS, min_size=1, max_size=14),
       begin=st.integers(0, 3))
def test_every_operation_is_counted_as_the_storages_tell(
        kinds: tuple[str, ...], batch: int, program: list[tuple[str, int]], begin: int) -> None:
    """After any program of operations each delta equals the ledger's, whether decided quickly or by looking at all.

    The first ``begin`` operations happen before the cache is followed: they are its baseline.
    """
    book = Ledger(kinds, batch)
    quick, exact = CacheSweep(), CacheSweep()
    for number, (name, amount) in enumerate(program):
        if number == begin or (number == 0 and begin >= len(program)):
            quick.baseline(book.layers)
            exact.baseline(book.layers)
        if not book.allowed(name, amount):
            continue
        expected = book.perform(name, amount)
        if number < begin < len(program):
            continue
        event(f"{name}, {'quick' if quick._fast else 'exact'}")
        exact._fast = False
        found = sweep_after(quick, name, book.layers, amount)
        assert found == expected
        assert sweep_after(exact, name, book.layers, amount) == expected
        assert quick.length() == exact.length() == book.seen


@settings(max_examples=60)
@given(kinds=st.sampled_from(MIXES), steps=st.lists(st.integers(1, 3), min_size=1, max_size=7),
       moves=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=4))
def test_bytes_that_change_device_are_migrated_and_conserved(
        kinds: tuple[str, ...], steps: list[int], moves: list[tuple[int, int]]) -> None:
    """A layer that moves between steps is reported once with its bytes; held and reserved by device add up."""
    book, sweep = Ledger(kinds, 1), CacheSweep()
    sweep.baseline(book.layers)
    sweep.step(book.layers, 0)
    for number, amount in enumerate(steps):
        if not book.allowed("update", amount):
            break
        book.perform("update", amount)
        sweep.step(book.layers, amount)
        expected: dict[tuple[str, str], list[int]] = {}
        back = []
        for when, index in moves:
            if when == number and index < len(kinds) and book.layers[index].keys.device.type == "cpu":
                layer = book.layers[index]
                kept = layer.keys, layer.values
                back.append((layer, kept))
                layer.keys, layer.values = (tensor.to("meta") for tensor in kept)
                move = expected.setdefault(("cpu", "meta"), [0, 0])
                move[0] += 2
                move[1] += sum(tensor.nbytes for tensor in kept)
        delta = sweep.step(book.layers, 0)
        assert delta.moves == tuple((src, dst, count, size) for (src, dst), (count, size) in expected.items())
        assert delta.reallocations == delta.written == delta.copied == 0
        if delta.by_device:
            assert [sum(column) for column in list(zip(*delta.by_device, strict=True))[1:3]] == [
                delta.held, delta.reserved]
            assert max(row[3] for row in delta.by_device) == delta.largest
        for layer, kept in back:
            layer.keys, layer.values = kept
        assert sweep.step(book.layers, 0).moves == tuple(
            (dst, src, count, size) for (src, dst), (count, size) in expected.items())


@given(sliding=st.booleans(), before=st.integers(1, 9), after=st.integers(1, 9), layers=st.integers(1, 3))
def test_a_cache_that_is_moved_by_hand_and_then_grows(sliding: bool, before: int, after: int, layers: int) -> None:
    """What a cache held when it was moved has migrated; the step there wrote its own tokens and copied the rest."""
    def feed(rows: int, device: str) -> Delta:
        for one in made:
            one.update(*(torch.zeros(1, HEADS, rows, WIDTH, device=device) for _ in "kv"))
        return sweep.step(made, rows)

    made = [cache_utils.DynamicSlidingWindowLayer(sliding_window=64) if sliding else cache_utils.DynamicLayer()
            for _ in range(layers)]
    sweep, row = CacheSweep(), 2 * ROW * layers
    sweep.baseline(made)
    feed(before, "cpu")
    for one in made:
        one.keys, one.values = one.keys.to("meta"), one.values.to("meta")
    delta = feed(after, "meta")
    assert delta.moves == (("cpu", "meta", 2 * layers, before * row),)
    assert (delta.reallocations, delta.written, delta.copied) == (2 * layers, after * row, before * row)
    assert feed(1, "meta").moves == ()
