"""What the next step of live caches will ask for, against what the step that then happens concatenates and frees."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings transformers.")

from torch.utils._python_dispatch import TorchDispatchMode

from kvobs.sources.transformers._demand import OFFLOADED
from kvobs.sources.transformers._source import PAUSED
from tests.contract import tiny

pytestmark = pytest.mark.torch


class Ledger(TorchDispatchMode):  # type: ignore[misc]
    """What a step does with the K and V of ``layers``: bytes of each concatenation to one, and what is freed after."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.done: list[tuple[int, list[int]]] = []
        self._old = {tensor.untyped_storage().data_ptr() for layer in layers for tensor in (layer.keys, layer.values)}
        for layer in layers:
            for tensor in (layer.keys, layer.values):
                weakref.finalize(tensor, self._freed, tensor.untyped_storage().data_ptr()).atexit = False

    def _freed(self, address: int) -> None:
        self._old.discard(address)  # another tensor may come to lie there
        if self.done:
            self.done[-1][1].append(address)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and any(
                part.untyped_storage().data_ptr() in self._old for part in args[0]):
            self.done.append((result.untyped_storage().nbytes(), []))
        return result


def next_steps(watch: Any) -> list[tuple[int, list[int]]]:
    """The forecast as a ledger would show it."""
    return [(size, list(returned)) for growth in watch.source.demands().growths
            for size, returned in zip(growth.demand.sizes, growth.demand.returns, strict=True)]


@pytest.mark.parametrize("make", [tiny.llama, tiny.mistral, tiny.gemma3])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_next_step_asks_and_gives_back_as_predicted(watch: Any, make: Callable[[], Any], rows: int) -> None:
    """In each of 12 steps, full layers and sliding ones before and past their window do what was told just before."""
    net = make()
    cache = transformers.DynamicCache(config=net.config)
    ids = tiny.prompt(5, rows)
    for step in range(13):
        expected = next_steps(watch)
        with Ledger(cache.layers if step else []) as ledger, torch.no_grad():
            net(input_ids=ids if not step else ids[:, :1], use_cache=True, **{tiny.CACHE: cache})
        if step:
            assert ledger.done == expected
            assert len(expected) == 2 * 3


def test_gradients_keep_the_old_buffers(watch: Any) -> None:
    """Where autograd holds the replaced K and V, nothing is told to be given back."""
    net = tiny.llama()
    cache = transformers.DynamicCache(config=net.config)
    net(input_ids=tiny.prompt(5), use_cache=True, **{tiny.CACHE: cache})
    growth, = watch.source.demands().growths
    assert (len(growth.demand.sizes), growth.demand.returns) == (6, ())


def test_every_live_cache_is_told_and_none_that_is_gone(watch: Any) -> None:
    """Two sessions' caches are in the forecast, one after it was freed; each says where it lies."""
    net = tiny.llama()
    caches = [transformers.DynamicCache(config=net.config) for _ in range(2)]
    for number, cache in enumerate(caches, 1):
        tiny.greedy(net, tiny.prompt(5 * number), 3, **{tiny.CACHE: cache})
    found = watch.source.demands()
    row = tiny.row_bytes(net) // 6
    assert [growth.demand.sizes for growth in found.growths] == [(8 * row,) * 6, (13 * row,) * 6]
    assert [growth.address for growth in found.growths] == [cache.layers[0].keys.data_ptr() for cache in caches]
    del caches[0], cache
    gc.collect()
    assert [growth.demand.sizes for growth in watch.source.demands().growths] == [(13 * row,) * 6]


def test_a_static_cache_asks_for_nothing(watch: Any) -> None:
    """It was reserved as a whole and is filled in place."""
    net = tiny.llama()
    cache = transformers.StaticCache(config=net.config, max_cache_len=64)
    tiny.greedy(net, tiny.prompt(5), 3, **{tiny.CACHE: cache})
    found = watch.source.demands()
    assert (found.growths, found.unknown) == ((), ())


@pytest.mark.parametrize("make", [tiny.t5, tiny.bart])
def test_cross_attention_that_is_filled_asks_for_nothing(watch: Any, make: Callable[[], Any]) -> None:
    """Of an encoder-decoder cache the two decoder layers' own K and V grow, the encoder's are only read."""
    output = tiny.greedy(make(), tiny.prompt(5), 3, return_dict_in_generate=True)
    cache = tiny.cache_of(output)
    growth, = watch.source.demands().growths
    own = [tensor for layer in cache.self_attention_cache.layers for tensor in (layer.keys, layer.values)]
    assert growth.demand.sizes == tuple(tensor.nbytes // tensor.shape[2] * (tensor.shape[2] + 1) for tensor in own)
    assert growth.demand.returns == tuple((tensor.data_ptr(),) for tensor in own)


def test_an_offloaded_cache_is_not_guessed(watch: Any) -> None:
    """What its moves between devices ask for is not known, which the forecast says."""
    net = tiny.llama()
    cache = transformers.DynamicCache(config=net.config)
    tiny.greedy(net, tiny.prompt(5), 3, **{tiny.CACHE: cache})
    cache.offloading = True
    found = watch.source.demands()
    assert (found.growths, found.unknown) == ((), (OFFLOADED,))


def test_a_pause_is_told(watch: Any) -> None:
    """While observation is paused, caches that begin are not seen: the forecast says so."""
    net = tiny.llama()
    tiny.greedy(net, tiny.prompt(5), 3)
    assert watch.source.demands().unknown == ()
    watch.bus.active = False
    assert watch.source.demands().unknown == (PAUSED,)


def test_before_transformers_and_after_uninstall_nothing_is_told(watch: Any) -> None:
    """A source that follows no cache forecasts nothing."""
    net = tiny.llama()
    cache = transformers.DynamicCache(config=net.config)
    tiny.greedy(net, tiny.prompt(5), 3, **{tiny.CACHE: cache})
    assert watch.source.demands().growths
    watch.source.uninstall()
    assert watch.source.demands() == ((), ())
