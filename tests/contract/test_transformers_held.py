"""Who holds which memory, as source transformers tells it for memory maps, against the tensors themselves."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings transformers.")

import kvobs
from kvobs.sources.transformers import _held
from tests.contract import tiny

pytestmark = pytest.mark.torch


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU count as those of an accelerator do."""
    monkeypatch.setattr(_held, "_CPU", "none")


def places(told: list[Any]) -> dict[int, tuple[str, str]]:
    return {one.address: one.holder[:2] for one in told}


@pytest.mark.usefixtures("everywhere")
def test_caches_and_weights_are_told_by_their_storages(watch: Any) -> None:
    """Every K and V of two sessions' caches and every parameter and buffer of the model, at its own address, once."""
    model, caches = tiny.llama(), dict[str, Any]()
    expected: dict[int, tuple[str, str]] = {}
    for session in ("anna", "ben"):
        caches[session] = transformers.DynamicCache(config=model.config)
        with kvobs.session(session):
            tiny.greedy(model, tiny.prompt(5), 3, **{tiny.CACHE: caches[session]})
    for session, cache in caches.items():
        expected |= {tensor.untyped_storage().data_ptr(): ("kv", session)
                     for layer in cache.layers for tensor in (layer.keys, layer.values)}
    name = model.config._name_or_path or type(model).__name__
    expected |= {tensor.untyped_storage().data_ptr(): ("weights", name)
                 for tensor in (*model.parameters(), *model.buffers())}
    told = watch.source.held()
    assert places(told) == expected
    assert {one.device for one in told} == {"cpu"}
    assert len({one.holder for one in told if one.holder[0] == "kv"}) == 2


@pytest.mark.usefixtures("everywhere")
def test_nothing_lives_longer_for_being_told(watch: Any) -> None:
    """Once the host has dropped a cache and the model, neither is told any more."""
    model = tiny.llama()
    cache = transformers.DynamicCache(config=model.config)
    tiny.greedy(model, tiny.prompt(5), 3, **{tiny.CACHE: cache})
    assert {one.holder[0] for one in watch.source.held()} == {"kv", "weights"}
    del cache
    gc.collect()
    assert {one.holder[0] for one in watch.source.held()} == {"weights"}
    del model
    gc.collect()
    assert watch.source.held() == []


@pytest.mark.usefixtures("everywhere")
def test_a_cache_that_cannot_be_told_is_left_out(watch: Any) -> None:
    """A cache whose tensors raise when they are looked at costs its own entries only."""
    model = tiny.llama()
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        tiny.greedy(model, tiny.prompt(5), 3, **{tiny.CACHE: cache})

    class Broken:
        device = torch.device("meta")

        def untyped_storage(self) -> Any:
            raise RuntimeError("no storage")

    for layer in caches[0].layers:
        layer.keys = layer.values = Broken()
    kept = {tensor.data_ptr() for layer in caches[1].layers for tensor in (layer.keys, layer.values)}
    assert {one.address for one in watch.source.held() if one.holder[0] == "kv"} == kept


def test_what_lies_on_the_cpu_is_of_no_memory_map(watch: Any) -> None:
    """A model and a cache on the CPU are told to nobody."""
    model = tiny.llama()
    tiny.greedy(model, tiny.prompt(5), 3, **{tiny.CACHE: transformers.DynamicCache(config=model.config)})
    assert watch.source.held() == []


@pytest.mark.parametrize("mode", ["hashed", "off"])
@pytest.mark.usefixtures("everywhere")
def test_session_names_are_as_events_have_them(watching: Any, mode: str) -> None:
    """Where sessions are hashed or not shown, maps carry the turn's form of the name, never the name."""
    watch = watching(session_ids=mode)
    model = tiny.llama()
    cache = transformers.DynamicCache(config=model.config)
    with kvobs.session("anna"):
        tiny.greedy(model, tiny.prompt(5), 3, **{tiny.CACHE: cache})
    turn = watch.turn()
    assert turn.session != "anna"
    assert {one.holder for one in watch.source.held() if one.holder[0] == "kv"} == {
        ("kv", turn.session, turn.cache_id)}
