"""A block pool with the semantics of vLLM's, written for tests: reference counts, hashes, one queue of free blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

from kvobs.sources.vllm._pool import PoolLedger


class Block:
    """A block; ``pool`` is its owner, as newer versions know it."""

    def __init__(self, number: int, pool: Pool | None = None) -> None:
        self.block_id, self.pool = number, pool
        self.ref_cnt = 0
        self.is_null = number == 0
        self.block_hash: bytes | None = None

    @property
    def next_free_block(self) -> Block | End:
        """The one behind it in the queue, whose end has a mark of its own."""
        assert self.pool is not None
        queue = self.pool.free_block_queue
        found = queue.blocks.index(self) + 1
        return queue.blocks[found] if found < len(queue.blocks) else END


class End:
    """What stands behind the last block."""

    next_free_block = None


END = End()


class Queue:
    """Blocks that nobody holds, the next one first."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks = deque(blocks)

    @property
    def num_free_blocks(self) -> int:
        """How many there are."""
        return len(self.blocks)

    @property
    def fake_free_list_head(self) -> SimpleNamespace:
        """What stands before the first block."""
        return SimpleNamespace(next_free_block=self.blocks[0] if self.blocks else END)

    def remove(self, block: Block) -> None:
        """Take it out."""
        self.blocks.remove(block)

    def append(self, block: Block) -> None:
        """Put it to the end."""
        self.blocks.append(block)

    def prepend_n(self, blocks: list[Block]) -> None:
        """Put them to the front, the first one foremost."""
        self.blocks.extendleft(reversed(blocks))


class Pool:
    """The pool, and its own counts of what it did."""

    def __init__(self, size: int) -> None:
        self.blocks = [Block(number, self) for number in range(size)]
        self.free_block_queue = Queue(self.blocks[1:])
        self.allocated = self.evicted = self.dropped = self.touched = 0

    def get_new_blocks(self, number: int) -> list[Block]:
        """Blocks from the front of the queue; their content is lost."""
        if number > self.free_block_queue.num_free_blocks:
            raise ValueError("too few")
        found = [self.free_block_queue.blocks.popleft() for _ in range(number)]
        for block in found:
            self.evicted += self._maybe_evict_cached_block(block)
            block.ref_cnt = 1
        self.allocated += number
        return found

    def _maybe_evict_cached_block(self, block: Block) -> bool:
        """The content of a block is lost, if it has one."""
        had, block.block_hash = block.block_hash is not None, None
        return had

    def touch(self, blocks: Sequence[Block]) -> None:
        """One more holds these."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.blocks.remove(block)
            block.ref_cnt += 1
            self.touched += not block.is_null

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        """One less holds these; blocks without content go to the front of the queue, in their order."""
        empty = []
        for block in blocks:
            if block.pool not in (None, self):
                block.pool.free_blocks([block])
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                (empty if block.block_hash is None else self.free_block_queue.blocks).append(block)
        self.free_block_queue.prepend_n(empty)

    def evict_blocks(self, blocks: Iterable[Block]) -> None:
        """Content is lost outside an allocation."""
        for block in blocks:
            self.dropped += self._maybe_evict_cached_block(block)

    def move_block_hashes(self, source: Block, target: Block) -> None:
        """Content moves to another block."""
        source.block_hash, target.block_hash = None, source.block_hash

    def reset_prefix_cache(self) -> bool:
        """All content is lost, unless somebody holds a block."""
        if self.free_block_queue.num_free_blocks != len(self.blocks) - 1:
            return False
        for block in self.blocks:
            self.dropped += block.block_hash is not None
            block.block_hash = None
        return True


class Watched(Pool):
    """The pool with a ledger that is told in the order in which the hooks tell it; ``seen`` False is a pause."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.ledger = PoolLedger(self, 0)
        self.seen = True

    def get_new_blocks(self, number: int) -> list[Block]:
        """Told before and after, also when it fails."""
        if not self.seen:
            return super().get_new_blocks(number)
        self.ledger.handing_out(number)
        found = None
        try:
            found = super().get_new_blocks(number)
            return found
        finally:
            self.ledger.handed_out(found)

    def _maybe_evict_cached_block(self, block: Block) -> bool:
        if not self.seen:
            return super()._maybe_evict_cached_block(block)
        before = self.ledger.forgetting(block)
        gone = super()._maybe_evict_cached_block(block)
        if gone:
            self.ledger.forgot(block, before)
        return gone

    def touch(self, blocks: Sequence[Block]) -> None:
        """Told before."""
        if self.seen:
            self.ledger.touching(blocks)
        super().touch(blocks)

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        """Told after."""
        kept = list(blocks)
        super().free_blocks(kept)
        if self.seen:
            self.ledger.freed(kept)

    def move_block_hashes(self, source: Block, target: Block) -> None:
        """Told after, with what was cached before."""
        before = sum(block.ref_cnt == 0 and block.block_hash is not None for block in (source, target))
        super().move_block_hashes(source, target)
        if self.seen:
            self.ledger.changed([source, target], before)

    def reset_prefix_cache(self) -> bool:
        """Told when it was done."""
        done = super().reset_prefix_cache()
        if done and self.seen:
            self.ledger.reset()
        return done
