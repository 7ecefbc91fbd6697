"""A real paged cache of transformers without a model, whose requests a test admits and ends by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import ContinuousBatchingConfig, LlamaConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from kvobs.sources.transformers._actions_hot import HotPrefixes

PAGE = 4


def paged_cache(blocks: int) -> Any:
    """So many blocks of four tokens."""
    import torch

    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=2, head_dim=8, vocab_size=97)
    batching = ContinuousBatchingConfig(page_size=PAGE, num_blocks=blocks, max_batch_tokens=16, max_memory_percent=0.5)
    return PagedAttentionCache(config, batching, "cpu", DistributedHelper(None, None), torch.float32)


def prompt(number: int, blocks: int) -> list[int]:
    """A prompt of so many whole blocks and a token."""
    return [(11 * number + place) % 97 for place in range(blocks * PAGE)] + [96]


class Pool:
    """The cache, a scheduler that is asked for nothing, and the hot blocks; requests compute their prompt at once."""

    def __init__(self, blocks: int, margin: float = 0.0) -> None:
        self.cache = paged_cache(blocks)
        self.allocator, = self.cache.cache_allocators.values()
        self.scheduler = FIFOScheduler(self.cache, margin, 8)
        self.processor = SimpleNamespace(cache=self.cache, scheduler=self.scheduler)
        self.hot = HotPrefixes(lambda event: None)
        self.hot.reached(self.processor)
        self.states: dict[str, Any] = {}
        self._names = 0

    @property
    def cached(self) -> list[int]:
        """Blocks that are kept for reuse alone, in the engine's order."""
        return list(self.allocator.ledger.cached_blocks)

    @property
    def free(self) -> int:
        """Free blocks."""
        return int(self.cache.num_blocks - len(self.cached) - self.used)

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return len({block for table in self.allocator.block_table.values() for block in table})

    def counted_free(self) -> int:
        """Free blocks, as the pool counts them."""
        return int(self.cache.pool.num_free_sectors * self.allocator.blocks_per_sector
                   + self.cache.pool.count_free_blocks(self.allocator.index))

    def admit(self, prompt: list[int]) -> int | None:
        """Tokens of the prompt that were found; None where the rest has no room (the request is gone then)."""
        self._names += 1
        state = RequestState(f"r{self._names}", prompt)
        found = int(self.cache.search_prefix_match(state.request_id, prompt))
        self.hot.matched(self.cache, state.request_id, found)
        state.position_offset = found
        rest = len(prompt) - found
        if not self.cache.can_store_request_tokens(state, rest):
            self.cache.free_blocks(state.request_id)
            return None
        self.cache.mark_complete_blocks(state, self.cache.count_new_complete_blocks(state, rest))
        state.position_offset = len(prompt)
        self.states[state.request_id] = state
        return found

    def end(self, which: int = 0) -> None:
        """A request ends."""
        state = self.states.pop(list(self.states)[which % len(self.states)])
        self.cache.free_blocks(state.request_id)

    def sweep(self) -> bool:
        """The engine wants memory."""
        return bool(self.cache.evict_cached_blocks())

    def close(self) -> None:
        """The class is the engine's own again."""
        self.hot.close()
