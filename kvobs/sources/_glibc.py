"""Reading glibc's malloc: ``mallinfo2`` and ``malloc_info`` through ctypes (which lets go of the GIL meanwhile)."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import msgspec

NOT_GLIBC = "The C library is not glibc, so its heap is not told."
TOO_OLD = "glibc before 2.33 has no mallinfo2, whose 64-bit sizes are needed."
_PROBE_BYTES, _PROBES = 1 << 20, 3


class MallInfo(msgspec.Struct, frozen=True):
    """``mallinfo2`` in bytes: of all arenas, but ``top`` (keepcost) of the main one only."""

    arena: int
    used: int
    free: int
    mapped: int
    top: int


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


class _Symbol(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]


class Glibc:
    """The malloc of this process, where it is glibc's."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc
        libc.mallinfo2.restype = _Mallinfo2
        libc.malloc.restype = ctypes.c_void_p
        libc.malloc.argtypes = [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.open_memstream.restype = ctypes.c_void_p
        libc.open_memstream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        libc.fclose.argtypes = [ctypes.c_void_p]
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
        libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]

    def mallinfo(self) -> MallInfo:
        """The sums over all arenas (tried: a second thread's arena is in them)."""
        found = self._libc.mallinfo2()
        return MallInfo(found.arena, found.uordblks, found.fordblks, found.hblkhd, found.keepcost)

    def trim(self) -> bool:
        """Return free pages of every arena to the system; whether there were any."""
        return bool(self._libc.malloc_trim(0))

    def malloc_info(self) -> str:
        """The XML of ``malloc_info``, or nothing where it could not be written."""
        buffer, size = ctypes.c_void_p(), ctypes.c_size_t()
        stream = self._libc.open_memstream(ctypes.byref(buffer), ctypes.byref(size))
        if not stream:
            return ""
        failed = self._libc.malloc_info(0, stream)
        failed = self._libc.fclose(stream) or failed
        try:
            return "" if failed or not buffer.value else ctypes.string_at(buffer.value, size.value).decode("ascii")
        finally:
            self._libc.free(buffer)

    def serves_malloc(self) -> bool:
        """Do ``malloc``'s blocks show in ``mallinfo2``? With another malloc in front of glibc's they do not."""
        for _ in range(_PROBES):  # other threads allocate and free meanwhile
            before = self.mallinfo()
            block = self._libc.malloc(_PROBE_BYTES)
            after = self.mallinfo()
            self._libc.free(block)
            if block and after.used + after.mapped - before.used - before.mapped >= _PROBE_BYTES:
                return True
        return False

    def malloc_file(self) -> str:
        """The file name of the library that ``malloc`` comes from."""
        symbol = _Symbol()
        address = ctypes.cast(self._libc.malloc, ctypes.c_void_p)
        if not self._libc.dladdr(address, ctypes.byref(symbol)) or not symbol.file:
            return ""
        return os.fsdecode(os.path.basename(symbol.file))


def resident_bytes(root: str = "/proc") -> int | None:
    """Bytes of this process that lie in memory; None where the system does not tell."""
    try:
        with open(f"{root}/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def find(libc: Any = None) -> Glibc | str:
    """The malloc of glibc, or the reason why it is not the one of this process."""
    try:
        libc = ctypes.CDLL(None) if libc is None else libc
        libc.gnu_get_libc_version  # noqa: B018 - asked whether it is there
    except (AttributeError, OSError, TypeError):
        return NOT_GLIBC
    try:
        glibc = Glibc(libc)
    except AttributeError:
        return TOO_OLD
    if glibc.serves_malloc():
        return glibc
    return f"Another malloc ({glibc.malloc_file() or 'unknown'}) serves this process, of which glibc knows nothing."
