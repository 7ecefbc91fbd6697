"""What every actuator promises, of vLLM's: on an engine at rest whose cache is full, and on one that is at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kvobs.model import ActionTaken
from kvobs.sources.vllm._actions import Actuators
from kvobs.testing.actuators import ActuatorContract, Rig
from tests.vllm_world import Request, Scheduler, hot_of


def state(scheduler: Scheduler) -> object:
    """What orders could change: limits, the pause, which blocks have content, and the order of the queue."""
    limits = {name: request.max_tokens for name, request in scheduler.requests.items()}
    content = [block.block_hash for block in scheduler.kv_cache_manager.block_pool.blocks]
    order = [block.block_id for block in scheduler.kv_cache_manager.block_pool.free_block_queue.blocks]
    return scheduler.max_num_active_reqs, scheduler.max_num_running_reqs, scheduler._pause_state, limits, content, order


@contextmanager
def working(*, busy: bool) -> Iterator[Rig]:
    """Eight requests of the reference run, half of them sheddable; with ``busy``, three of them run."""
    answers: list[Any] = []
    scheduler = Scheduler(24, 32)
    every = Actuators(answers.append)
    every.found(scheduler, hot_of(scheduler))
    for number in range(8):
        request = Request(str(number), 71, 100, priority="sheddable" if number % 2 else "normal")
        every.arriving(scheduler, request)
        scheduler.add([request])
    if busy:
        scheduler.max_num_active_reqs = 3
        scheduler.step(lambda _: None)
        scheduler.max_num_active_reqs = 8
    for block in list(scheduler.kv_cache_manager.block_pool.free_block_queue.blocks)[:5]:
        block.block_hash = b"content"

    def told() -> list[ActionTaken]:
        found = list(answers)
        answers.clear()
        return found

    yield Rig(next(iter(every)), lambda: every.at(scheduler), told, lambda: state(scheduler))
    every.close()
    assert scheduler.max_num_active_reqs == 8
    assert {request.max_tokens for request in scheduler.requests.values()} == {100}


class TestAtRest(ActuatorContract):
    """Nobody holds a block: the cache can be reset, and a pause would have nobody to wait for."""

    acts = ("protect_hot_blocks", "prefix_cache_reset", "kv_aware_admission", "clamp_tokens")

    def rig(self) -> AbstractContextManager[Rig]:
        return working(busy=False)


class TestAtWork(ActuatorContract):
    """Three run: admission can be paused, and the cache cannot be reset."""

    acts = ("protect_hot_blocks", "kv_aware_admission", "pause", "clamp_tokens")

    def rig(self) -> AbstractContextManager[Rig]:
        return working(busy=True)
