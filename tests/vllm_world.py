"""A scheduler with the parts of vLLM's that orders touch, written for tests: it admits, grows and ends requests.

It has no preemption: a request that gets no block is counted and tries again in the next step.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from kvobs.sources.vllm._hot import HotBlocks
from tests.vllm_pool import Block, Watched


class State(enum.IntEnum):
    """As vLLM's ``PauseState``."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


def hot_of(scheduler: Any) -> HotBlocks:
    """The hot blocks of a scheduler's pool; of one that has no pool, some that nobody knows."""
    return scheduler.kv_cache_manager.block_pool.ledger.hot if hasattr(scheduler, "kv_cache_manager") else HotBlocks(1)


class FullAttentionSpec:
    """What a group of layers keeps: all tokens."""

    page_size_bytes = 1024


class Request:
    """A request with a prompt, which generates as many tokens as it may."""

    def __init__(self, name: str, prompt: int, tokens: int, *, priority: str = "", least: int = 0) -> None:
        self.request_id, self.num_prompt_tokens, self.max_tokens = name, prompt, tokens
        self.trace_headers = {"kvobs-priority": priority} if priority else None
        self.sampling_params = SimpleNamespace(min_tokens=least, stop=None)
        self.status = SimpleNamespace(name="WAITING")
        self.num_output_tokens = self.num_computed_tokens = 0
        self.resumable = False

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return self.num_prompt_tokens + self.num_output_tokens

    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status.name.startswith("FINISHED")


class Scheduler:
    """One group of layers; ``size`` blocks, of which the first is the null block."""

    def __init__(self, size: int, block_size: int, slots: int = 8, longest: int = 4096) -> None:
        pool = Watched(size)
        self.table: dict[str, list[Block]] = {}
        self.manager = SimpleNamespace(block_size=block_size, kv_cache_spec=FullAttentionSpec(),
                                       req_to_blocks=self.table)
        self.kv_cache_manager = SimpleNamespace(
            block_pool=pool, enable_caching=True, coordinator=SimpleNamespace(single_type_managers=(self.manager,)))
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["one", "two"])])
        self.vllm_config: Any = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
        self.max_num_active_reqs = self.max_num_running_reqs = slots
        self.max_model_len = longest
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.requests: dict[str, Request] = {}
        self._pause_state = State.UNPAUSED
        self.failures = self.most = 0

    def set_pause_state(self, state: State) -> None:
        """As vLLM's own."""
        self._pause_state = state

    def reset_prefix_cache(self) -> bool:
        """As vLLM's own."""
        return self.kv_cache_manager.block_pool.reset_prefix_cache()

    def add(self, requests: Sequence[Request]) -> None:
        """They wait."""
        self.waiting.extend(requests)
        self.requests |= {request.request_id: request for request in requests}

    def _grow(self, request: Request, tokens: int) -> bool:
        held = self.table.setdefault(request.request_id, [])
        wanted = -(-tokens // self.manager.block_size) - len(held)
        if wanted > self.kv_cache_manager.block_pool.free_block_queue.num_free_blocks:
            return False
        held += self.kv_cache_manager.block_pool.get_new_blocks(max(0, wanted))
        return True

    def step(self, ended: Callable[[Request], None]) -> None:
        """Every request that runs computes its newest token and generates the next one."""
        for request in self.running:
            self.failures += not self._grow(request, request.num_tokens)
        while self.waiting and len(self.running) < self.max_num_active_reqs and self._pause_state == State.UNPAUSED:
            if not self._grow(self.waiting[0], self.waiting[0].num_tokens):
                break
            self.running.append(self.waiting.popleft())
        self.most = max(self.most, len(self.running))
        for request in list(self.running):
            request.num_output_tokens += 1
            if request.num_output_tokens >= request.max_tokens:
                request.status.name = "FINISHED_LENGTH_CAPPED"
                self.running.remove(request)
                del self.requests[request.request_id]
                self.kv_cache_manager.block_pool.free_blocks(reversed(self.table.pop(request.request_id)))
                ended(request)
