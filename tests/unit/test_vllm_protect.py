"""The action that protects hot blocks of a vLLM pool: when it is refused, what it leaves, what it keeps alive."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.sources._hot import Hits
from kvobs.sources.vllm._hot import HotBlocks
from kvobs.sources.vllm._protect import Protection
from tests.vllm_pool import Pool, Watched

SECOND = 10**9


class Scene:
    """A pool of eight cached blocks, the first three of which are hot and next in the queue."""

    def __init__(self, **changed: Any) -> None:
        self.pool = Watched(9)
        self.hot = self.pool.ledger.hot
        manager = SimpleNamespace(block_pool=self.pool, enable_caching=True)
        self.scheduler: Any = SimpleNamespace(kv_cache_manager=manager, connector=None)
        for name, value in changed.items():
            setattr(manager if hasattr(manager, name) else self.scheduler, name, value)
        self.protection = Protection(lambda: self.scheduler, self.hot, time.monotonic_ns)
        for block in self.pool.blocks[1:]:
            block.block_hash = bytes([block.block_id])
        for block in self.pool.blocks[1:4]:
            for _ in range(3):
                self.hot.touching([block], time.monotonic_ns())

    def queue(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.blocks]


def test_hits_are_those_of_the_same_content() -> None:
    """Three hits within 30 s make a block hot, until the first is 30 s old or the block holds something else."""
    hits = Hits()
    for at in (1, 2, 3):
        assert hits.heat_ns(7, b"a", at) is None
        hits.add(7, b"a", at)
    assert hits.heat_ns(7, b"a", 30 * SECOND) == 1
    assert hits.heat_ns(7, b"a", 30 * SECOND + 1) is None
    assert hits.heat_ns(7, b"b", 4) is hits.heat_ns(8, b"a", 4) is hits.heat_ns(7, None, 4) is None
    hits.add(7, b"b", 5)
    assert hits.heat_ns(7, b"b", 5) is hits.heat_ns(7, b"a", 5) is None


def test_there_are_no_more_hits_than_blocks() -> None:
    """However often and with whatever content blocks are hit, what is kept grows with their number alone."""
    hits = Hits()
    for number in range(10_000):
        hits.add(number % 8, number, number)
    assert len(hits._times) == 8


@pytest.mark.parametrize(("changed", "why"), [
    ({"enable_caching": False}, "Prefix caching is off, so there are no blocks to protect."),
    ({"connector": object()}, "A KV connector walks the queue of free blocks, whose order is left to it."),
    ({"block_pool": SimpleNamespace(free_block_queue=object())},
     "This version of vLLM keeps its free blocks in another way than kvobs knows.")])
def test_what_it_cannot_do_is_refused(changed: dict[str, Any], why: str) -> None:
    """Plan and order say the same, and nothing is protected."""
    scene = Scene(**changed)
    assert scene.protection.plan().reason == why
    result = scene.protection.begin(0)
    assert (result.done, result.reason) == (False, why)
    assert scene.protection.protected() == 0
    assert not scene.hot.active


def test_it_begins_and_ends_in_the_plain_order() -> None:
    """Hot blocks are told, go round once, and are back in front when it ends; the reason says how often that helped."""
    scene = Scene()
    assert scene.protection.begin(0).reason == "3 blocks are hot."
    assert scene.protection.begin(0).reason == ""
    assert scene.protection.protected() == 3
    assert [block.block_id for block in scene.pool.get_new_blocks(2)] == [4, 5]
    assert scene.queue() == [6, 7, 8, 1, 2, 3]
    scene.pool.touch([scene.pool.blocks[2]])
    result = scene.protection.end(0)
    assert scene.queue() == [1, 3, 6, 7, 8]
    assert result.reason == "Hot blocks were spared 3 times, and hit in 1 of their second rounds."
    assert [block.block_id for block in scene.pool.get_new_blocks(2)] == [1, 3]
    assert scene.protection.end(0).reason == ""


def test_another_thread_does_not_touch_the_queue() -> None:
    """Who closes it while the engine is at work ends the protection, and leaves the order to the engine."""
    scene = Scene()
    scene.protection.begin(0)
    scene.pool.get_new_blocks(1)
    before = scene.queue()
    thread = threading.Thread(target=scene.protection.end, args=(0,))
    thread.start()
    thread.join()
    assert scene.queue() == before
    assert not scene.hot.active
    scene.pool.get_new_blocks(len(before))
    assert scene.queue() == []


def test_a_pool_that_is_given_up_is_not_kept() -> None:
    """What is remembered of blocks in their second round keeps neither them nor their pool alive."""
    pool, hot = Pool(9), HotBlocks(9)
    for at in range(3):
        pool.blocks[1].block_hash = b"a"
        hot.touching([pool.blocks[1]], at)
    hot.begin()
    hot.handing_out(pool, 1, 5)
    assert hot.spared == 1
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None


def test_at_most_half_of_the_pool_is_in_a_second_round() -> None:
    """With all eight blocks of nine hot, four may go round again: the first two that did so give way."""
    scene = Scene()
    for block in scene.pool.blocks[4:]:
        for _ in range(3):
            scene.hot.touching([block], time.monotonic_ns())
    scene.protection.begin(0)
    assert {block.block_id for block in scene.pool.get_new_blocks(2)} == {1, 2}
    assert scene.queue() == [7, 8, 3, 4, 5, 6]
