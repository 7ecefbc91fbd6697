"""A state in motion: what the next requests would do to it. Small, and written apart from the twin, which checks it.

A snapshot does not tell everything. Unmapped addresses in front of the first mapped page of an expandable segment are
not in it, and behind the last one they are taken to be without end; the ages that garbage collection goes by are
unknown, so it is left out (what it releases, the release before a retry releases too).

Source of the rules: ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.13.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter, itemgetter

from kvobs.allocator.settings import MIN_BLOCK, SMALL_SIZE, Settings
from kvobs.allocator.state import ALLOCATED, DEFAULT_POOL, INACTIVE, PENDING, Block, Segment, State
from kvobs.allocator.waste import Group

UNMAPPED = -1
ENDLESS = 1 << 60  # bytes of addresses behind an expandable segment
_SIZE_AND_ADDRESS, _ADDRESS = itemgetter(0, 1), attrgetter("address")


class Chain:
    """The blocks of one segment in order of address; of an expandable one also its unmapped ranges."""

    __slots__ = ("address", "blocks", "expandable", "group", "stack")

    def __init__(self, group: Group, address: int, expandable: bool, blocks: list[Block], stack: int = -1) -> None:
        self.group, self.address, self.expandable, self.blocks, self.stack = group, address, expandable, blocks, stack


class Arena:
    """Segments by group, and the device they came from. ``device_free``, ``allowed_left``: bytes; None: no limit."""

    def __init__(self, state: State, settings: Settings, device_free: int, allowed_left: int | None = None) -> None:
        self.settings, self.device_free, self.allowed_left = settings, device_free, allowed_left
        self.chains: dict[Group, list[Chain]] = {}
        previous: Chain | None = None
        for segment in state:
            previous = self._add(segment, previous)

    def _add(self, segment: Segment, previous: Chain | None) -> Chain:
        """A chain of its own, or one with the mapped range before it if both are of one reservation."""
        group = Group(segment.stream, segment.pool, segment.small)
        blocks = list(segment.blocks)
        if segment.expandable:
            if previous is not None and previous.expandable and previous.group == group:
                hole = previous.blocks[-1]
                between = segment.address - hole.address
                if between > 0 and between % self.settings.page_size(group.small) == 0:
                    previous.blocks[-1] = hole._replace(size=between)
                    previous.blocks += [*blocks, _hole(segment.address + segment.size, ENDLESS)]
                    return previous
            blocks.append(_hole(segment.address + segment.size, ENDLESS))
        chain = Chain(group, segment.address, segment.expandable, blocks, segment.stack)
        self.chains.setdefault(group, []).append(chain)
        return chain

    def copy(self) -> Arena:
        """One that can be tried out."""
        found = Arena((), self.settings, self.device_free, self.allowed_left)
        found.chains = {group: [Chain(group, chain.address, chain.expandable, list(chain.blocks), chain.stack)
                                for chain in chains] for group, chains in self.chains.items()}
        return found

    def state(self) -> State:
        """The state now."""
        found = []
        for group, chains in self.chains.items():
            for chain in chains:
                run: list[Block] = []
                for block in [*chain.blocks, _hole(0, 0)]:
                    if block.state != UNMAPPED:
                        run.append(block)
                    elif run:
                        found.append(Segment(run[0].address, sum(part.size for part in run), *group, chain.expandable,
                                             tuple(run), chain.stack))
                        run = []
        return tuple(sorted(found, key=lambda segment: segment.address))

    # --- the steps of a request

    def find(self, group: Group, rounded: int) -> tuple[Chain, int] | None:
        """The free block that the allocator would choose: the smallest that is large enough, by the settings' rules."""
        fits = [(block.size, block.address, chain, index) for chain in self.chains.get(group, ())
                for index, block in enumerate(chain.blocks) if block.size >= rounded and block.state == INACTIVE]
        if not fits:
            return None
        at, best = 0, min(fits, key=_SIZE_AND_ADDRESS)
        if not best[2].expandable:
            fits = [best]
        else:
            fits.sort(key=_SIZE_AND_ADDRESS)
            if self.settings.expandable_segments:
                # The best fit goes by what a block can grow to; the search ends where the next can grow to no less.
                while (fits[at][2].expandable and at + 1 < len(fits)
                       and _growth(fits[at + 1][2], fits[at + 1][3]) < _growth(fits[at][2], fits[at][3])):
                    at += 1
            else:
                while at < len(fits) and fits[at][2].expandable:
                    at += 1
                if at == len(fits):
                    return None
        size, _, chain, index = fits[at]
        limit = self.settings.max_split_size
        if limit is not None and (size >= limit if rounded < limit
                                  else size >= rounded + self.settings.max_non_split_rounding):
            return None
        return chain, index

    def hand_out(self, spot: tuple[Chain, int], rounded: int) -> None:
        """Allocate a free block, or the first part of it."""
        chain, index = spot
        block, limit = chain.blocks[index], self.settings.max_split_size
        rest = block.size - rounded
        if chain.group.small or self.settings.expandable_segments:
            splits = rest >= MIN_BLOCK
        else:
            splits = rest > SMALL_SIZE and (limit is None or rounded < limit)
        size = rounded if splits else block.size
        chain.blocks[index:index + 1] = [Block(block.address, size, rounded, ALLOCATED)] + (
            [Block(block.address + size, rest, 0, INACTIVE)] if splits else [])

    def free(self, address: int) -> None:
        """Give back the block in use that begins at an address or lies around it, if there is one."""
        for chains in self.chains.values():
            for chain in chains:
                blocks = chain.blocks
                if blocks and blocks[0].address <= address < blocks[-1].address + blocks[-1].size:
                    index = bisect_right(blocks, address, key=_ADDRESS) - 1
                    if blocks[index].state == ALLOCATED:  # else it lies in the endless rest of another reservation
                        blocks[index] = blocks[index]._replace(state=INACTIVE)
                        _merge(chain)
                        return

    def missing(self, group: Group, rounded: int) -> int:
        """The bytes the device would have to give for a request."""
        if not self.settings.expandable_segments:
            return self.settings.segment_size(rounded)
        trial = self.copy()
        trial.device_free, trial.allowed_left = ENDLESS, None
        trial.take(group, rounded)
        return ENDLESS - trial.device_free

    def take(self, group: Group, rounded: int) -> tuple[Chain, int] | None:
        """A free block made with memory from the device; None where it does not give enough."""
        size = self.settings.segment_size(rounded)
        if self.allowed_left is not None and size > self.allowed_left:
            return None
        if self.settings.expandable_segments:
            return self._expand(group, rounded)
        if size > self.device_free:
            return None
        self._give(-size)
        address = self._fresh()
        chain = Chain(group, address, False, [Block(address, size, 0, INACTIVE)])
        self.chains.setdefault(group, []).append(chain)
        return chain, 0

    def _expand(self, group: Group, rounded: int) -> tuple[Chain, int] | None:
        chain, index = self._room(group, rounded)
        page = self.settings.page_size(group.small)
        while True:
            block = chain.blocks[index]
            if block.state == INACTIVE:
                if block.size >= rounded:
                    return chain, index
                missing, hole = rounded - block.size, index + 1
            else:
                missing, hole = rounded, index
            unmapped = chain.blocks[hole]
            size = -(-min(missing, unmapped.size) // page) * page
            if size > self.device_free:
                return None  # what was mapped before stays mapped
            self._give(-size)
            rest = unmapped.size - size
            chain.blocks[hole:hole + 1] = [Block(unmapped.address, size, 0, INACTIVE)] + (
                [_hole(unmapped.address + size, rest)] if rest else [])
            _merge(chain)
            index = next(at for at, part in enumerate(chain.blocks)
                         if part.address <= unmapped.address < part.address + part.size)

    def _room(self, group: Group, rounded: int) -> tuple[Chain, int]:
        """The lowest address with enough free and unmapped bytes: an unmapped range, or the free block before it."""
        for chain in sorted(self.chains.get(group, ()), key=lambda chain: chain.address):
            for index, block in enumerate(chain.blocks):
                if block.state == UNMAPPED:
                    first = index - 1 if index and chain.blocks[index - 1].state == INACTIVE else index
                    reach = 0
                    for part in chain.blocks[first:]:
                        if part.state in (ALLOCATED, PENDING) or reach >= rounded:
                            break
                        reach += part.size
                    if reach >= rounded:
                        return chain, first
        address = self._fresh()
        chain = Chain(group, address, True, [_hole(address, ENDLESS)])
        self.chains.setdefault(group, []).append(chain)
        return chain, 0

    def complete(self) -> None:
        """Every stream has caught up: pending blocks are free and merge with their free neighbours."""
        for chains in self.chains.values():
            for chain in chains:
                if any(block.state == PENDING for block in chain.blocks):
                    chain.blocks = [block._replace(state=INACTIVE) if block.state == PENDING else block
                                    for block in chain.blocks]
                    _merge(chain)

    def release(self, freeable: frozenset[int] = frozenset()) -> int:
        """Return what is wholly free, of the default pool and ``freeable`` private ones. The bytes returned."""
        before = self.device_free
        for group, chains in self.chains.items():
            if group.pool == DEFAULT_POOL or group.pool in freeable:
                kept = []
                for chain in chains:
                    if chain.expandable:
                        self._unmap(chain)
                        if any(block.state != UNMAPPED for block in chain.blocks):
                            kept.append(chain)
                    elif len(chain.blocks) != 1 or chain.blocks[0].state != INACTIVE:
                        kept.append(chain)
                    else:
                        self._give(chain.blocks[0].size)
                self.chains[group] = kept
        return self.device_free - before

    def _unmap(self, chain: Chain) -> None:
        page, blocks = self.settings.page_size(chain.group.small), []
        for block in chain.blocks:
            first = chain.address - (chain.address - block.address) // page * page
            last = chain.address + (block.address + block.size - chain.address) // page * page
            if block.state != INACTIVE or first >= last:
                blocks.append(block)
                continue
            self._give(last - first)
            blocks += [part for part in (block._replace(size=first - block.address), _hole(first, last - first),
                                         Block(last, block.address + block.size - last, 0, INACTIVE)) if part.size]
        chain.blocks = blocks
        _merge(chain)

    def release_oversize(self, group: Group, rounded: int) -> bool:
        """With a max_split_size: return the oversize free blocks of a group, just enough. True: enough was returned."""
        limit = self.settings.max_split_size
        if limit is None:
            return False
        wanted = max(limit, rounded)
        free = sorted(((chain.blocks[0].size, chain.address, chain) for chain in self.chains.get(group, ())
                       if not chain.expandable and len(chain.blocks) == 1 and chain.blocks[0].state == INACTIVE
                       and chain.blocks[0].size >= limit), key=lambda entry: entry[:2])
        chosen = next(([entry] for entry in free if entry[0] >= wanted), None)
        if chosen is None:
            chosen = []
            while free and sum(entry[0] for entry in chosen) < wanted:
                chosen.append(free.pop())
        for size, _, chain in chosen:
            self.chains[group].remove(chain)
            self._give(size)
        return sum(entry[0] for entry in chosen) >= wanted

    def _give(self, size: int) -> None:
        """Give bytes back to the device, or take them (negative)."""
        self.device_free += size
        if self.allowed_left is not None:
            self.allowed_left += size

    def _fresh(self) -> int:
        """An address above all others."""
        ends = [last.address + last.size for chains in self.chains.values() for chain in chains
                for last in chain.blocks[-1:]]
        return -(-max(ends, default=ENDLESS) // ENDLESS) * ENDLESS


def _hole(address: int, size: int) -> Block:
    return Block(address, size, 0, UNMAPPED)


def _growth(chain: Chain, index: int) -> int:
    """The bytes a free block could reach: its own and those of unmapped addresses behind it."""
    following = chain.blocks[index + 1:index + 2]
    return chain.blocks[index].size + (following[0].size if following and following[0].state == UNMAPPED else 0)


def _merge(chain: Chain) -> None:
    """Make one block of free neighbours, and one range of unmapped ones."""
    merged: list[Block] = []
    for block in chain.blocks:
        if merged and block.state == merged[-1].state and block.state in (INACTIVE, UNMAPPED):
            merged[-1] = Block(merged[-1].address, merged[-1].size + block.size, 0, block.state)
        else:
            merged.append(block)
    chain.blocks = merged
