"""The protection of hot blocks against the same rule on plain lists, over programs of allocations, hits and ends."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvobs.sources.vllm._hot import HotBlocks
from tests.hot_queue import SECOND, Listed
from tests.vllm_pool import Pool

MOST = 13


class Programs(RuleBasedStateMachine):
    """A pool with vLLM's semantics under ``HotBlocks``, and the lists."""

    @initialize(size=st.integers(2, MOST))
    def begin(self, size: int) -> None:
        """A pool of some size."""
        self.pool, self.model = Pool(size), Listed(size)
        self.hot = HotBlocks(size)
        self.tables: list[list[int]] = []
        self.keys = 0

    @rule(number=st.integers(1, 6))
    def take(self, number: int) -> None:
        """A request takes blocks: the same ones, or is refused just where there are too few."""
        wanted = self.model.allocate(number)
        self.hot.handing_out(self.pool, number, self.model.now)
        try:
            taken = self.pool.get_new_blocks(number)
        except ValueError:
            assert wanted is None
            return
        assert {block.block_id for block in taken} == wanted
        self.tables.append([block.block_id for block in taken])

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 9), filled=st.integers(1, 6))
    def fill(self, which: int, filled: int) -> None:
        """The first blocks of a request are full."""
        for number in self.tables[which % len(self.tables)][:filled]:
            if self.pool.blocks[number].block_hash is None:
                self.keys += 1
                self.pool.blocks[number].block_hash = self.keys.to_bytes(4, "big")
                self.model.fill(number, str(self.keys))

    @rule(numbers=st.sets(st.integers(1, MOST - 1), min_size=1, max_size=4), times=st.integers(1, 4))
    def hit(self, numbers: set[int], times: int) -> None:
        """Requests, one after another, find blocks by their content; all but the first end at once."""
        found = [number for number in sorted(numbers) if number in self.model.content]
        for _ in range(times if found else 0):
            blocks = [self.pool.blocks[number] for number in found]
            self.hot.touching(blocks, self.model.now)
            self.pool.touch(blocks)
            for number in found:
                self.model.hit(number)
            self.tables.append(found)
            if _ < times - 1:
                self.end(-1)

    @rule(number=st.integers(1, 8))
    def warm(self, number: int) -> None:
        """A prompt that was just computed, and has ended, is asked for three times more: its blocks are hot."""
        before = len(self.tables)
        self.take(number)
        if len(self.tables) > before:
            self.fill(before, number)
            table = set(self.tables[before])
            self.end(before)
            self.hit(table, 3)
            self.end(-1)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        """A request ends."""
        table = self.tables.pop(which % len(self.tables))[::-1]
        self.pool.free_blocks([self.pool.blocks[number] for number in table])
        self.model.free(table)

    @rule(seconds=st.sampled_from([1, 14, 30]))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.model.now += seconds * SECOND

    @precondition(lambda self: not self.hot.active)
    @rule()
    def protect(self) -> None:
        """Hot blocks are protected from now on."""
        self.hot.begin()
        self.model.protects, self.model.spared, self.model.found = True, 0, 0

    @precondition(lambda self: self.hot.active)
    @rule()
    def stop(self) -> None:
        """They are not any more: the queue is in the plain order of what was given back."""
        self.hot.end(self.pool)
        self.model.stop()

    @invariant()
    def same(self) -> None:
        """Queue and counts are the lists'; each block is held or in the queue, once."""
        queue = [block.block_id for block in self.pool.free_block_queue.blocks]
        assert queue == self.model.queue
        assert (self.hot.spared, self.hot.found) == (self.model.spared, self.model.found)
        held = [block.block_id for block in self.pool.blocks if block.ref_cnt]
        assert sorted(queue + held) == list(range(1, self.model.size))
        for block in self.pool.blocks:
            assert self.hot.is_hot(block, self.model.now) == self.model.hot(block.block_id)


Programs.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


class TestPrograms(Programs.TestCase):  # type: ignore[misc,name-defined]
    """After every call of a random program the queue equals the lists."""
