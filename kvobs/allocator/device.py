"""What an allocator takes memory from: the calls it makes, and a device that exists only in numbers."""

from __future__ import annotations

from typing import Protocol

from kvobs.allocator.settings import MIB

FIRST_ADDRESS, FIRST_RESERVATION = 0x7F00_0000_0000, 1 << 50
GRANULE = 2 * MIB


class Device(Protocol):
    """The calls of an allocator, in bytes. Addresses are integers; nothing is ever read or written there."""

    capacity: int | None
    space: int | None  # bytes of addresses that an expandable segment reserves; None: far more than is ever needed

    def malloc(self, size: int) -> int | None:
        """Take memory (cudaMalloc): an address, or None when the device has none left."""

    def free(self, address: int, size: int) -> None:
        """Give back what malloc gave (cudaFree)."""

    def reserve(self, size: int) -> int:
        """An address range without memory behind it (cuMemAddressReserve)."""

    def map(self, address: int, size: int) -> bool:
        """Put memory behind whole pages (cuMemCreate, cuMemMap): behind all of them, or none and False."""

    def unmap(self, address: int, size: int) -> None:
        """Take the memory from whole pages again (cuMemUnmap, cuMemRelease)."""


class SimulatedDevice:
    """A device of ``capacity`` bytes (None: without limit) whose addresses only ever grow.

    A real device gives addresses of its own choice; they matter to the allocator only where two free blocks of equal
    size compete.
    """

    def __init__(self, capacity: int | None = None, space: int | None = None) -> None:
        self.capacity = capacity
        # PyTorch reserves 1.125 times the device's memory, so that pages can move to the end of a segment.
        self.space = capacity + capacity // 8 if space is None and capacity is not None else space
        self.used = 0
        self._next_address, self._next_reservation = FIRST_ADDRESS, FIRST_RESERVATION

    def malloc(self, size: int) -> int | None:
        """Take memory; None when it does not fit any more."""
        if not self._take(size):
            return None
        address = self._next_address
        self._next_address += -(-size // GRANULE) * GRANULE
        return address

    def free(self, address: int, size: int) -> None:
        """Give memory back."""
        self.used -= size

    def reserve(self, size: int) -> int:
        """Addresses of their own kind."""
        address = self._next_reservation
        self._next_reservation += -(-size // GRANULE) * GRANULE
        return address

    def map(self, address: int, size: int) -> bool:
        """Put memory behind addresses; False when it does not fit any more."""
        return self._take(size)

    def unmap(self, address: int, size: int) -> None:
        """Take it away again."""
        self.used -= size

    def _take(self, size: int) -> bool:
        if self.capacity is not None and self.used + size > self.capacity:
            return False
        self.used += size
        return True
