"""A second account of PyTorch's CUDA caching allocator, which writes down what it does where PyTorch's own code does.

Made from ``c10/cuda/CUDACachingAllocator.cpp`` alone, with plain lists and none of the twin's code: the twin and the
core are checked against it. Unlike ``allocator_history`` it knows captures, MemPools, checkpoints of pools, garbage
collection, a device that gives the same addresses again, and what a recorder may leave out.
"""

from __future__ import annotations

from collections import deque

from kvobs.allocator import recording as rec
from tests.real_memory import MIB, Home, Memory, Piece, between, chain, reach


class Real(Memory):
    """One device. ``mine`` tells for each running capture (or MemPool context) which threads' requests it diverts."""

    def __init__(self, capacity: int = 1 << 40, *, expandable: bool = False, max_split: int | None = None,
                 threshold: float = 0.0, fraction: float | None = None, divisions: int = 0, ring: int | None = None,
                 told_pools: bool = False, skipped: tuple[int, ...] = (), space: int | None = None) -> None:
        super().__init__(capacity, space, ring, told_pools, skipped)
        self.expandable, self.max_split, self.threshold, self.divisions = expandable, max_split, threshold, divisions
        self.allowed = None if fraction is None else int(fraction * capacity)
        self.mine: dict[int, set[int]] = {}
        self.uses_of_pool: dict[int, int] = {}
        self.freeable: list[int] = []
        self.plain: set[int] = set()  # pools with an allocator of their own
        self.lenders: list[int] = []  # pools made with use_on_oom
        self.deferred: list[Piece] = []
        self.captured_uses: dict[int, set[int]] = {}
        self.events: dict[int, deque[list[object]]] = {}

    # --- what a program does

    def malloc(self, size: int, stream: int = 0, thread: int = 0) -> Piece:
        if not self.mine:
            self._process()
        pool = next((pool for pool, threads in reversed(self.mine.items()) if thread in threads), 0)
        return self._malloc(size, stream, pool)

    def free(self, piece: Piece) -> None:
        piece.allocated = False
        self._log(rec.FREE_REQUESTED, piece.address, piece.requested, piece.stream, piece.home)
        if not piece.uses:
            self._free(piece)
        elif self.mine:
            self.deferred.append(piece)
        else:
            self._insert_events(piece)

    def record_stream(self, piece: Piece, stream: int) -> None:
        if stream != piece.stream:
            piece.uses.add(stream)
            if self.mine:
                self.captured_uses.setdefault(id(piece), set()).add(stream)

    def reach(self, stream: int) -> None:
        """The device has done all that was queued on a stream."""
        for entry in self.events.get(stream, ()):
            entry[0] = True

    def empty_cache(self, pool: int = 0) -> None:
        self._release_cached(pool)

    def begin(self, pool: int, thread: int = 0) -> None:
        """A capture (or ``use_mem_pool``) begins."""
        self.uses_of_pool[pool] = self.uses_of_pool.get(pool, 0) + 1
        self.mine[pool] = {thread}

    def end(self, pool: int) -> None:
        del self.mine[pool]

    def release(self, pool: int) -> None:
        """A graph, or a MemPool, is deleted."""
        self.uses_of_pool[pool] -= 1
        if not self.uses_of_pool[pool]:
            self.freeable.append(pool)

    def checkpoint(self, pool: int) -> list[list[tuple[int, int, int, bool]]]:
        """Each segment's blocks, as cudagraph trees remember them."""
        heads = [piece for piece in self._pieces() if piece.home[0] == pool and piece.prev is None]
        return [[(one.address, one.size, one.stream, one.allocated) for one in chain(head) if one.mapped]
                for head in heads]

    def restore(self, pool: int, told: list[list[tuple[int, int, int, bool]]]) -> list[Piece]:
        """Free all of a pool, then allocate every block of a checkpoint, then free those that were free."""
        now = {blocks[0][0]: sum(size for _, size, _, _ in blocks) for blocks in self.checkpoint(pool)}
        if any(now[blocks[0][0]] != sum(size for _, size, _, _ in blocks) for blocks in told):
            raise ValueError  # PyTorch gives up where an expandable segment has grown since
        for piece in [one for one in self.active if one.home[0] == pool and one.allocated]:
            self.free(piece)
        live: list[Piece] = []
        for segment in told:
            made = []
            for address, size, _, _ in segment:
                piece = next(one for one in self._pieces() if one.address == address and one.mapped)
                self.cached[piece.home].remove(piece)
                made.append(self._found(piece, size, size, piece.size > size))
            for piece, (_, _, _, allocated) in zip(made, segment, strict=True):
                if allocated:
                    live.append(piece)
                else:
                    self.free(piece)
        return live

    # --- a request

    def _malloc(self, size: int, stream: int, pool: int) -> Piece:
        need = self._round(size)
        home = pool, need <= MIB
        expands = self.expandable and pool not in self.plain
        piece = self._get(home, need, stream, expands)
        if piece is None:
            if self.allowed is not None and self.threshold > 0:
                self._collect()

            def grow() -> Piece | None:
                return self._grow(home, need, stream, expands)
            piece = grow()
            if piece is None and self._release_available(home, need, stream):
                piece = grow()
            if piece is None and not self.mine:
                self._release_cached(0)
                piece = grow()
        if piece is None and pool == 0:
            for lender in self.lenders:
                piece = self._get((lender, home[1]), need, stream, False)
                expands = False
                if piece is not None:
                    break
        if piece is None:
            self._log(rec.OOM, self.capacity - self.reserved, need, stream, home)
            raise MemoryError
        rest = piece.size - need
        if piece.home[1] or expands:
            split = rest >= 512
        else:
            split = (self.max_split is None or need < self.max_split) and rest > MIB
        return self._found(piece, size, need, split)

    def _found(self, piece: Piece, size: int, need: int, split: bool) -> Piece:
        if split:
            first = Piece(piece.address, need, piece.stream, piece.home, piece.segment)
            between(piece.prev, first, piece)
            piece.address += need
            piece.size -= need
            self._put(piece)
            piece = first
        piece.allocated, piece.requested = True, size
        self._log(rec.ALLOC, piece.address, size, piece.stream, piece.home)
        self.active.append(piece)
        return piece

    def _get(self, home: Home, need: int, stream: int, expands: bool) -> Piece | None:
        if self.allowed is not None and self.threshold > 0:
            self.lookups[home] = self.lookups.get(home, 0) + 1
        fits = sorted((one for one in self.cached.get(home, []) if one.stream == stream and one.size >= need),
                      key=lambda one: (one.size, one.address))
        if fits and fits[0].segment is not None:
            if expands:
                at = 0
                while fits[at].segment is not None and at + 1 < len(fits) and reach(fits[at + 1]) < reach(fits[at]):
                    at += 1
                fits = fits[at:]
            else:
                fits = [one for one in fits if one.segment is None]
        if not fits:
            return None
        limit = self.max_split
        if limit is not None and (need < limit <= fits[0].size or (
                need >= limit and fits[0].size >= need + 20 * MIB)):
            return None
        self.cached[home].remove(fits[0])
        return fits[0]

    def _grow(self, home: Home, need: int, stream: int, expands: bool) -> Piece | None:
        size = 2 * MIB if need <= MIB else 20 * MIB if need < 10 * MIB else -(-need // (2 * MIB)) * 2 * MIB
        if self.allowed is not None and self.reserved + size > self.allowed:
            return None
        if expands:
            return self._expand(home, need, stream)
        if self.reserved + size > self.capacity:
            return None
        address = self._place(size)
        self.reserved += size
        self._log(rec.SEGMENT_ALLOC, address, size, stream, home)
        return Piece(address, size, stream, home)

    def _expand(self, home: Home, need: int, stream: int) -> Piece | None:
        piece = self._room(home, need, stream)
        if not piece.mapped and not self._map(piece, min(piece.size, need)):
            return None
        while piece.size < need:
            following = piece.next
            assert following is not None
            if not self._map(following, min(need - piece.size, following.size)):
                return None
            piece = following
        self.cached[home].remove(piece)
        return piece

    def _room(self, home: Home, need: int, stream: int) -> Piece:
        for piece in sorted(self.unmapped.get(home, []), key=lambda one: one.address):
            if piece.stream == stream:
                if piece.prev is not None and piece.prev.free:
                    piece = piece.prev
                found, at = 0, piece
                while at is not None and found < need and at.free:
                    found, at = found + at.size, at.next  # type: ignore[assignment]
                if found >= need:
                    return piece
        page = 2 * MIB if home[1] else 20 * MIB
        size = -(-self.space // page) * page
        address = self._place(size)
        made = Piece(address, size, stream, home, (address, size, page), mapped=False)
        self.unmapped.setdefault(home, []).append(made)
        return made

    # --- a free

    def _free(self, piece: Piece) -> None:
        self._log(rec.FREE_COMPLETED, piece.address, piece.requested, piece.stream, piece.home)
        self._merge(piece, piece.prev)
        self._merge(piece, piece.next)
        self.active.remove(piece)
        self._put(piece)

    def _insert_events(self, piece: Piece) -> None:
        for stream in sorted(piece.uses):
            piece.waits += 1
            self.events.setdefault(stream, deque()).append([False, piece])
        piece.uses = set()

    def _insert_deferred(self) -> None:
        for piece in self.deferred:
            piece.uses -= self.captured_uses.pop(id(piece), set())
            self._insert_events(piece)
            if not piece.waits:
                self._free(piece)
        self.deferred.clear()

    def _process(self, all_of_them: bool = False) -> None:
        self._insert_deferred()
        for queue in self.events.values():
            while queue and (all_of_them or queue[0][0]):
                _, piece = queue.popleft()
                assert isinstance(piece, Piece)
                piece.waits -= 1
                if not piece.waits:
                    self._free(piece)

    # --- memory back to the device

    def _collect(self) -> None:
        assert self.allowed is not None
        limit = int(self.threshold * self.allowed)
        goal, reclaimed, home, went = self.reserved - limit, 0, (0, False), True
        while reclaimed < goal and went:
            old = [one for one in self.cached.get(home, []) if not one.split and one.segment is None]
            ages = {id(one): self.lookups.get(home, 0) - one.born for one in old}
            went = False
            for piece in sorted(old, key=lambda one: (one.stream, one.size, one.address)):
                if ages[id(piece)] >= sum(ages.values()) / len(ages):
                    went = True
                    reclaimed += piece.size
                    self._release(piece)

    def _release_available(self, home: Home, need: int, stream: int) -> bool:
        if self.max_split is None:
            return False
        wanted = max(self.max_split, need)
        big = sorted((one for one in self.cached.get(home, []) if one.stream == stream and one.segment is None
                      and one.size >= self.max_split), key=lambda one: (one.size, one.address))
        enough = [one for one in big if one.size >= wanted]
        if enough:
            self._release(enough[0])
            return True
        released = 0
        while big and released < wanted:
            released += big[-1].size
            self._release(big.pop())
        return released >= wanted

    def _release_cached(self, pool: int) -> None:
        pools = list(self.freeable)
        if pool == 0 and not self.mine:
            self._process(all_of_them=True)
            self._release_all((0, False))
            self._release_all((0, True))
        elif pool:
            pools = [one for one in pools if one == pool]
        for one in pools:
            self._release_all((one, True))
            self._release_all((one, False))

    def _release_all(self, home: Home) -> None:
        cached = sorted(self.cached.get(home, []), key=lambda one: (one.stream, one.size, one.address))
        for piece in cached:
            if piece.segment is None and not piece.split:
                self._release(piece)
        for piece in cached:
            if piece.segment is not None:
                self._unmap(piece)

    def _round(self, size: int) -> int:
        if self.divisions > 1 and size > 512 * self.divisions and size & (size - 1):
            step = (1 << (size.bit_length() - 1)) // self.divisions
            return -(-size // step) * step
        return max(512, -(-size // 512) * 512)
