"""A device that answers as the recording says, and the twin replayed on it, step by step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvobs.allocator import script as steps
from kvobs.allocator._forced import NOWHERE
from kvobs.allocator.recording import GIVEN_BACK, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, TAKEN
from kvobs.allocator.reservations import Pages
from kvobs.allocator.script import Script
from kvobs.allocator.settings import SMALL_SEGMENT, Settings
from kvobs.allocator.state import INACTIVE, State
from kvobs.allocator.twin import Allocator, OutOfMemory

Call = tuple[int, int, int]  # kind, address, size


def ageing(settings: Settings) -> Settings:
    """Settings under which blocks age for garbage collection, which needs a memory fraction. Files do not tell that;
    a device without limit, as the recorded one, has nothing to take a fraction of.
    """
    if settings.garbage_collection_threshold > 0 and settings.memory_fraction is None:
        return replace(settings, memory_fraction=1.0)
    return settings


class RecordedDevice:
    """Answers with the calls of one step. Calls that the recording does not have are ``extra``, to be taken back."""

    capacity: int | None = None
    space: int | None = None

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.extra: list[Call] = []
        self.failing = self.told = False
        self._nowhere = NOWHERE

    def begin(self, calls: list[Call], failing: bool) -> None:
        """Answer with these; after the last one a ``failing`` device has nothing left."""
        self.calls, self.failing, self.told = calls, failing, False
        self.extra.clear()

    def gives_back(self) -> bool:
        """Whether the recording goes on with memory that was given back."""
        return bool(self.calls) and self.calls[0][0] in GIVEN_BACK

    def malloc(self, size: int) -> int | None:
        """The recorded address; None where the recording shows that memory was given back first."""
        kind, address, recorded = self.calls[0] if self.calls else (-1, 0, 0)
        if kind == SEGMENT_ALLOC and recorded == size:
            del self.calls[0]
            return address
        if kind in GIVEN_BACK or (kind < 0 and self.failing):
            return None
        address = self._nowhere_for(size)
        self.extra.append((SEGMENT_ALLOC, address, size))
        return address

    def free(self, address: int, size: int) -> None:
        """Tick the recorded call off."""
        self._tick(SEGMENT_FREE, address, size)

    def reserve(self, size: int) -> int:
        """Where the recording maps next."""
        told = next((address for kind, address, _ in self.calls if kind == SEGMENT_MAP), None)
        return self._nowhere_for(size) if told is None else told

    def map(self, address: int, size: int) -> bool:
        """Whether the recording maps these pages; False where it shows that memory was given back first."""
        if self.told:
            return True
        kind, recorded, length = self.calls[0] if self.calls else (-1, 0, 0)
        if (kind, recorded, length) == (SEGMENT_MAP, address, size):
            del self.calls[0]
            return True
        if kind in GIVEN_BACK or (kind < 0 and self.failing):
            return False
        self.extra.append((SEGMENT_MAP, address, size))
        return True

    def unmap(self, address: int, size: int) -> None:
        """Tick the recorded call off."""
        if not self.told:
            self._tick(SEGMENT_UNMAP, address, size)

    def _tick(self, kind: int, address: int, size: int) -> None:
        try:
            self.calls.remove((kind, address, size))
        except ValueError:
            self.extra.append((kind, address, size))

    def _nowhere_for(self, size: int) -> int:
        """Addresses that no device has."""
        address = self._nowhere
        self._nowhere += -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        return address


@dataclass(slots=True)
class Tally:
    """Facts checked and matched, and a line per step: bytes reserved, allocated and active after it."""

    addresses: list[int] = field(default_factory=lambda: [0, 0])
    device_allocs: list[int] = field(default_factory=lambda: [0, 0])
    device_frees: list[int] = field(default_factory=lambda: [0, 0])
    strays: int = 0  # frees of what the twin does not have
    lost: int = 0  # allocations that could not be put where they were recorded
    reserved: array[int] = field(default_factory=lambda: array("q"))
    allocated: array[int] = field(default_factory=lambda: array("q"))
    active: array[int] = field(default_factory=lambda: array("q"))
    forced: array[int] = field(default_factory=lambda: array("q"))  # alloc steps that went to the device
    unexpected: set[int] = field(default_factory=set)  # OOM steps that the twin served
    switches: int = 0  # changes of expandable_segments that the device's calls give away


class PythonReplayer:
    """Replays scripts on the Python twin. After every step the twin is where the recording is."""

    engine = "Python"

    def __init__(self, settings: Settings, state: State, pages: Iterable[Pages] = ()) -> None:
        self._device = RecordedDevice()
        self._allocator = Allocator(ageing(settings), self._device)
        self._allocator.load(state, pages)
        self._start(state)

    def _start(self, state: State) -> None:
        self.tally = Tally()
        self._homes = {segment.address: (segment.stream, segment.pool, segment.small) for segment in state}
        if self._allocator.settings.expandable_segments:
            for pool in {segment.pool for segment in state if segment.pool and not segment.expandable}:
                self._allocator.own_allocator(pool, True)

    def run(self, script: Script, start: int, stop: int) -> None:
        """Replay the steps ``start`` to ``stop`` (excluded)."""
        allocator, tally = self._allocator, self.tally
        for index in range(start, stop):
            step, address = script.step[index], script.address[index]
            if step == steps.ALLOC:
                self._alloc(script, index)
            elif step == steps.FREE:
                self._try(allocator.free, address)
            elif step == steps.DEFER:
                self._try(allocator.defer, address)
            elif step == steps.COMPLETE:
                self._try(allocator.finish, address)
            elif step == steps.RELEASE:
                self._release(script, index)
            else:
                self._oom(script, index)
            tally.reserved.append(allocator.reserved)
            tally.allocated.append(allocator.allocated)
            tally.active.append(allocator.allocated + allocator.pending)

    def snapshot(self) -> State:
        """The twin's state now."""
        return self._allocator.snapshot()

    def _try(self, change: object, address: int) -> None:
        try:
            change(address)  # type: ignore[operator]
        except KeyError:
            self.tally.strays += 1

    def _begin(self, script: Script, index: int, failing: bool) -> list[Call]:
        """Set the device up for a step; returns all of its recorded calls."""
        calls = [(script.call[at], script.call_address[at], script.call_size[at])
                 for at in range(script.first[index], script.first[index + 1])]
        for at in range(script.first[index], script.first[index + 1]):
            if script.call[at] in TAKEN:
                small = script.call_size[at] == SMALL_SEGMENT
                self._homes[script.call_address[at]] = (script.call_stream[at], script.call_pool[at], small)
                if script.call[at] == SEGMENT_MAP:
                    self._allocator.settle(script.call_address[at], script.call_stream[at], script.call_pool[at], small)
            elif script.call_pool[at] != 0:
                self._allocator.release_pool(script.call_pool[at])
            self._switch(script.call[at], script.call_pool[at])
        self._device.begin(list(calls), failing)
        return calls

    def _switch(self, call: int, pool: int) -> None:
        """Follow a change of ``expandable_segments``: pages are mapped only with it, segments allocated without it.

        A private pool may have an allocator of its own, which knows no pages.
        """
        settings = self._allocator.settings
        if pool != 0 and settings.expandable_segments and call in {SEGMENT_MAP, SEGMENT_ALLOC}:
            self._allocator.own_allocator(pool, call == SEGMENT_ALLOC)
        if (call == SEGMENT_MAP and not settings.expandable_segments) or (
                call == SEGMENT_ALLOC and settings.expandable_segments and pool == 0):
            self._allocator.set(replace(settings, expandable_segments=not settings.expandable_segments))
            self.tally.switches += 1

    def _alloc(self, script: Script, index: int) -> None:
        allocator, tally, device = self._allocator, self.tally, self._device
        address, size = script.address[index], script.size[index]
        stream, pool = script.stream[index], script.pool[index]
        calls = self._begin(script, index, False)
        in_need = device.gives_back() and not allocator.fits(size, stream, pool)
        self._give_back(script, index)
        tally.addresses[0] += 1
        retried = len(device.calls) < len(calls) or index == 0
        given = self._request(size, stream, pool, in_need, retried)
        if calls:
            tally.forced.append(index)
        if given == address and not device.calls and not device.extra:
            tally.addresses[1] += 1
            self._count(calls, [])
            return
        if given is not None:
            allocator.free(given)
        if not calls and pool != 0 and self._restores(script, index):
            self._follow(script, index, calls, scored=False)
            tally.addresses[0] -= 1
            self._place_exactly(address, size, stream, pool)
            return
        self._follow(script, index, calls)
        if given == address:
            tally.addresses[1] += 1
        if not allocator.place(address, size, stream, pool):
            tally.lost += 1

    def _restores(self, script: Script, index: int) -> bool:
        """Whether an allocation is no request but part of a private pool put back to a checkpoint, as cudagraph trees
        do: blocks that fill a whole free segment, each after the other.
        """
        address, last = script.address[index], index
        if not ((index > 0 and _follows(script, index - 1)) or _follows(script, index) or address in self._homes):
            return False
        segment = next((one for one in self._allocator.snapshot()
                        if one.address <= address < one.address + one.size), None)
        if segment is None or segment.pool != script.pool[index]:
            return False
        *done, free = segment.blocks
        if free.address != address or free.state != INACTIVE or [block.address for block in done] != list(
                script.address[index - len(done):index]) or not all(
                _follows(script, index - back) for back in range(1, len(done) + 1)):
            return False
        while script.address[last] + script.size[last] < free.address + free.size and _follows(script, last):
            last += 1
        return script.address[last] + script.size[last] == free.address + free.size

    def _place_exactly(self, address: int, size: int, stream: int, pool: int) -> None:
        """A block of a checkpoint has the size that it had then, whatever the settings say now."""
        settings = self._allocator.settings
        self._allocator.set(Settings(expandable_segments=True))
        if not self._allocator.place(address, size, stream, pool):
            self.tally.lost += 1
        self._allocator.set(settings)

    def _request(self, size: int, stream: int, pool: int, in_need: bool, retried: bool) -> int | None:
        """Ask the twin. ``in_need``: the cache was released for this request, which then asks the device only.
        ``retried``: it was released just now, or the history begins in the middle of this request; if the recording
        goes to the device all the same, what fits now had been pending then.
        """
        if in_need or (retried and self._device.calls and self._allocator.fits(size, stream, pool)):
            return self._allocator.alloc_from_device(size, stream, pool)
        try:
            return self._allocator.alloc(size, stream, pool)
        except OutOfMemory:
            return None

    def _give_back(self, script: Script, index: int) -> None:
        """Release what the recording releases next: for a request, the segments that garbage collection finds oldest,
        round by round, and oversize blocks; then all that is wholly free, or only what is of private pools.
        """
        device, allocator, size = self._device, self._allocator, script.size[index]
        if size >= 0 and allocator.settings.garbage_collection_threshold > 0:
            while device.gives_back() and allocator.collect():
                pass
        if size >= 0 and device.gives_back():
            allocator.release_for(size, script.stream[index], script.pool[index])
        if device.gives_back():
            pools = {script.call_pool[at] for at in range(script.first[index], script.first[index + 1])
                     if script.call[at] in GIVEN_BACK}
            if 0 in pools:
                allocator.empty_cache()
            for pool in sorted(pools - {0}):
                allocator.empty_pool(pool)

    def _release(self, script: Script, index: int) -> None:
        calls = self._begin(script, index, True)
        size, stream, pool = script.size[index], script.stream[index], script.pool[index]
        if size >= 0 and calls[0][0] == SEGMENT_MAP:  # pages for it, until the device had no more
            self._serves(size, stream, pool)
        self._give_back(script, index)
        self._follow(script, index, calls)

    def _oom(self, script: Script, index: int) -> None:
        calls = self._begin(script, index, True)
        size, stream, pool = script.size[index], script.stream[index], script.pool[index]
        served = bool(calls) and calls[0][0] == SEGMENT_MAP and self._serves(size, stream, pool)
        self._give_back(script, index)
        # What was freed just before may have been waited for: the allocator then asks the device only.
        if index == 0 or script.step[index - 1] not in {steps.COMPLETE, steps.FREE}:
            served |= self._allocator.fits(size, stream, pool)
        settings = self._allocator.settings
        if script.address[index] < settings.segment_size(settings.round_size(size)):  # else a memory fraction refused
            served |= self._serves(size, stream, pool)
        if served:
            self.tally.unexpected.add(index)
        self._follow(script, index, calls)

    def _serves(self, size: int, stream: int, pool: int) -> bool:
        """Whether the device, as recorded, would serve a request; the pages that it mapped stay."""
        given = self._allocator.alloc_from_device(size, stream, pool)
        if given is not None:
            self._allocator.free(given)
        return given is not None

    def _follow(self, script: Script, index: int, calls: list[Call], scored: bool = True) -> None:
        """Count what agreed, then take back what the twin did alone and do what only the recording has."""
        device, allocator = self._device, self._allocator
        left, extra = device.calls, list(device.extra)
        if scored:
            self._count([call for call in calls if call not in left], left + extra)
        device.told = True
        for kind, address, size in reversed(extra):
            stream, pool, small = self._homes.get(address, (script.stream[index], script.pool[index], False))
            if kind == SEGMENT_ALLOC:
                allocator.remove(address, size)
            elif kind == SEGMENT_FREE:
                allocator.install(address, size, stream, pool, small)
            elif kind == SEGMENT_MAP:
                allocator.remove_pages(address, size)
            else:
                allocator.install_pages(address, size, stream, pool, small)
        for kind, address, size in left:
            stream, pool, small = self._homes.get(address, (script.stream[index], script.pool[index], False))
            if kind == SEGMENT_ALLOC:
                allocator.install(address, size, stream, pool, small)
            elif kind == SEGMENT_FREE:
                allocator.remove(address, size)
            elif kind == SEGMENT_MAP:
                allocator.install_pages(address, size, stream, pool, small)
            else:
                allocator.remove_pages(address, size)
        device.told = False

    def _count(self, matched: list[Call], unmatched: list[Call]) -> None:
        for calls, hit in ((matched, 1), (unmatched, 0)):
            for kind, _, _ in calls:
                score = self.tally.device_allocs if kind in TAKEN else self.tally.device_frees
                score[0] += 1
                score[1] += hit


def _follows(script: Script, index: int) -> bool:
    """Whether a step and the next are allocations side by side, for which the device was not asked."""
    return (index + 1 < len(script) and script.step[index] == script.step[index + 1] == steps.ALLOC
            and script.first[index] == script.first[index + 2]
            and script.address[index] + script.size[index] == script.address[index + 1])
