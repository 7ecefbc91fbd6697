"""Caches between passes: rearranged, moved, used by several threads and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings transformers.")

import kvobs
from kvobs import model as events
from tests.contract import ledger, tiny
from tests.contract.tiny import chat

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama()


# -- rearranged and moved caches -----------------------------------------------------------------------------


def test_a_cropped_cache_gives_tokens_back_not_memory(watch: Any, llama: Any) -> None:
    """After ``crop`` fewer bytes are held in the same storages, until the next pass copies what is left."""
    cache = transformers.DynamicCache(config=llama.config)
    chat(llama, cache, 10, 1)
    cache.crop(-4)
    row = tiny.row_bytes(llama)
    seen = watch.events()
    assert (ledger.reserved(cache), [e for e in seen if isinstance(e, events.Rewrite)]) == (10 * row, [])
    (sizes,) = [e for e in seen if isinstance(e, events.Resized)]
    assert (sizes.kv_bytes, sizes.kv_reserved_bytes) == (6 * row, 10 * row)
    chat(llama, cache, 1, 1)
    (step,) = watch.of(events.Step)
    assert (step.kv_bytes, step.kv_reserved_bytes, step.bytes_copied) == (7 * row, 7 * row, 6 * row)


def test_batch_operations_are_rewrites(watch: Any, llama: Any) -> None:
    """Repeat, select and reorder replace each of the six buffers and copy all of them."""
    cache = transformers.DynamicCache(config=llama.config)
    chat(llama, cache, 4, 1)
    watch.events()
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.reorder_cache(torch.tensor([1, 0]))
    row = 4 * tiny.row_bytes(llama)
    assert [(e.reallocations, e.bytes_copied) for e in watch.of(events.Rewrite)] == [
        (6, 3 * row), (6, 2 * row), (6, 2 * row)]


def test_moved_layers_are_migrations_with_time(watch: Any, llama: Any) -> None:
    """``prefetch`` to another device moves two buffers of a layer, counted once with bytes and host time."""
    cache = transformers.DynamicCache(config=llama.config)
    chat(llama, cache, 6, 1)
    watch.events()
    layer = cache.layers[1]
    layer.device = torch.device("meta")
    layer.prefetch()
    layer.prefetch()
    (move,) = watch.of(events.Migration)
    assert (move.src, move.dst, move.buffers, move.bytes) == ("cpu", "meta", 2, 6 * tiny.row_bytes(llama) // 3)
    assert move.duration_ns > 0
    assert move.origin.model == "LlamaForCausalLM"
    del cache, layer
    assert watch.turn().migrations == (("cpu", "meta", 2, move.bytes),)


class Elsewhere(torch.Tensor):
    """A CPU tensor that says it is on a GPU: what offloading can be tried with on a machine without one."""

    device = property(lambda self: torch.device("cuda:0"))  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.Tensor.to

    def to(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if str(device) == "cuda:0":
            return self.clone().as_subclass(Elsewhere)
        if isinstance(self, Elsewhere) and str(device) == "cpu":
            return self.as_subclass(torch.Tensor).clone()
        return original(self, device, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)


def test_an_offloaded_cache_counts_moves_and_growth(watch: Any, llama: Any, pretend_gpu: None) -> None:
    """A cache that rests on the CPU and is fetched for each update: every move and every growth is counted, once."""

    class Offloaded(transformers.DynamicCache):
        def update(self, keys: Any, values: Any, index: int, *args: Any, **kwargs: Any) -> Any:
            layer = self.layers[index]
            layer.prefetch()
            keys, values = super().update(keys, values, index, *args, **kwargs)
            layer.keys, layer.values = keys.as_subclass(Elsewhere), values.as_subclass(Elsewhere)
            layer.device = torch.device("cuda:0")
            layer.offload()
            return keys, values

    cache = Offloaded(config=llama.config)
    with ledger.Counter() as counter:
        chat(llama, cache, 6, 5)
    seen = watch.events()
    moves = [e for e in seen if isinstance(e, events.Migration)]
    steps = [e for e in seen if isinstance(e, events.Step)]
    row = tiny.row_bytes(llama)
    assert not [e for e in seen if isinstance(e, events.HookFailed)]
    assert counter.reallocations == 30
    assert sum(e.reallocations for e in steps) == 30
    assert sum(e.bytes_written for e in steps) == 10 * row
    assert sum(e.bytes_copied for e in steps) == row * (6 + 7 + 8 + 9)
    assert sum(e.bytes for e in moves if e.dst == "cuda:0") == row * (6 + 7 + 8 + 9)
    assert sum(e.bytes for e in moves if e.dst == "cpu") == row * (6 + 7 + 8 + 9 + 10)
    assert len(moves) == 3 * (4 + 5)


# -- threads and asyncio ---------------------------------------------------------------------------------


def test_models_and_threads_do_not_mix(watch: Any, llama: Any) -> None:
    """Four sessions over two models in four threads at once: each one's sums are the closed form of its own work."""
    other = tiny.llama(layers=2, seed=9)
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        model, ids = (llama, other)[number % 2], tiny.prompt(4 + number)
        barrier.wait()
        with kvobs.session(f"s{number}"):
            for _ in range(3):
                tiny.greedy(model, ids, 5)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    turns = watch.turns()
    assert len(turns) == 12
    for number in range(4):
        model, mine = (llama, other)[number % 2], [t for t in turns if t.session == f"s{number}"]
        row, length = tiny.row_bytes(model), 4 + number
        assert [t.turn for t in mine] == [1, 2, 3]
        for turn in mine:
            assert turn.reallocations == 2 * model.config.num_hidden_layers * 5
            assert (turn.bytes_written, turn.kv_bytes) == ((length + 4) * row, (length + 4) * row)
            assert turn.bytes_copied == row * sum(range(length, length + 4))


def test_asyncio_tasks_keep_their_sessions(watch: Any, llama: Any) -> None:
    """Sessions follow the task into ``to_thread`` and never leak to another task."""

    async def task(number: int) -> None:
        with kvobs.session(f"t{number}") if number else contextlib.nullcontext():
            await asyncio.sleep(0)
            await asyncio.to_thread(tiny.greedy, llama, tiny.prompt(3 + number), 3)
            await asyncio.sleep(0)
            tiny.greedy(llama, tiny.prompt(3 + number), 3)

    async def main() -> None:
        await asyncio.gather(*(task(number) for number in range(4)))

    asyncio.run(main())
    turns = watch.turns()
    for number in range(1, 4):
        mine = [(t.turn, t.prompt_tokens) for t in turns if t.session == f"t{number}"]
        assert mine == [(1, 3 + number), (2, 3 + number)]
    others = [t for t in turns if not t.session.startswith("t")]
    assert [(t.turn, t.prompt_tokens) for t in others] == [(1, 3), (1, 3)]
