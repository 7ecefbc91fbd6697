"""Hot blocks of a vLLM pool live twice as long: when one comes to the head of the queue, it goes round once more.

vLLM hands out the block at the head of its queue, and puts blocks that requests give back at the end: the least
recently used one loses its content first. Before blocks are taken, hot ones (``kvobs.sources._hot``) among them go to
the end instead, each once per life; its life ends, and a new one begins, when it is hit. Nothing leaves the queue, and
its length stays, so no allocation fails that would not fail otherwise. Blocks of one prefix come to the head with the
last one first, and keep that order. Where more than half of the pool would be in a second round, the one that has been
in it for the longest time gives way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvobs.sources._hot import SHARE, Hits

QUEUE = ("fake_free_list_head", "num_free_blocks", "remove", "append", "prepend_n")


class HotBlocks:
    """The hits of one pool's blocks and, while ``active``, the second round of the hot ones. ``size`` is the pool's.

    All of it runs on the engine's thread.
    """

    def __init__(self, size: int) -> None:
        self._most = size // SHARE
        self._hits = Hits()
        # Numbers of blocks in their second round, which began first for the first. Blocks would keep their pool alive.
        self._second: dict[int, None] = {}
        self.active = False
        self.spared = self.found = 0  # second rounds since it was active, and those in which the block was hit

    # -- what the pool does ----------------------------------------------------------------------------

    def touching(self, blocks: Iterable[Any], now_ns: int) -> None:
        """Requests are about to hold these blocks, which they found by their content."""
        for block in blocks:
            if block.is_null or block.block_hash is None:
                continue
            self._hits.add(block.block_id, block.block_hash, now_ns)
            if block.block_id in self._second:
                del self._second[block.block_id]
                self.found += 1

    def handing_out(self, pool: Any, number: int, now_ns: int) -> None:
        """So many blocks are about to be taken from the head: hot ones among them go to the end."""
        queue = pool.free_block_queue
        if not self.active or number > queue.num_free_blocks:
            return
        passed = 0  # those that will be taken
        block = queue.fake_free_list_head.next_free_block
        while passed < number and block.next_free_block is not None:  # the fake block at the end has none
            following = block.next_free_block
            if block.block_id in self._second:
                del self._second[block.block_id]
                passed += 1
            elif not self.is_hot(block, now_ns):
                passed += 1
            else:
                queue.remove(block)
                queue.append(block)
                self._second[block.block_id] = None
                self.spared += 1
                if following.next_free_block is None:
                    following = block  # it was the last one already
                if len(self._second) > self._most:
                    given = pool.blocks[next(iter(self._second))]
                    del self._second[given.block_id]
                    if given is following:
                        following = given.next_free_block
                    queue.remove(given)
                    queue.prepend_n([given])
                    passed += 1
            block = following

    def forget(self) -> None:
        """Nothing was seen for a while: who is in a second round is not known, and counts as if it were not."""
        self._second.clear()

    # -- what is asked ---------------------------------------------------------------------------------

    def is_hot(self, block: Any, now_ns: int) -> bool:
        """Whether the block was hit more often than ``COLD_HITS`` times of late."""
        return self._hits.heat_ns(block.block_id, block.block_hash, now_ns) is not None

    def hot(self, blocks: Iterable[Any], now_ns: int) -> int:
        """How many of these nobody holds and are hot."""
        return sum(block.ref_cnt == 0 and self.is_hot(block, now_ns) for block in blocks)

    # -- the beginning and the end ---------------------------------------------------------------------

    def begin(self) -> None:
        """From now on hot blocks go round twice."""
        self.active, self.spared, self.found = True, 0, 0

    def end(self, pool: Any) -> None:
        """From now on none does; those in a second round go back to where the least recently used order has them.

        That is ahead of everything but the blocks without content, which vLLM has put to the head meanwhile. (One that
        lost its content in the queue, and has come to the head, is taken for such a block.)
        """
        self.active = False
        queue, blocks = pool.free_block_queue, [pool.blocks[number] for number in self._second]
        self._second.clear()
        if not blocks:
            return
        for block in blocks:
            queue.remove(block)
        empty: list[Any] = []
        block = queue.fake_free_list_head.next_free_block
        while block.next_free_block is not None and block.block_hash is None:
            empty.append(block)
            block = block.next_free_block
        for block in empty:
            queue.remove(block)
        queue.prepend_n(empty + blocks)
