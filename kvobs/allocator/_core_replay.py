"""Replaying on the C++ core: steps as recorded in one call, and what needs the device or differs one by one.

How a recording is followed is said once, in ``_recorded.py``; here the twin is exchanged for the core.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

from kvobs.allocator import _abi
from kvobs.allocator._expandable import UNLIMITED_RANGE
from kvobs.allocator._recorded import PythonReplayer, RecordedDevice, ageing
from kvobs.allocator.core import Core, check, pointer, zeros
from kvobs.allocator.device import Device
from kvobs.allocator.reservations import Pages, reservations
from kvobs.allocator.script import Script
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import State


class ForcedCore(Core):
    """The core with the methods of the twin's ``Forced``, which says what each does."""

    def __init__(self, settings: Settings, device: Device) -> None:
        super().__init__(settings, device.capacity, device)
        self.settings = settings

    @property
    def reserved(self) -> int:
        """Bytes reserved now."""
        return self.stats().reserved

    @property
    def allocated(self) -> int:
        """Bytes allocated now."""
        return self.stats().allocated

    @property
    def pending(self) -> int:
        """Bytes freed whose completion is awaited."""
        stats = self.stats()
        return stats.active - stats.allocated

    def set(self, settings: Settings) -> None:
        """Change the settings."""
        super().set(settings)
        self.settings = settings

    def load(self, state: State, pages: Iterable[Pages] = ()) -> None:
        """Begin with these segments.

        Raises:
            ValueError: blocks do not fill their segment, or segments overlap.
        """
        for base, segments in reservations(state, pages, self.settings.large_segment_size):
            first, last = segments[0], segments[-1]
            page = self.settings.page_size(first.small)
            span = -(-max(UNLIMITED_RANGE, last.address + last.size - base) // page) * page
            heads = array("q", chain.from_iterable((*segment[:6], len(segment.blocks)) for segment in segments))
            parts = array("q", chain.from_iterable(block[:4] for segment in segments for block in segment.blocks))
            code = self._library.kvobs_load(self._handle, base, span, pointer(heads), len(segments), pointer(parts))
            if code == _abi.INVALID:
                raise ValueError(f"the blocks from {first.address:#x} on overlap, or do not fill their segment")
            check(code, "a state")

    def fits(self, size: int, stream: int = 0, pool: int = 0) -> bool:
        """Whether a request would be served from the cache."""
        found = ctypes.c_int()
        check(self._library.kvobs_fits(self._handle, stream, pool, size, ctypes.byref(found)), size)
        return bool(found.value)

    def finish(self, address: int) -> None:
        """Free a block whether it was deferred before or not."""
        check(self._library.kvobs_finish(self._handle, address), address)

    def alloc_from_device(self, size: int, stream: int = 0, pool: int = 0) -> int | None:
        """Serve a request with memory of the device although the cache could."""
        address = ctypes.c_uint64()
        code = self._library.kvobs_alloc_from_device(self._handle, stream, pool, size, ctypes.byref(address))
        if code == _abi.OUT_OF_MEMORY:
            return None
        check(code, size)
        return address.value

    def release_for(self, size: int, stream: int, pool: int) -> None:
        """Return the oversize blocks that a request would have returned first."""
        check(self._library.kvobs_release_for(self._handle, stream, pool, size), size)

    def settle(self, address: int, stream: int, pool: int, small: bool) -> None:
        """Move a range that was reserved where no recording told to where it must have been."""
        check(self._library.kvobs_settle(self._handle, address, stream, pool, small), address)

    def collect(self) -> bool:
        """Return the large free segments that garbage collection finds oldest."""
        freed = ctypes.c_int()
        check(self._library.kvobs_collect(self._handle, ctypes.byref(freed)), "garbage collection")
        return bool(freed.value)

    def empty_pool(self, pool: int) -> None:
        """Return what is wholly free of one private pool that nothing uses any more."""
        check(self._library.kvobs_empty_pool(self._handle, pool), pool)

    def own_allocator(self, pool: int, has: bool) -> None:
        """Say whether a private pool takes memory from an allocator of its own."""
        check(self._library.kvobs_own_allocator(self._handle, pool, has), pool)

    def install(self, address: int, size: int, stream: int, pool: int, small: bool) -> None:
        """Add a free segment."""
        check(self._library.kvobs_install(self._handle, address, size, stream, pool, small), address)

    def remove(self, address: int, size: int) -> bool:
        """Take away a segment that is wholly free."""
        return self._known(self._library.kvobs_remove(self._handle, address, size), address)

    def install_pages(self, address: int, size: int, stream: int, pool: int, small: bool) -> bool:
        """Map pages of an expandable segment."""
        return self._known(self._library.kvobs_install_pages(self._handle, address, size, stream, pool, small), address)

    def remove_pages(self, address: int, size: int) -> bool:
        """Unmap pages of an expandable segment."""
        return self._known(self._library.kvobs_remove_pages(self._handle, address, size), address)

    def place(self, address: int, size: int, stream: int, pool: int) -> bool:
        """Put an allocation at this address."""
        return self._known(self._library.kvobs_place(self._handle, address, size, stream), address)

    def follow(self, script: Script, start: int, stop: int, columns: list[array[int]], offset: int) -> tuple[int, int]:
        """Replay steps until one is more than taking from and giving to the cache as recorded. Writes the bytes
        reserved, allocated and active after each into ``columns`` from ``offset`` on; returns that step, and how many
        requests were served.
        """
        reached, placed = ctypes.c_int64(), ctypes.c_int64()
        told = (script.step, script.address, script.size, script.stream, script.pool, script.first)
        check(self._library.kvobs_follow(
            self._handle, start, stop, *map(pointer, told), *(pointer(column) + 8 * offset for column in columns),
            ctypes.byref(reached), ctypes.byref(placed)), "a script")
        return reached.value, placed.value

    def _known(self, code: int, what: object) -> bool:
        if code != _abi.UNKNOWN:
            check(code, what)
        return code == _abi.OK


class CoreReplayer(PythonReplayer):
    """Replays scripts on the C++ core."""

    engine = "C++"

    def __init__(self, settings: Settings, state: State, pages: Iterable[Pages] = ()) -> None:
        self._device = RecordedDevice()
        self._core = ForcedCore(ageing(settings), self._device)
        self._core.load(state, pages)
        self._allocator = cast("Any", self._core)
        self._start(state)

    def run(self, script: Script, start: int, stop: int) -> None:
        """Replay the steps ``start`` to ``stop`` (excluded)."""
        tally, at = self.tally, start
        columns = [zeros("q", stop - start) for _ in range(3)]
        while at < stop:
            reached, placed = self._core.follow(script, at, stop, columns, at - start)
            for line, column in zip((tally.reserved, tally.allocated, tally.active), columns, strict=True):
                line.extend(column[at - start:reached - start])
            tally.addresses[0] += placed
            tally.addresses[1] += placed
            at = reached
            if at < stop:
                super().run(script, at, at + 1)
                at += 1
