"""Continuous batching of transformers against an independent ledger, closed forms and its own results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers", reason="transformers is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators",
                    reason="This transformers is older than 5.18; kvobs follows its continuous batching from there on.")
sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'kvobs[otel]' brings the SDK.")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation.continuous_batching import cache_allocators, continuous_api

from kvobs import model, sessions
from kvobs.bus import Bus
from kvobs.config import Config
from kvobs.sources import Wiring
from kvobs.sources._patch import Patches
from kvobs.sources.transformers._paged import PagedHooks

pytestmark = pytest.mark.torch

LAYERS, KV_HEADS, HEAD_DIM, PAGE = 3, 2, 8, 16
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
BLOCK_BYTES = PAGE * TOKEN_BYTES
SMALL_POOL = 10


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=97, max_position_embeddings=512))
    made.set_attn_implementation("sdpa")
    return made.eval()


@dataclass
class Ledger:
    """Counted beside kvobs, from the pool's own methods; patched in before kvobs is."""

    allocated: int = 0
    refused: int = 0
    reset: int = 0
    copied_bytes: int = 0
    totals: set[int] = field(default_factory=set)
    after_step: list[int] = field(default_factory=list)
    after_update: list[tuple[int, int, int]] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)


def used_bytes(cache: Any) -> int:
    return sum(len({block for table in a.block_table.values() for block in table}) * a.bytes_per_block
               for a in cache.cache_allocators.values())


def free_bytes(cache: Any) -> int:
    return cache.pool.num_free_sectors * cache.bytes_per_sector + sum(
        cache.pool.count_free_blocks(a.index) * a.bytes_per_block for a in cache.cache_allocators.values())


def cached_bytes(cache: Any) -> int:
    return sum(len(a.ledger.cached_blocks) * a.bytes_per_block for a in cache.cache_allocators.values())


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    seen = Ledger()

    def beside(owner: Any, name: str, see: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            see(self, result, *args)
            return result

        monkeypatch.setattr(owner, name, call)

    def took(pool: Any, blocks: list[int], *_: object) -> None:
        seen.allocated += len(blocks)

    def asked(cache: Any, fits: bool, *_: object) -> None:
        seen.refused += not fits

    def restarted(state: Any, *_: object) -> None:
        seen.reset += 1

    def copied(allocator: Any, _: None, source: list[int], *__: object) -> None:
        seen.copied_bytes += len(source) * allocator.bytes_per_block

    def stepped(processor: Any, *_: object) -> None:
        seen.after_step.append(used_bytes(processor.cache))
        seen.batches.append([future.query_length for future in processor.inputs_and_outputs.requests_in_batch])

    def updated(processor: Any, *_: object) -> None:
        cache = processor.cache
        seen.totals.add(cache.num_sectors * cache.bytes_per_sector)
        seen.after_update.append((used_bytes(cache), cached_bytes(cache), free_bytes(cache)))

    beside(cache_allocators.CachePool, "get_free_blocks", took)
    beside(continuous_api.PagedAttentionCache, "can_store_request_tokens", asked)
    beside(continuous_api.RequestState, "create_equivalent_initial_request", restarted)
    beside(cache_allocators.CacheAllocator, "copy_blocks", copied)
    beside(continuous_api.ContinuousBatchProcessor, "_generation_step", stepped)
    beside(continuous_api.ContinuousBatchProcessor, "update_batch", updated)
    return seen


class Observed:
    """Paged hooks on their own, what they emitted, and the spans they ended."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        provider = sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.tracer = provider.get_tracer("test")
        self.bus = Bus(1_000_000)
        self.patches = Patches("transformers", self.bus.publish)
        self.hooks = PagedHooks(Wiring(Config(), self.bus, lambda: self.tracer), self.bus.publish, self.patches,
                                sessions.Names("plain"), sessions.TurnNumbers())
        self._seen: list[model.Event] = []

    def of(self, kind: type) -> list[Any]:
        self._seen += self.bus.drain()
        return [event for event in self._seen if type(event) is kind]

    def all(self) -> list[model.Event]:
        self._seen += self.bus.drain()
        return list(self._seen)

    def close(self) -> None:
        self.hooks.uninstall()
        self.patches.restore()


@pytest.fixture
def observed(ledger: Ledger) -> Iterator[Observed]:
    made = Observed()
    made.hooks.install()
    yield made
    made.close()
    assert not made.of(model.HookFailed)


def prompts(number: int = 5, length: int = 20) -> list[list[int]]:
    return [[(7 * row + column) % 97 for column in range(length)] for row in range(number)]


def greedy(new_tokens: int = 24, **more: Any) -> Any:
    return GenerationConfig(**{"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": -1} | more)


def pool(blocks: int = 64, **more: Any) -> Any:
    return ContinuousBatchingConfig(**{"page_size": PAGE, "num_blocks": blocks, "max_batch_tokens": 64} | more)


def answers(network: Any, inputs: list[list[int]], generation: Any, batching: Any) -> dict[str, list[int]]:
    found = network.generate_batch(inputs, generation_config=generation, continuous_batching_config=batching)
    return {name: output.generated_tokens for name, output in found.items()}


def stopped(manager: Any) -> None:
    manager.stop(block=True, timeout=30)
