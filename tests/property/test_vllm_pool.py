"""The ledger of a vLLM pool against a full recount after every call of random programs."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.vllm_pool import Block, Watched

SIZE = 9


class Programs(RuleBasedStateMachine):
    """Requests hold tables of blocks, some of them shared; content gets hashes, is found again, moves and is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Watched(SIZE)
        self.tables: list[list[Block]] = []
        self.keys = 0
        self.gone: set[bytes] = set()
        self.born: set[int] = set()  # blocks that were handed out, and given back, before our eyes
        self.left: set[int] = set()
        self.ages = self.idles = 0
        self.unseen = {"allocated": 0, "evicted": 0, "dropped": 0, "touched": 0}

    @rule(number=st.integers(1, 5))
    def take(self, number: int) -> None:
        """A request takes blocks, or is refused."""
        hashed = {block.block_id: block.block_hash for block in self.pool.blocks if block.block_hash is not None}
        try:
            table = self.pool.get_new_blocks(number)
        except ValueError:
            assert number > self.pool.free_block_queue.num_free_blocks
            return
        self.tables.append(table)
        if self.pool.seen:
            evicted = {block.block_id for block in table if block.block_id in hashed}
            self.gone |= {hashed[number] for number in evicted}
            self.ages += len(evicted & self.born)
            self.idles += len(evicted & self.left)
            self.born |= {block.block_id for block in table}

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 9), number=st.integers(0, 9))
    def fill(self, which: int, number: int) -> None:
        """A block is full: it can be found by its hash."""
        table = self.tables[which % len(self.tables)]
        block = table[number % len(table)]
        if block.block_hash is None and not block.is_null:
            self.keys += 1
            block.block_hash = self.keys.to_bytes(4, "big")

    @rule(numbers=st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=4), null=st.booleans())
    def hit(self, numbers: list[int], null: bool) -> None:
        """A request finds blocks by their hashes; the null block may stand for skipped ones."""
        found = [block for block in map(self.pool.blocks.__getitem__, dict.fromkeys(numbers))
                 if block.block_hash is not None or (null and block.is_null)]
        self.pool.touch(found)
        if found:
            self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 9), once=st.booleans())
    def free(self, which: int, once: bool) -> None:
        """A request gives its blocks back, in one call or block by block."""
        table = self.tables.pop(which % len(self.tables))
        for blocks in [table[::-1]] if once else [[block] for block in table]:
            self._give_back(blocks)

    @precondition(lambda self: len(self.tables) > 1)
    @rule()
    def free_all_at_once(self) -> None:
        """One call gives back the blocks of two requests, a shared one twice."""
        self._give_back(self.tables.pop() + self.tables.pop())

    def _give_back(self, blocks: list[Block]) -> None:
        self.pool.free_blocks(iter(blocks))
        if self.pool.seen:
            self.left |= {block.block_id for block in blocks}

    @rule(numbers=st.sets(st.integers(0, SIZE - 1), max_size=3))
    def lose(self, numbers: set[int]) -> None:
        """Content is dropped, of held blocks too."""
        self.pool.evict_blocks([self.pool.blocks[number] for number in numbers])

    @rule(source=st.integers(1, SIZE - 1), empty=st.integers(1, SIZE - 1))
    def move(self, source: int, empty: int) -> None:
        """Content moves into an empty block."""
        if source != empty and self.pool.blocks[empty].block_hash is None:
            self.pool.move_block_hashes(self.pool.blocks[source], self.pool.blocks[empty])

    @rule()
    def reset(self) -> None:
        """The prefix cache is emptied."""
        if self.pool.reset_prefix_cache() and self.pool.seen:
            self.gone.clear()

    @rule()
    def pause_or_go_on(self) -> None:
        """Kvobs looks away, or looks again; what happened meanwhile is not in its counts."""
        pool = self.pool
        sign = 1 if pool.seen else -1
        for name in self.unseen:
            self.unseen[name] += sign * getattr(pool, name)
        pool.seen = not pool.seen
        if pool.seen:
            pool.ledger.resume(1)
            self.born, self.left = set(), set()

    @invariant()
    def counted(self) -> None:
        """Cached and free blocks are those of a recount, the sums are the pool's own, evicted hashes are known."""
        pool, ledger = self.pool, self.pool.ledger
        if not pool.seen:
            return
        idle = [block for block in pool.blocks if block.ref_cnt == 0 and not block.is_null]
        assert ledger.cached == sum(block.block_hash is not None for block in idle)
        assert ledger.free == sum(block.block_hash is None for block in idle)
        told = {"allocated": ledger.allocations, "evicted": ledger.evictions, "dropped": ledger.dropped,
                "touched": ledger.touches}
        assert told == {name: getattr(pool, name) + self.unseen[name] for name in told}
        assert set(ledger.evicted_hashes) == self.gone
        times = ledger.times
        assert (sum(times.ages.counts), sum(times.idles.counts)) == (self.ages, self.idles)


Programs.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


class TestPrograms(Programs.TestCase):  # type: ignore[misc,name-defined]
    """After every call of a random program the ledger equals a recount."""
