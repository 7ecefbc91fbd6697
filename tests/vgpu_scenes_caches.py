"""Scenes: every kind of cache on the virtual GPU beside the same on the CPU, rearranged and moved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from kvobs import model as events
from tests.contract import ledger, paged, tiny
from tests.contract.conftest import Watch
from tests.contract.test_transformers_caches import HYBRIDS, QUANTIZED

transformers.logging.set_verbosity_error()
FIRST, SECOND = "vgpu:0", "vgpu:1"
PROMPT, NEW = 11, 12


def _tensors(cache: Any) -> list[Any]:
    return [tensor for layer in ledger.layers_in(cache) for tensor in ledger.tensors_of(layer).values()]


def _same(one: Any, other: Any) -> list[bool]:
    """Have two caches the same content, and is the second one all on the first virtual device?"""
    pairs = list(zip(_tensors(one), _tensors(other), strict=True))
    data = [pair for pair in pairs if pair[0].numel()]
    return [bool(data) and all(torch.equal(left, right.cpu()) for left, right in pairs),
            {str(right.device) for _, right in data} == {FIRST}]


def _generated(model: Any, ids: Any, **more: Any) -> Any:
    torch.manual_seed(5)
    return tiny.greedy(model, ids, NEW, return_dict_in_generate=True, **more)


def _compared(model: Any, rows: int, settings: Callable[[Any], dict[str, Any]]) -> list[bool]:
    """Are the tokens those of the CPU, the cache's content too, and does the cache lie on the device?"""
    ids, other = tiny.prompt(PROMPT, rows), copy.deepcopy(model).to(FIRST)
    outs = [_generated(each, ids.to(each.device), **settings(each)) for each in (model, other)]
    return [torch.equal(outs[0].sequences, outs[1].sequences.cpu()), *_same(*map(tiny.cache_of, outs))]


def kinds() -> dict[str, Any]:
    """Growing, sliding, static, mixed, encoder-decoder and state caches."""
    def static(_: Any) -> dict[str, Any]:
        return {"cache_implementation": "static"}

    def growing(_: Any) -> dict[str, Any]:
        return {}

    found = {f"{make.__name__} {way.__name__}": _compared(make(), 2, way) for way in (growing, static)
             for make in (tiny.llama, tiny.mistral, tiny.gemma2, tiny.gemma3, tiny.t5, tiny.bart)}
    for name, settings in HYBRIDS.items():
        if hasattr(transformers, name):
            found[name] = _compared(tiny.build(tiny.config_of(name, **settings)), 1, growing)
    return found


def quantized() -> dict[str, Any]:
    """The quantized caches whose back ends are installed; of the others, what they ask for."""
    found: dict[str, Any] = {}
    for name, (settings, _) in QUANTIZED.items():
        def cache(model: Any, name: str = name, settings: Any = settings) -> dict[str, Any]:
            return {tiny.CACHE: transformers.QuantizedCache(name, model.config, **settings)}

        try:
            found[name] = _compared(tiny.llama(), 2, cache)
        except ImportError as error:
            found[name] = str(error)
    return found


def _filled(model: Any, rows: int = 2, seed: int = 1) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(tiny.prompt(PROMPT, rows, seed).to(model.device), **{tiny.CACHE: cache})
    return cache


def rearranged() -> dict[str, Any]:
    """A cache cropped, reordered, repeated and selected from, and a static one that is reset and used again."""
    model = tiny.llama()
    other = copy.deepcopy(model).to(FIRST)
    changes: dict[str, Callable[[Any, Any], Any]] = {
        "crop": lambda cache, _: cache.crop(-4), "reorder": lambda cache, at: cache.reorder_cache(at([1, 0])),
        "repeat": lambda cache, _: cache.batch_repeat_interleave(3),
        "select": lambda cache, at: cache.batch_select_indices(at([1]))}
    found: dict[str, Any] = {}
    for name, change in changes.items():
        caches = [_filled(each) for each in (model, other)]
        for cache, device in zip(caches, ("cpu", FIRST), strict=True):
            change(cache, lambda numbers, device=device: torch.tensor(numbers, device=device))
        found[name] = _same(*caches)
    outs = []
    for each in (model, other):
        cache = transformers.StaticCache(config=each.config, max_cache_len=PROMPT + NEW)
        first = _generated(each, tiny.prompt(PROMPT, 2, 7).to(each.device), **{tiny.CACHE: cache})
        cache.reset()
        outs.append(_generated(each, tiny.prompt(PROMPT, 2).to(each.device), **{tiny.CACHE: cache}))
        assert not torch.equal(first.sequences, outs[-1].sequences)
    found["reset"] = [torch.equal(outs[0].sequences, outs[1].sequences.cpu()), *_same(*map(tiny.cache_of, outs))]
    return found


@contextmanager
def _watched() -> Iterator[Watch]:
    from opentelemetry.trace import NoOpTracer

    silent = NoOpTracer()
    watch = Watch(lambda: silent)
    try:
        yield watch
    finally:
        watch.close()


def _moves(found: list[Any]) -> dict[str, list[int]]:
    sums: dict[str, list[int]] = {}
    for move in found:
        of_pair = sums.setdefault(f"{move.src} {move.dst}", [0, 0])
        of_pair[0] += move.buffers
        of_pair[1] += move.bytes
    return sums


def _copied(before: dict[tuple[str, str], tuple[int, int]]) -> dict[str, list[int]]:
    return {" ".join(pair): [count - before.get(pair, (0, 0))[0], size - before.get(pair, (0, 0))[1]]
            for pair, (count, size) in torch.vgpu.copies().items() if (count, size) != before.get(pair)}


def moved() -> dict[str, Any]:
    """Layers offloaded and fetched back, then all moved to the other device: migrations and the device's copies."""
    model = tiny.llama()
    other = model.to(FIRST)
    with _watched() as watch:
        cache = _filled(other)
        kept = [tensor.cpu() for tensor in _tensors(cache)]
        layer_bytes = 2 * cache.layers[0].keys.nbytes
        watch.events()
        before = torch.vgpu.copies()
        for index in (0, 2):
            cache.layers[index].offload()
        away = [str(layer.keys.device) for layer in cache.layers]
        for index in (0, 2):
            cache.layers[index].prefetch()
        there_and_back = [_moves(watch.of(events.Migration)), _copied(before)]
        before = torch.vgpu.copies()
        for layer in cache.layers:
            layer.device = torch.device(SECOND)
            layer.prefetch()
        across = [_moves(watch.of(events.Migration)), _copied(before)]
        hooks = watch.of(events.HookFailed)
    return {"away": away, "back": there_and_back, "across": across, "layer": layer_bytes, "hooks": len(hooks),
            "kept": all(torch.equal(one, two.cpu()) for one, two in zip(kept, _tensors(cache), strict=True)),
            "devices": sorted({str(tensor.device) for tensor in _tensors(cache)})}


def migrated_session() -> bool:
    """A session that goes on with its cache and a copy of the model on the other device: are its tokens the CPU's?"""
    model = tiny.llama()
    ids = tiny.prompt(PROMPT)
    expected = tiny.greedy(model, ids, 2 * NEW)
    first = copy.deepcopy(model).to(FIRST)
    cache = transformers.DynamicCache(config=model.config)
    half = tiny.greedy(first, ids.to(FIRST), NEW, **{tiny.CACHE: cache})
    for layer in cache.layers:
        layer.device = torch.device(SECOND)
        layer.prefetch()
    rest = tiny.greedy(model.to(SECOND), half.to(SECOND), NEW, **{tiny.CACHE: cache})
    return torch.equal(expected, rest.cpu())


def offloading() -> dict[str, str]:
    """What transformers says to caches that copy on streams of CUDA."""
    model = tiny.llama().to(FIRST)
    told: dict[str, str] = {}
    for name, settings in {
            "offloading=True": lambda: {tiny.CACHE: transformers.DynamicCache(config=model.config, offloading=True)},
            "offloaded": lambda: {"cache_implementation": "offloaded"},
            "offloaded_static": lambda: {"cache_implementation": "offloaded_static"}}.items():
        try:
            tiny.greedy(model, tiny.prompt(PROMPT).to(FIRST), 2, **settings())
            told[name] = ""
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def continuous_batching() -> dict[str, Any]:
    """Requests through a pool that is too small for them: the CPU's answers, and the pool's bytes on the device."""
    model = tiny.llama()
    model.set_attn_implementation("sdpa")
    prompts = paged.prompts(number=4, length=12)
    prompts = [[token % tiny.VOCAB for token in prompt] for prompt in prompts]
    answers, peaks = [], []
    for device in ("cpu", FIRST):
        own = copy.deepcopy(model).to(device)
        torch.vgpu.reset_peak_memory_stats(0)
        base = torch.vgpu.memory_allocated(0)
        answers.append(list(paged.answers(own, prompts, paged.greedy(NEW), paged.pool(8)).values()))
        peaks.append(torch.vgpu.max_memory_allocated(0) - base)
    return {"same": answers[0] == answers[1], "lengths": [len(answer) for answer in answers[1]], "peaks": peaks,
            "pool": 8 * paged.PAGE * tiny.row_bytes(model)}
