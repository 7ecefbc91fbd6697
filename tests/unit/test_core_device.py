"""The C++ core on memory that its caller provides: every call is given back exactly as it was taken."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from ctypes import c_uint64
from typing import Any

import pytest

from kvobs.allocator import _abi, core
from kvobs.allocator.device import SimulatedDevice
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.twin import Allocator, OutOfMemory

REASON = core.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

MALLOC, FREE, MAP = _abi.ADDRESS_OF_SIZE, _abi.NOTHING_OF_RANGE, _abi.TRUTH_OF_RANGE


class Ledger:
    """A caller's device: refuses what was not taken, keeps what is held."""

    def __init__(self, capacity: int) -> None:
        self.inner = SimulatedDevice(capacity)
        self.mallocs: dict[int, int] = {}
        self.ranges: dict[int, int] = {}
        self.pages: set[int] = set()  # of 2 MiB, by their addresses
        self.wrong: list[str] = []
        self.table = _abi.CDevice(None, MALLOC(self._malloc), FREE(self._free), MALLOC(self._reserve),
                                  FREE(self._unreserve), MAP(self._map), FREE(self._unmap))

    def _malloc(self, _: None, size: int) -> int:
        address = self.inner.malloc(size)
        if address is None:
            return 0
        self.mallocs[address] = size
        return address

    def _free(self, _: None, address: int, size: int) -> None:
        if self.mallocs.pop(address, None) != size:
            self.wrong.append(f"free {address:#x} {size}")
        self.inner.free(address, size)

    def _reserve(self, _: None, size: int) -> int:
        address = self.inner.reserve(size)
        self.ranges[address] = size
        return address

    def _unreserve(self, _: None, address: int, size: int) -> None:
        if self.ranges.pop(address, None) != size:
            self.wrong.append(f"unreserve {address:#x} {size}")

    def _map(self, _: None, address: int, size: int) -> int:
        if not self.inner.map(address, size):
            return 0
        for page in range(address, address + size, 2 * MIB):
            if page in self.pages:
                self.wrong.append(f"map {page:#x}")
            self.pages.add(page)
        return 1

    def _unmap(self, _: None, address: int, size: int) -> None:
        for page in range(address, address + size, 2 * MIB):
            if page not in self.pages:
                self.wrong.append(f"unmap {page:#x}")
            self.pages.discard(page)
        self.inner.unmap(address, size)


@pytest.fixture(params=[False, True], ids=["cudaMalloc", "expandable"])
def setting(request: pytest.FixtureRequest) -> Settings:
    return Settings(expandable_segments=request.param)


@pytest.fixture
def library() -> Any:
    return core._library()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(300 * MIB)


@pytest.fixture
def handle(library: Any, ledger: Ledger, setting: Settings) -> Iterator[int]:
    made = library.kvobs_create(ctypes.byref(_abi.settings_struct(setting)), 300 * MIB, ctypes.byref(ledger.table))
    yield made
    library.kvobs_destroy(made)


def test_the_callers_memory_serves(library: Any, ledger: Ledger, handle: int, setting: Settings) -> None:
    """On a caller's device the core gives the addresses that the twin gives on one like it, and in the end every
    byte, page and range is given back.
    """
    draw, wanted = random.Random(1), Allocator(setting, SimulatedDevice(300 * MIB))
    address, live, failed = c_uint64(), [], 0
    for _ in range(2000):
        if draw.random() < 0.55:
            size, stream = draw.randrange(1, draw.choice((MIB, 40 * MIB))), draw.randrange(2)
            try:
                expected = wanted.alloc(size, stream)
            except OutOfMemory:
                failed += 1
                assert library.kvobs_alloc(handle, stream, 0, size, ctypes.byref(address)) == _abi.OUT_OF_MEMORY
            else:
                assert library.kvobs_alloc(handle, stream, 0, size, ctypes.byref(address)) == _abi.OK
                assert address.value == expected
                live.append(expected)
        elif live:
            left = live.pop(draw.randrange(len(live)))
            wanted.free(left)
            assert library.kvobs_free(handle, left) == _abi.OK
    assert failed
    assert ledger.inner.used == wanted.reserved
    for left in live:
        assert library.kvobs_free(handle, left) == _abi.OK
    assert library.kvobs_empty_cache(handle) == _abi.OK
    assert (ledger.mallocs, ledger.ranges, ledger.pages, ledger.wrong) == ({}, {}, set(), [])


def test_a_table_with_a_hole_is_refused(library: Any, ledger: Ledger) -> None:
    """A device needs all of its calls, except the one that gives address ranges back."""
    settings = ctypes.byref(_abi.settings_struct(Settings()))
    ledger.table.map = MAP(0)
    assert not library.kvobs_create(settings, 0, ctypes.byref(ledger.table))
    whole = Ledger(MIB).table
    whole.unreserve = FREE(0)
    made = library.kvobs_create(settings, 0, ctypes.byref(whole))
    assert made
    library.kvobs_destroy(made)


def test_a_device_without_addresses(library: Any, ledger: Ledger) -> None:
    """Where no address range can be reserved, the request fails and the instance stays usable."""
    ledger.table.reserve = MALLOC(lambda _, size: 0)
    made = library.kvobs_create(ctypes.byref(_abi.settings_struct(Settings(expandable_segments=True))), 300 * MIB,
                                ctypes.byref(ledger.table))
    address = c_uint64()
    assert library.kvobs_alloc(made, 0, 0, MIB, ctypes.byref(address)) == _abi.OUT_OF_MEMORY
    assert library.kvobs_set(made, ctypes.byref(_abi.settings_struct(Settings()))) == _abi.OK
    assert library.kvobs_alloc(made, 0, 0, MIB, ctypes.byref(address)) == _abi.OK
    library.kvobs_destroy(made)
