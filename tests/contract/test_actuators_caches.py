"""Actions on caches never change an answer, copy less, and give back the bytes that they say; on the CPU."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings it.")

from kvobs import model
from kvobs.sources.transformers._actions_growth import SHARE
from tests.contract import tiny
from tests.contract.actuators import Caches, caches
from tests.contract.ordered import WAYS, disturbed, rearranged

pytestmark = pytest.mark.torch


@pytest.fixture
def engine() -> Iterator[Caches]:
    with caches() as found:
        yield found


def storage(tensor: Any) -> int:
    return int(tensor.untyped_storage().nbytes())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [1, 2])
def test_orders_at_random_steps_change_no_token(engine: Caches, way: str, seed: int) -> None:
    """Greedy, sampled, beams, batches, assisted: tokens are those without orders, logits equal to 1e-5."""
    seen = disturbed(engine, way, seed)
    assert seen["tokens"]
    assert seen["far"] < 1e-5
    assert seen["raised"] == []
    assert {"chunked_growth", "compact", "unchunked_growth"} <= set(seen["done"])


@pytest.mark.parametrize("seed", range(6))
def test_rearranged_caches_stay_equal(engine: Caches, seed: int) -> None:
    """A cache that is acted on holds, after any crops, reorders, repeats and selections, what a plain one holds."""
    assert rearranged(engine, seed)


def test_copies_are_amortised(engine: Caches) -> None:
    """Over n tokens growth in chunks copies at most (SHARE + 1) n rows, where concatenation copies n (n - 1) / 2."""
    row, tokens = tiny.row_bytes(engine.model), 300

    def copied() -> int:
        engine.watch.events()
        engine.session(1, tokens)
        steps = engine.watch.of(model.Step)
        assert sum(step.bytes_written for step in steps) == tokens * row
        assert steps[-1].kv_bytes == tokens * row
        return sum(step.bytes_copied for step in steps) // row

    assert copied() == tokens * (tokens - 1) // 2
    assert engine.order("chunked_growth").done
    assert 0 < copied() <= (SHARE + 1) * tokens


def test_counted_re_allocations_are_changes_of_address(engine: Caches) -> None:
    """While a cache grows in chunks, its steps tell as many re-allocations as K and V storages changed place."""
    engine.order("chunked_growth")
    cache, changes, before = engine.session(5, 2), 0, []
    engine.watch.events()
    ids = tiny.prompt(1)
    for _ in range(150):
        now = [tensor.untyped_storage().data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)]
        changes += sum(one != two for one, two in zip(before, now, strict=False))
        before = now
        with torch.no_grad():
            engine.model(ids, use_cache=True, **{tiny.CACHE: cache})
    now = [tensor.untyped_storage().data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)]
    changes += sum(one != two for one, two in zip(before, now, strict=True))
    assert sum(step.reallocations for step in engine.watch.of(model.Step)) == changes > 0


def test_what_others_hold_of_a_cache_is_never_written_to(engine: Caches) -> None:
    """A tensor that the host took out of a cache keeps its values whatever the cache does afterwards."""
    engine.order("chunked_growth")
    cache = engine.session(9, 4)
    held = cache.layers[0].keys
    before = held.clone()
    twin = copy.deepcopy(cache)
    cache.crop(-5)
    for end in (cache, twin):
        tiny.chat(engine.model, end, 2, 8)
    assert torch.equal(held, before)
    assert torch.equal(twin.layers[0].keys[:, :, :12], before)


def test_gradients_are_left_alone(engine: Caches) -> None:
    """Where gradients are recorded, growth is by concatenation: they are those without orders."""
    ids = tiny.prompt(6)

    def gradient() -> Any:
        cache = transformers.DynamicCache(config=engine.model.config)
        engine.model.zero_grad()
        engine.model(ids, use_cache=True, **{tiny.CACHE: cache})
        engine.model(ids, use_cache=True, **{tiny.CACHE: cache})[0].sum().backward()
        return next(engine.model.parameters()).grad.clone()

    expected = gradient()
    engine.order("chunked_growth")
    assert torch.equal(gradient(), expected)


def test_inference_mode_and_no_grad_in_turn(engine: Caches) -> None:
    """A cache that is filled in inference mode goes on outside of it as it would have without kvobs."""
    def tokens() -> list[int]:
        cache = transformers.DynamicCache(config=engine.model.config)
        with torch.inference_mode():
            ids = engine.model(tiny.prompt(5), use_cache=True, **{tiny.CACHE: cache})[0][:, -1:].argmax(-1)
        found = []
        for _ in range(5):
            with torch.no_grad():
                ids = engine.model(ids.clone(), use_cache=True, **{tiny.CACHE: cache})[0][:, -1:].argmax(-1)
            found.append(int(ids))
        return found

    expected = tokens()
    engine.order("chunked_growth")
    assert tokens() == expected


@pytest.mark.parametrize("kind", ["static", "sliding", "quantized"])
def test_caches_that_are_not_known_are_refused(engine: Caches, kind: str) -> None:
    """With nothing but static, sliding or quantized layers alive, chunked growth is refused and says which they are."""
    if kind == "quantized":
        pytest.importorskip("optimum.quanto", reason="pip install optimum-quanto brings quantized caches.")
    engine.model = tiny.mistral() if kind == "sliding" else engine.model
    config = engine.model.config
    make = {"static": lambda: transformers.StaticCache(config=config, max_cache_len=32),
            "sliding": lambda: transformers.DynamicCache(config=config),
            "quantized": lambda: transformers.QuantizedCache("quanto", config, nbits=4, q_group_size=8,
                                                             residual_length=4)}[kind]
    kept = make()
    expected = tiny.greedy(engine.model, tiny.prompt(9), 6, **{tiny.CACHE: kept})
    taken = engine.order("chunked_growth")
    assert not taken.done
    assert type(kept.layers[0]).__name__ in taken.reason
    engine.submit("compact")
    assert torch.equal(tiny.greedy(engine.model, tiny.prompt(9), 6, **{tiny.CACHE: make()}), expected)


def test_compaction_gives_back_what_a_crop_left(engine: Caches) -> None:
    """After a crop, compaction frees exactly the bytes that storages had beyond what they show; again, nothing."""
    cache = engine.session(60, 3)
    cache.crop(-40)
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    spare = sum(storage(tensor) - tensor.numel() * tensor.element_size() for tensor in tensors)
    before = engine.state(cache)
    assert engine.point.plan("compact").bytes == spare > 0
    taken = engine.order("compact")
    assert (taken.done, taken.bytes) == (True, spare)
    assert engine.state(cache) == before
    assert all(storage(tensor) == tensor.numel() * tensor.element_size()
               for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert engine.order("compact").bytes == 0


def test_undoing_growth_gives_spare_room_back(engine: Caches) -> None:
    """After chunked growth is undone, a session's storages are exact, and what was given back is the answer's bytes."""
    engine.order("chunked_growth")
    cache = engine.session(9, 5)
    held = sum(storage(tensor) for layer in cache.layers for tensor in (layer.keys, layer.values))
    shown = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert held > shown
    assert engine.order("chunked_growth", undo=True).bytes == held - shown
    assert sum(storage(tensor) for layer in cache.layers for tensor in (layer.keys, layer.values)) == shown


def test_uninstalling_puts_everything_back() -> None:
    """With chunked growth in effect the source is uninstalled: the classes are as they were, caches go on rightly."""
    from transformers.cache_utils import DynamicLayer

    before = dict(vars(DynamicLayer))
    with caches() as engine:
        engine.order("chunked_growth")
        cache = engine.session(9, 4)
        assert dict(vars(DynamicLayer)) != before
        expected = copy.deepcopy(cache)
    assert dict(vars(DynamicLayer)) == before
    assert torch.equal(tiny.chat(engine.model, cache, 2, 6), tiny.chat(engine.model, expected, 2, 6))
    assert pickle.loads(pickle.dumps(cache.layers[0])).keys.shape == cache.layers[0].keys.shape


def test_threads_that_generate_are_not_disturbed(engine: Caches) -> None:
    """Three threads chat with sessions of their own while orders rain: each gets the tokens that it gets alone."""
    def talk(seed: int) -> list[int]:
        cache, found = transformers.DynamicCache(config=engine.model.config), []
        for turn in range(4):
            reply = tiny.chat(engine.model, cache, 7, 25, seed=seed + turn)
            found.append(int(reply))
            if seed != 30 and cache.get_seq_length() > 9:
                cache.crop(-3)
        return found

    expected = {seed: talk(seed) for seed in (10, 20, 30)}
    found: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda seed=seed: found.update({seed: talk(seed)})) for seed in expected]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for kind, undo in (("chunked_growth", False), ("compact", False), ("chunked_growth", True)):
            engine.submit(kind, undo=undo)
            threads[0].join(0.005)
    for thread in threads:
        thread.join()
    assert found == expected
    assert [taken.reason for taken in engine.answers() if "raised" in taken.reason] == []


@pytest.fixture(scope="module")
def warm_dynamo() -> None:
    """Dynamo's first compilation patches nn.Module for good: not within a test, where it would look like ours."""
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))


def test_a_compiled_model_is_left_alone(warm_dynamo: None, engine: Caches) -> None:
    """Under the compiler growth stays concatenation, in one graph without a break: no storage has spare room."""
    engine.order("chunked_growth")
    small = tiny.llama(layers=1)
    cache = transformers.DynamicCache(config=small.config)
    whole = torch.compile(small, backend="eager", fullgraph=True)
    with torch.no_grad():
        logits = whole(tiny.prompt(6), use_cache=True, **{tiny.CACHE: cache})[0]
        expected = small(tiny.prompt(6), use_cache=False)[0]
    assert torch.allclose(logits, expected, atol=1e-5)
    assert storage(cache.layers[0].keys) == cache.layers[0].keys.nbytes
