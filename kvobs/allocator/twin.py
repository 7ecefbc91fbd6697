"""A twin of PyTorch's CUDA caching allocator in plain Python: the readable reference.

Every rule is that of ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.0 to 2.13). Which GPU work is done is not
modelled but told: ``advance`` says that a stream has caught up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from kvobs.allocator._forced import Forced
from kvobs.allocator.blocks import Block, Pool
from kvobs.allocator.device import Device, SimulatedDevice
from kvobs.allocator.program import Stats
from kvobs.allocator.settings import MIN_BLOCK, SMALL_SIZE, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, Segment, State
from kvobs.allocator.state import Block as BlockState


class OutOfMemory(Exception):
    """The device gave nothing, even after everything that could be released was."""


class Allocator(Forced):
    """One device's caching allocator. Sizes in bytes, addresses and streams as integers, pool 0 is the default pool."""

    def __init__(self, settings: Settings | None = None, device: Device | None = None) -> None:
        self.settings = settings or Settings()
        self.device: Device = device if device is not None else SimulatedDevice()
        self._pools: dict[int, tuple[Pool, Pool]] = {0: (Pool(0, True), Pool(0, False))}
        self._released: dict[int, None] = {}  # private pools that no graph uses any more, in order
        self._plain: set[int] = set()  # private pools with an allocator of their own, which knows no pages
        self._active: dict[int, Block] = {}
        self._queued: dict[int, deque[Block]] = {}  # per stream: blocks that wait for it
        self._done: dict[int, int] = {}  # per stream: how many of those it has passed
        self.reserved = self.allocated = self.pending = self._requested = 0
        self._peak_reserved = self._peak_allocated = self._peak_active = 0
        self._device_allocs = self._device_frees = self._retries = self._ooms = self._syncs = 0

    # --- what a program does

    def alloc(self, size: int, stream: int = 0, pool: int = 0) -> int:
        """Serve a request; returns its address.

        Raises:
            OutOfMemory: nothing could serve it.
        """
        if self._done and pool == 0:  # into a private pool means during a capture, when events must not be asked
            self._process_events()
        rounded = self.settings.round_size(size)
        home = self._pool(pool, rounded)
        block = self._find(home, rounded, stream)
        if block is not None:
            home.remove(block)
        else:
            self._collect_garbage()
            block = (self._from_device(home, rounded, stream)
                     or (self._release_available(home, rounded, stream) and self._from_device(home, rounded, stream))
                     or (pool == 0 and self._release_cached() and self._retry(home, rounded, stream)) or None)
        if block is None:
            self._ooms += 1
            raise OutOfMemory(f"{size} bytes on stream {stream}")
        return self._hand_out(block, size, rounded)

    def free(self, address: int) -> None:
        """Give a block back: at once, or when the streams that use it have caught up."""
        block = self._take_back(address)
        if block.uses:
            for stream in sorted(block.uses):
                block.events += 1
                self._queued.setdefault(stream, deque()).append(block)
            block.uses = None
            self.pending += block.size
        else:
            self._free_block(block)

    def record_stream(self, address: int, stream: int) -> None:
        """Say that another stream uses a block too."""
        block = self._active[address]
        if not block.allocated:
            raise KeyError(address)
        if stream != block.stream:
            block.uses = (block.uses or set()) | {stream}

    def advance(self, stream: int) -> None:
        """Say that the device has done everything queued on a stream; blocks become free at the next request."""
        if self._queued.get(stream):
            self._done[stream] = len(self._queued[stream])

    def empty_cache(self) -> None:
        """Return every segment to the device that holds nothing."""
        self._release_cached()

    def release_pool(self, pool: int) -> None:
        """Say that no graph uses a private pool any more: its segments may be returned."""
        if pool in self._pools and pool != 0:
            self._released[pool] = None

    def set(self, settings: Settings) -> None:
        """Change the settings; what is allocated stays where it is."""
        self.settings = settings

    def defer(self, address: int) -> None:
        """Give a block back that something still uses; ``complete`` will say when it is free."""
        block = self._take_back(address)
        block.uses = None
        block.events += 1
        self.pending += block.size

    def complete(self, address: int) -> None:
        """Say that a deferred block is free."""
        block = self._active[address]
        if block.allocated:
            raise KeyError(address)
        block.events = 0
        self.pending -= block.size
        self._free_block(block)

    def stats(self) -> Stats:
        """Totals now."""
        return Stats(
            reserved=self.reserved, allocated=self.allocated, active=self.allocated + self.pending,
            requested=self._requested, peak_reserved=self._peak_reserved, peak_allocated=self._peak_allocated,
            peak_active=self._peak_active, device_allocs=self._device_allocs, device_frees=self._device_frees,
            retries=self._retries, ooms=self._ooms, syncs=self._syncs)

    def snapshot(self) -> State:
        """Segments and blocks now, as ``torch.cuda.memory_snapshot`` tells them."""
        heads = [block for block in self._all() if block.prev is None or not block.prev.mapped]
        return tuple(_segment(head) for head in sorted(heads, key=lambda block: block.address))

    # --- where a request goes

    def _pool(self, pool: int, rounded: int) -> Pool:
        pair = self._pools.get(pool)
        if pair is None:
            pair = self._pools[pool] = (Pool(pool, True), Pool(pool, False))
        if self._released:
            self._released.pop(pool, None)
        return pair[0 if rounded <= SMALL_SIZE else 1]

    def _find(self, pool: Pool, rounded: int, stream: int) -> Block | None:
        """The best fit: the smallest free block that is large enough, of equal ones that at the lowest address."""
        settings = self.settings
        if settings.memory_fraction is not None and settings.garbage_collection_threshold > 0:
            pool.lookups += 1
        free = pool.free
        index = bisect_left(free, (stream, rounded))
        if index == len(free) or free[index][0] != stream:
            return None
        block = pool.at(index)
        if block.range is not None:
            if self._expands(pool):
                while (block.range is not None and index + 1 < len(free) and free[index + 1][0] == stream
                       and pool.at(index + 1).growth < block.growth):
                    index += 1
                    block = pool.at(index)
            else:
                index += 1
                while index < len(free) and free[index][0] == stream and pool.at(index).range is not None:
                    index += 1
                if index == len(free) or free[index][0] != stream:
                    return None
                block = pool.at(index)
        limit = settings.max_split_size
        if limit is not None:
            if rounded < limit <= block.size:
                return None
            if rounded >= limit and block.size >= rounded + settings.max_non_split_rounding:
                return None
        return block

    def _expands(self, pool: Pool) -> bool:
        return self.settings.expandable_segments and pool.identity not in self._plain

    def _hand_out(self, block: Block, size: int, rounded: int) -> int:
        if self._splits(block, rounded):
            block = self._cut(block, rounded)
        block.allocated = True
        block.requested = size
        self._active[block.address] = block
        self.allocated += block.size
        self._requested += size
        if self.allocated > self._peak_allocated:
            self._peak_allocated = self.allocated
        if self.allocated + self.pending > self._peak_active:
            self._peak_active = self.allocated + self.pending
        return block.address

    def _splits(self, block: Block, rounded: int) -> bool:
        remaining = block.size - rounded
        if block.pool.small or self._expands(block.pool):
            return remaining >= MIN_BLOCK
        limit = self.settings.max_split_size
        return (limit is None or rounded < limit) and remaining > SMALL_SIZE

    def _cut(self, block: Block, size: int) -> Block:
        """Cut the first ``size`` bytes off a block; the rest goes to the free list."""
        first = Block(block.pool, block.stream, block.address, size, block.range)
        first.insert_before(block)
        block.address += size
        block.size -= size
        block.pool.add(block)
        return first

    # --- where a block goes back to

    def _take_back(self, address: int) -> Block:
        block = self._active[address]
        if not block.allocated:
            raise KeyError(address)
        block.allocated = False
        self.allocated -= block.size
        return block

    def _free_block(self, block: Block) -> None:
        del self._active[block.address]
        self._requested -= block.requested
        before, after = block.prev, block.next
        if before is not None and not before.allocated:
            self._merge(block, before)
        if after is not None and not after.allocated:
            self._merge(block, after)
        block.pool.add(block)

    def _merge(self, block: Block, other: Block | None) -> None:
        """Take in a neighbour that is free and of the same kind."""
        if other is None or other.busy or other.mapped != block.mapped:
            return
        if other.mapped:
            other.pool.remove(other)
        else:
            other.pool.remove_unmapped(other)
        if other is block.prev:
            block.address = other.address
            block.prev = other.prev
            if other.prev is not None:
                other.prev.next = block
        else:
            block.next = other.next
            if other.next is not None:
                other.next.prev = block
        block.size += other.size

    def _process_events(self) -> None:
        """Free the blocks whose streams have caught up."""
        for stream, passed in list(self._done.items()):
            queue = self._queued[stream]
            for _ in range(passed):
                self._pass(queue.popleft())
        self._done.clear()

    def _synchronize(self) -> None:
        """Wait for every stream, and free what waited."""
        self._syncs += 1
        for queue in self._queued.values():
            while queue:
                self._pass(queue.popleft())
        self._done.clear()

    def _pass(self, block: Block) -> None:
        block.events -= 1
        if block.events == 0:
            self.pending -= block.size
            self._free_block(block)

    # --- the device

    @property
    def allowed(self) -> int | None:
        """The bytes this process may reserve; None where no memory fraction is set or the device is without limit."""
        fraction, capacity = self.settings.memory_fraction, self.device.capacity
        return None if fraction is None or capacity is None else int(fraction * capacity)

    def _from_device(self, pool: Pool, rounded: int, stream: int) -> Block | None:
        size = self.settings.segment_size(rounded)
        if self.allowed is not None and self.reserved + size > self.allowed:
            return None
        if self._expands(pool):
            return self._expand(pool, rounded, stream)
        address = self.device.malloc(size)
        if address is None:
            return None
        self._grew(size)
        return Block(pool, stream, address, size)

    def _retry(self, pool: Pool, rounded: int, stream: int) -> Block | None:
        self._retries += 1
        return self._from_device(pool, rounded, stream)

    def _release_available(self, pool: Pool, rounded: int, stream: int) -> bool:
        """Return oversize blocks, just enough for the request (only with a max_split_size)."""
        limit = self.settings.max_split_size
        if limit is None:
            return False
        wanted = max(limit, rounded)
        index = bisect_left(pool.free, (stream, wanted))
        if index < len(pool.free) and pool.free[index][0] == stream and _whole(pool.at(index)):
            self._release(pool.at(index))
            return True
        released = 0
        while index > 0 and released < wanted:
            index -= 1
            if pool.free[index][0] != stream or pool.free[index][1] < limit:
                break
            block = pool.at(index)
            if _whole(block):
                released += block.size
                self._release(block)
        return released >= wanted

    def _release_cached(self) -> bool:
        """Wait for every stream, then return all that is wholly free."""
        self._synchronize()
        small, large = self._pools[0]
        freeable = [pool for identity in self._released for pool in self._pools[identity]]
        for pool in (large, small, *freeable):
            self._release_unsplit(pool)
        return True

    def _release_unsplit(self, pool: Pool) -> None:
        blocks = [pool.by_address[address] for _, _, address in pool.free]
        for block in blocks:
            if block.range is None and not block.split:
                self._release(block)
        for block in blocks:
            if block.range is not None:
                self._unmap_block(block)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.device.free(block.address, block.size)
        self._shrank(block.size)

    def _collect_garbage(self) -> None:
        """Return free segments older than the average, before the device is asked (only with a memory fraction)."""
        threshold, allowed = self.settings.garbage_collection_threshold, self.allowed
        if threshold <= 0 or allowed is None or self.reserved <= int(threshold * allowed):
            return
        target = int(threshold * allowed)
        while self.reserved > target and self.collect():
            pass

    def collect(self) -> bool:
        """Return the large free segments that are at least as old as their average; False: there are none."""
        pool = self._pools[0][1]
        # An expandable segment's block has a neighbour, unless all of its addresses are mapped and free.
        candidates = [block for block in (pool.by_address[address] for _, _, address in pool.free)
                      if not block.split and block.range is None]
        total_age = sum(pool.lookups - block.born for block in candidates)
        for block in candidates:
            if pool.lookups - block.born >= total_age / len(candidates):
                self._release(block)
        return bool(candidates)

    def _grew(self, size: int) -> None:
        self._device_allocs += 1
        self.reserved += size
        self._peak_reserved = max(self._peak_reserved, self.reserved)

    def _shrank(self, size: int) -> None:
        self._device_frees += 1
        self.reserved -= size

    def _all(self) -> list[Block]:
        """Every mapped block."""
        free = [block for pair in self._pools.values() for pool in pair for block in pool.by_address.values()]
        return free + list(self._active.values())


def _whole(block: Block) -> bool:
    """Whether it is a whole cudaMalloc (a part of one is as large as the limit only after that was lowered)."""
    return block.range is None and not block.split


def _segment(head: Block) -> Segment:
    blocks: list[BlockState] = []
    block: Block | None = head
    while block is not None and block.mapped:
        state = ALLOCATED if block.allocated else PENDING if block.busy else INACTIVE
        blocks.append(BlockState(block.address, block.size, block.requested if state else 0, state))
        block = block.next
    return Segment(head.address, sum(part.size for part in blocks), head.stream, head.pool.identity, head.pool.small,
                   head.range is not None, tuple(blocks))
