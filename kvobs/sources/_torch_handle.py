"""What is read of torch, at the names where its versions keep it; nothing here initialises a device.

torch's own exceptions pass through. Statistics of the native CUDA allocator cost one lock and a copy of counters
(17 us), no call of the driver and no synchronisation; the GIL is held meanwhile, at worst for as long as an engine's
thread holds that lock in a cudaMalloc.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

CUDA = "cuda"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class Torch:
    """A torch module, real or injected, of which only public state and these functions are used."""

    def __init__(self, torch: Any, environ: Mapping[str, str] = os.environ) -> None:
        self._torch, self._c, self._environ = torch, torch._C, environ

    def built_with_cuda(self) -> bool:
        """Is this a build for CUDA (or ROCm), whatever devices there are?"""
        return hasattr(self._c, "_cuda_attach_out_of_memory_observer")

    def accelerator(self) -> str | None:
        """The type of accelerator that this build is for, or that has registered itself; no device is asked."""
        found = self._torch.accelerator.current_accelerator()
        return None if found is None else str(found.type)

    def initialised(self, kind: str) -> bool:
        """Has the host initialised the accelerator's allocator?

        Raises:
            RuntimeError: the back end has no allocator of the kind that tells statistics.
        """
        if kind == CUDA and not self._torch.cuda.is_initialized():
            return False
        probe = getattr(self._c, "_accelerator_isAllocatorInitialized", None)
        if probe is not None:
            return bool(probe())
        if kind == CUDA:
            return True  # torch before 2.9: with CUDA comes its allocator
        raise RuntimeError("This torch does not tell the statistics of other accelerators than CUDA.")

    def inherited(self) -> bool:
        """Asked in a forked child: had the parent initialised its accelerator?"""
        try:
            if self.built_with_cuda() and self._torch.cuda._is_in_bad_fork():
                return True
            kind = self.accelerator()
            return kind is not None and self.initialised(kind)
        except RuntimeError:
            return False

    def device_count(self) -> int:
        """How many devices there are; asked only once they are initialised."""
        return int(self._torch.accelerator.device_count())

    def stats(self, index: int) -> Mapping[str, Any]:
        """The nested statistics of a device's allocator."""
        read = getattr(self._c, "_accelerator_getDeviceStats", None) or self._c._cuda_memoryStats
        found: Mapping[str, Any] = read(index)
        return found

    def backend(self, kind: str) -> str:
        """The allocator's back end: native, cudaMallocAsync, or another one's name."""
        read = getattr(self._c, "_cuda_getAllocatorBackend", None)
        return str(read()) if kind == CUDA and read is not None else "native"

    def settings(self) -> tuple[str, bool]:
        """The settings string in effect, and whether the allocator itself told it (else it is the environment's)."""
        read = getattr(self._c, "_accelerator_getAllocatorSettings", None)
        if read is not None:
            return str(read()), True
        return next((self._environ[name] for name in _VARIABLES if self._environ.get(name)), ""), False

    def free_bytes(self, index: int) -> tuple[int, int | None]:
        """Bytes that a CUDA device has free, and those that this process may reserve (None: all); asks the driver.

        Only of a device that the process uses: any other one would get a context.
        """
        free, total = self._torch.cuda.mem_get_info(index)
        read = getattr(self._torch.cuda, "get_per_process_memory_fraction", None)
        share = float(read(index)) if read is not None else 1.0  # older ones do not tell
        return int(free), int(share * total) if share < 1 else None

    def records_history(self) -> bool:
        """Does the host record a memory history?"""
        read = getattr(self._c, "_cuda_isHistoryEnabled", None)
        return bool(read()) if read is not None else False

    def segments(self) -> list[Mapping[str, Any]]:
        """The segments of all CUDA devices, without traces."""
        read = self._torch.cuda.memory.memory_snapshot
        bare = {"include_traces": False} if "include_traces" in inspect.signature(read).parameters else {}
        found: list[Mapping[str, Any]] = read(**bare)
        return found
