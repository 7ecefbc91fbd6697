"""The compiled counter around torch's CPU allocator: what it is made from, and its functions."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from kvobs.allocator._build import BuildError, Unit, library
from kvobs.catalog import LATENCY_BOUNDS_NS
from kvobs.model import LatencyCounts

SOURCES = Path(__file__).resolve().parent / "native"
# Torch's CPU allocator itself, or beneath the one that is, or taken away, or turned down. In the order of the C++ enum.
Place = Literal["on top", "beneath", "away", "refused"]
_PLACES: tuple[Place, ...] = ("on top", "beneath", "away", "refused")
_FIXED = 6  # numbers before the buckets


def unit(torch: ModuleType) -> Unit:
    """The counter for this torch: of its headers, its version and its C++ ABI."""
    home = Path(str(torch.__file__)).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return Unit("the CPU allocation probe", "cpu_probe.cpp", (SOURCES,),
                ("-I", str(home / "include"), f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-L", str(home / "lib"), "-lc10",
                 "-ldl"), (str(torch.__version__),))


def load(torch: ModuleType) -> Probe:
    """The counter, from the cache or compiled now (about 2 s); it stays loaded for the process's life.

    Raises:
        BuildError: why there is none; one sentence.
    """
    try:
        return Probe(library(unit=unit(torch)))
    except (AttributeError, OSError) as error:
        raise BuildError(f"The CPU allocation probe does not fit this torch: {error}.") from None


class Probe:
    """One per process, however often it is loaded: the library holds the state."""

    def __init__(self, native: Any) -> None:
        native.kvobs_probe_install.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int, ctypes.c_uint32]
        native.kvobs_probe_read.argtypes = [ctypes.POINTER(ctypes.c_uint64)]
        native.kvobs_probe_read.restype = None
        native.kvobs_probe_pause.argtypes = [ctypes.c_int]
        native.kvobs_probe_pause.restype = None
        self._native, self._every = native, 1

    def place(self) -> Place:
        """Where the probe is now."""
        return _PLACES[int(self._native.kvobs_probe_place())]

    def remove(self) -> Place:
        """Count no more, and put the allocator from before back unless another one came on top; returns the place."""
        return _PLACES[int(self._native.kvobs_probe_remove())]

    def install(self, sampled_every: int) -> Place:
        """Count from now on, in front of the allocator of now, and time one of so many; returns the place."""
        self._every = sampled_every
        bounds = (ctypes.c_int64 * len(LATENCY_BOUNDS_NS))(*LATENCY_BOUNDS_NS)
        return _PLACES[int(self._native.kvobs_probe_install(bounds, len(LATENCY_BOUNDS_NS), sampled_every))]

    def pause(self, paused: bool) -> None:
        """Count no new allocations for a while; the frees of counted ones still are."""
        self._native.kvobs_probe_pause(paused)

    def sized(self) -> bool:
        """Whether the sizes of blocks are known (they are glibc's), or all bytes are 0."""
        return bool(self._native.kvobs_probe_sized())

    def read(self) -> LatencyCounts:
        """What was counted since the library was loaded (in a forked child: by its parent too)."""
        numbers = (ctypes.c_uint64 * (_FIXED + len(LATENCY_BOUNDS_NS) + 1))()
        self._native.kvobs_probe_read(numbers)
        return LatencyCounts(
            allocations=numbers[0], frees=numbers[1], allocated_bytes=numbers[2], freed_bytes=numbers[3],
            untracked=numbers[4], sum_ns=numbers[5], buckets=tuple(numbers[_FIXED:]), sampled_every=self._every)
