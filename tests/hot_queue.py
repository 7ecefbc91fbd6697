"""The queue of free blocks with the rule for hot ones, as plain lists: what vLLM's pool and kvobs are held against.

The least recently used block loses its content first. A block that was hit more than twice in the last 30 s goes to the
end instead, once until it is hit again; of more than half of the pool's blocks that did, the first gives way.
"""

from __future__ import annotations

SECOND = 10**9


class Listed:
    """A pool of ``size`` blocks, of which number 0 stands for none."""

    def __init__(self, size: int) -> None:
        self.size, self.now = size, 0
        self.queue = list(range(1, size))
        self.plain = list(range(1, size))  # the order in which they were given back, without the rule
        self.content: dict[int, str] = {}
        self.holders: dict[int, int] = {}
        self.hits: dict[int, list[int]] = {}
        self.waiting_longer: list[int] = []
        self.protects = False
        self.spared = self.found = 0

    def hot(self, block: int) -> bool:
        """Hit more than twice in the last 30 s."""
        return block in self.content and sum(self.now - at < 30 * SECOND for at in self.hits.get(block, [])) > 2

    def _take(self, block: int) -> int:
        self.queue.remove(block)
        self.plain.remove(block)
        if block in self.waiting_longer:
            self.waiting_longer.remove(block)
        return block

    def allocate(self, number: int) -> set[int] | None:
        """The blocks that a request gets, or None where there are not so many."""
        if number > len(self.queue):
            return None
        taken: set[int] = set()
        while len(taken) < number:
            first = self.queue[0]
            if self.protects and self.hot(first) and first not in self.waiting_longer:
                self.queue.append(self.queue.pop(0))
                self.waiting_longer.append(first)
                self.spared += 1
                if len(self.waiting_longer) > self.size // 2:
                    taken.add(self._take(self.waiting_longer[0]))
            else:
                taken.add(self._take(first))
        for block in taken:
            self.content.pop(block, None)
            self.hits.pop(block, None)
            self.holders[block] = 1
        return taken

    def fill(self, block: int, key: str) -> None:
        """A held block can be found from now on."""
        self.content[block] = key
        self.hits.pop(block, None)

    def hit(self, block: int) -> None:
        """One more request holds the block."""
        self.found += block in self.waiting_longer
        if not self.holders.get(block):
            self._take(block)
        self.holders[block] = self.holders.get(block, 0) + 1
        self.hits.setdefault(block, []).append(self.now)

    def free(self, blocks: list[int]) -> None:
        """A request gives its blocks back: those with content come to the end, others to the front."""
        empty = []
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                if block in self.content:
                    self.queue.append(block)
                    self.plain.append(block)
                else:
                    empty.append(block)
        self.queue, self.plain = empty + self.queue, empty + self.plain

    def stop(self) -> None:
        """No block is protected any more."""
        self.protects, self.waiting_longer, self.queue = False, [], list(self.plain)
