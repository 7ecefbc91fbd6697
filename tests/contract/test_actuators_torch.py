"""Returning memory of the C heap, evicting cached blocks of a real engine, and the threshold's formula and text."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.model import Order
from kvobs.sources._torch_actions import NO_FRACTION, TorchActions
from kvobs.sources._torch_handle import Torch
from kvobs.sources._torch_threshold import SettingsRefused, change, threshold, value_in, with_key
from tests.contract.actuators import Answers
from tests.fake_torch import FakeTorch
from tests.support import run_python, wait_until

_TRIM = """
import ctypes, json
from kvobs.bus import Bus
from kvobs.model import Order
from kvobs.sources._torch import TorchSource

def resident():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Rss:"))

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
answers = []
source = TorchSource(Bus(64))
source.install(answers.append)
point, = source.actuators
blocks = [libc.malloc(64_000) for _ in range(1_000)]
for block in blocks:
    ctypes.memset(block, 1, 64_000)
for block in blocks[:-1]:
    libc.free(block)
before = resident()
point.submit(Order(1, "malloc_trim", 1, 1 << 62, False))
point.run()
after = resident()
source.uninstall()
print(json.dumps([before - after, answers[-1].bytes, answers[-1].done, answers[-1].duration_ns]))
"""


def test_trimming_returns_what_the_kernel_counts() -> None:
    """Of 64 MB that a pinned heap holds free, nearly all goes back to the system, as told and as smaps says."""
    done = run_python(_TRIM)
    assert done.returncode == 0, done.stderr
    fell, told, carried_out, _ = json.loads(done.stdout)
    assert carried_out
    assert fell > 60_000_000
    assert abs(fell - told) < 2_000_000


@pytest.mark.parametrize(("rate", "expected"), [
    (-3.0, 0.75), (0.0, 0.75), (0.683, 0.75), (0.783, 0.83), (0.983, 0.99), (0.9999, 0.99), (1.0, 0.99)])
def test_the_threshold_follows_the_article_s_formula(rate: float, expected: float) -> None:
    """0.75 up to 0.683, above it 0.75 + (rate - 0.683) * 0.8, never more than 0.99 (the formula reaches 1.0036)."""
    assert threshold(rate) == pytest.approx(expected)


@pytest.mark.parametrize("text", [
    "", "max_split_size_mb:64", "garbage_collection_threshold:0.6", "garbage_collection_threshold:0.6,a:1",
    "roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold: 0.7 ,expandable_segments:True"])
def test_one_key_of_the_settings_changes(text: str) -> None:
    """With the threshold set and put back to what it was, all other settings are there to the letter."""
    changed = with_key(text, "0.8")
    assert value_in(changed) == "0.8"
    assert with_key(changed, None) == with_key(text, None)
    assert value_in(with_key(changed, value_in(text))) == value_in(text)


class Settings:
    """torch's setter as its versions behave: ``takes`` says what becomes of a text."""

    def __init__(self, takes: Any) -> None:
        self.text, self._takes = "max_split_size_mb:64", takes

    def _accelerator_getAllocatorSettings(self) -> str:
        return self.text

    def _accelerator_setAllocatorSettings(self, text: str) -> None:
        self.text = text if text == "max_split_size_mb:64" else self._takes(text)


def _raise(text: str) -> str:
    raise ValueError("out of range\nat some line of C++")


@pytest.mark.parametrize("takes", [_raise, lambda text: "something:else"])
def test_settings_that_are_refused_are_put_back(takes: Any) -> None:
    """Where torch raises, or has other settings in effect afterwards, what was in effect is again, and it is said."""
    module = Settings(takes)
    with pytest.raises(SettingsRefused, match=r"they are as before\.$"):
        change(module, "garbage_collection_threshold:0.8")
    assert module.text == "max_split_size_mb:64"
    with pytest.raises(SettingsRefused, match="cannot change"):
        change(SimpleNamespace(), "a:1")


def test_nothing_is_done_while_a_graph_is_captured() -> None:
    """While a CUDA graph is being captured, the device's actions are refused, and torch is not asked for anything."""
    fake: Any = FakeTorch()
    answers = Answers()
    actions = TorchActions(lambda: (Torch(fake), "cuda"), lambda: True, answers.append)
    for kind in ("empty_cache", "gc_threshold"):
        actions.point.submit(Order(1, kind, 1, 1 << 62, False))
        assert "captured" in actions.point.plan(kind).reason
    actions.point.run()
    assert [(taken.done, "captured" in taken.reason) for taken in answers.taken()] == [(False, True)] * 2
    assert NO_FRACTION.endswith(".")
    actions.point.close()


def test_a_real_engine_s_cached_blocks_are_evicted() -> None:
    """A pool that keeps blocks of ended requests gives up exactly these, and the engine answers as before."""
    pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators",
                        reason="This transformers is older than 5.18.")
    pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'kvobs[otel]' brings the SDK.")
    from tests.contract import paged, tiny
    from tests.contract.actuators import caches

    with caches() as engine:
        engine.model.set_attn_implementation("sdpa")
        assert len(engine.watch.source.actuators) == 1  # orders would wait in vain before there is an engine
        prompt = [token % tiny.VOCAB for token in paged.prompts(number=1, length=40)[0]]
        manager = engine.model.init_continuous_batching(
            generation_config=paged.greedy(4), continuous_batching_config=paged.pool(20))
        manager.start()
        try:
            def answer() -> list[int]:
                name = manager.add_request(prompt, max_new_tokens=4)
                found: list[Any] = []
                wait_until(lambda: found.append(manager.get_result(request_id=name, timeout=0.1)) or found[-1],
                           what="the answer of the engine")
                return list(found[-1].generated_tokens)

            first = answer()
            point: Any = engine.watch.source.actuators[1]
            cache = manager.batch_processor.cache
            wait_until(lambda: not manager.batch_processor.has_pending_requests(), what="an idle engine")
            allocator, = cache.cache_allocators.values()
            cached, free = len(allocator.ledger.cached_blocks), cache.pool.count_free_blocks(allocator.index)
            assert cached > 0
            engine.watch.events()
            point.submit(Order(1, "evict_cached_blocks", 1, 1 << 62, False))
            told: list[Any] = []
            wait_until(lambda: told.extend(engine.answers()) or told, what="the engine's safe point")
            assert [(taken.actuator, taken.done, taken.bytes) for taken in told] == [
                ("continuous batching", True, cached * allocator.bytes_per_block)]
            assert cache.pool.count_free_blocks(allocator.index) == free + cached
            assert answer() == first
        finally:
            manager.stop(block=True)
