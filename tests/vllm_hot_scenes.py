"""Scenes of hot blocks on vLLM's real block pool and its real engine; writes what was seen as JSON.

Runs in the Python that has vLLM.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.core.block_pool import BlockPool

import kvobs
from kvobs.sources import _hot
from kvobs.sources.vllm._hot import HotBlocks
from tests.hot_queue import SECOND, Listed
from tests.vllm_account import _findable
from tests.vllm_action_scenes import Hands
from tests.vllm_scenes import observe
from tests.vllm_stage import Steps, attributes, engine, events, greedy, prompt, tiny, watch_everything

PROGRAMS, CALLS = 200, 80
ROUNDS = 3


class Played:
    """A real pool under ``HotBlocks``, and the same rule on plain lists, through one random program."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        size = self.chance.randint(3, 20)
        self.pool, self.model, self.hot = BlockPool(size, True, 32), Listed(size), HotBlocks(size)
        self.tables: list[list[int]] = []
        self.keys = 0

    def take(self) -> None:
        number = self.chance.randint(1, 6)
        wanted = self.model.allocate(number)
        self.hot.handing_out(self.pool, number, self.model.now)
        try:
            taken = [block.block_id for block in self.pool.get_new_blocks(number)]
        except ValueError:
            assert wanted is None
            return
        assert set(taken) == wanted
        self.tables.append(taken)
        for block in taken[:self.chance.randint(0, number)]:
            self.keys += 1
            self.model.fill(block, str(self.keys))
            self.pool._insert_block_hash(str(self.keys).encode(), self.pool.blocks[block], num_tokens=32)

    def hit(self) -> None:
        filled = sorted(self.model.content)
        found = self.chance.sample(filled, min(len(filled), self.chance.randint(1, 4)))
        for number in range(self.chance.randint(1, 4)):
            if number:
                self.end(-1)
            blocks = [self.pool.blocks[block] for block in found]
            self.hot.touching(blocks, self.model.now)
            self.pool.touch(blocks)
            for block in found:
                self.model.hit(block)
            self.tables.append(found)

    def end(self, which: int | None = None) -> None:
        if self.tables:
            table = self.tables.pop(self.chance.randrange(len(self.tables)) if which is None else which)[::-1]
            self.pool.free_blocks([self.pool.blocks[block] for block in table])
            self.model.free(table)

    def turn(self) -> None:
        if self.hot.active:
            self.hot.end(self.pool)
            self.model.stop()
        else:
            self.hot.begin()
            self.model.protects, self.model.spared, self.model.found = True, 0, 0

    def play(self) -> int:
        """All calls; the queue is compared after each. Returns how many blocks were spared."""
        spared = 0
        for _ in range(CALLS):
            self.chance.choices([self.take, self.hit, self.end, self.turn], [4, 3, 4, 1])[0]()
            self.model.now += self.chance.choice([0, 1, 9]) * SECOND
            queue = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
            assert queue == self.model.queue
            assert len(queue) == self.pool.get_num_free_blocks()
            assert (self.hot.spared, self.hot.found) == (self.model.spared, self.model.found)
            spared = max(spared, self.hot.spared)
        return spared


def programs() -> dict[str, Any]:
    """Random programs on the real pool."""
    spared = [Played(seed).play() for seed in range(PROGRAMS)]
    return {"programs": PROGRAMS, "spared": sum(spared), "with": sum(number > 0 for number in spared)}


def workload(*, protect: bool) -> dict[str, Any]:
    """A prefix of four blocks that is asked for often, between scans that are longer than the pool has blocks."""
    handle = observe()
    llm = engine(tiny())
    steps, hands = Steps(llm), Hands(handle)
    plan, pool = steps.core.scheduler, steps.core.scheduler.kv_cache_manager.block_pool
    found: dict[str, Any] = {"tokens": [], "hits": [], "left": [], "conserved": True}

    def ask(length: int, seed: int, shared: int = 0) -> int:
        out, = llm.generate([prompt(length, seed, shared)], greedy(4), use_tqdm=False)
        found["tokens"].append(list(out.outputs[0].token_ids))
        return int(out.num_cached_tokens or 0)

    if protect:
        hands.order("protect_hot_blocks")
        plan.has_requests()
    found["before"] = [ask(150, seed, 128) for seed in range(4)]
    for number in range(ROUNDS):
        for scan in range(5):
            ask(200, 100 + 10 * number + scan)
            queue = pool.free_block_queue
            found["conserved"] &= len(queue.get_all_free_blocks()) == queue.num_free_blocks == len(pool.blocks) - 1
        found["hits"].append(ask(150, 50 + number, 128))
    hands.order("prefix_cache_reset")
    plan.has_requests()
    reset, = [one for one in hands.answers() if one["kind"] == "prefix_cache_reset"]
    found |= {"reset": reset, "cached": len(_findable(pool)),
              "planned": hands.actuator.plan("protect_hot_blocks").reason}
    for _ in range(2):
        hands.order("protect_hot_blocks")
        plan.has_requests()
    hands.order("protect_hot_blocks", undo=True)
    plan.has_requests()
    found["answers"] = hands.answers()
    found["blocks"] = [one["used"] + one["cached"] + one["free"] for one in events(0, "Blocks")]
    return found


def engines() -> dict[str, Any]:
    """The same workload without and with protection, and what is left of kvobs in vLLM's classes.

    Hits count for as long as it takes: on a busy machine the workload lasts for longer than 30 s.
    """
    _hot.WINDOW_NS = 10**15
    before = attributes()
    found: dict[str, Any] = {}
    for name, protect in (("plain", False), ("protected", True)):
        found[name] = workload(protect=protect)
        kvobs.uninstrument()
    after = attributes()
    found["left"] = [".".join(key) for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    uncached = engine(tiny(), enable_prefix_caching=False)
    handle = observe()
    uncached.generate([prompt(40, 1)], greedy(2), use_tqdm=False)
    hands = Hands(handle)
    found["uncached"] = hands.actuator.plan("protect_hot_blocks").reason
    return found


def main(target: str) -> None:
    """Play the scenes, and write what was seen to ``target``."""
    watch_everything()
    found: dict[str, Any] = {"version": vllm.__version__}
    for name, scene in {"programs": programs, "engines": engines}.items():
        try:
            found[name] = scene()
        except Exception:
            found[name] = {"raised": traceback.format_exc()}
        kvobs.uninstrument()
    Path(target).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
