"""What is read of torch, at the names where its versions keep it; nothing here initialises a device.

A kind of accelerator is the type of its devices: ``cuda``, or the name of a registered one such as ``vgpu``, whose own
functions are sought in ``torch.<kind>`` under the names that they have in ``torch.cuda``.

torch's own exceptions pass through. Statistics of the native CUDA allocator cost one lock and a copy of counters
(17 us), no call of the driver and no synchronisation; the GIL is held meanwhile, at worst for as long as an engine's
thread holds that lock in a cudaMalloc.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from kvobs.sources._torch_stats import NATIVE

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

    def in_use(self) -> str | None:
        """The type of accelerator whose allocator the host has initialised, if there is one that tells statistics."""
        try:
            kind = self.accelerator()
            return kind if kind is not None and self.initialised(kind) else None
        except (AttributeError, RuntimeError):
            return None

    def inherited(self) -> bool:
        """Asked in a forked child: had the parent initialised an accelerator that cannot be used in its children?"""
        if self.built_with_cuda() and self._torch.cuda._is_in_bad_fork():
            return True
        kind = self.in_use()
        unusable = getattr(self.device_module(kind), "_is_in_bad_fork", None) if kind not in (None, CUDA) else None
        return bool(unusable()) if unusable is not None else kind is not None

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
        return str(read()) if kind == CUDA and read is not None else NATIVE

    def settings(self) -> tuple[str, bool]:
        """The settings string in effect, and whether the allocator itself told it (else it is the environment's)."""
        read = getattr(self._c, "_accelerator_getAllocatorSettings", None)
        if read is not None:
            return str(read()), True
        return next((self._environ[name] for name in _VARIABLES if self._environ.get(name)), ""), False

    def settings_module(self) -> Any:
        """``torch._C``, which has the setter of the allocator's settings."""
        return self._c

    def empty_cache(self) -> None:
        """Return cached segments that hold nothing; waits for the devices."""
        accelerator = self._torch.accelerator
        empty = getattr(accelerator, "empty_cache", None)
        if empty is None:  # torch before 2.9
            empty = self._torch.cuda.empty_cache
        empty()

    def synchronise(self, index: int) -> None:
        """Wait for a device."""
        self._torch.accelerator.synchronize(index)

    def device_module(self, kind: str) -> Any:
        """``torch.<kind>``, in which a kind of accelerator has its own functions; None where there is none."""
        return getattr(self._torch, kind, None)

    def unlisted(self, kind: str) -> str:
        """Why the segments of this kind's allocator cannot be read for a verdict; empty where they can."""
        backend, module = self.backend(kind), self.device_module(kind)
        if backend != NATIVE:
            return f"only a native caching allocator lists its segments, and here there is {backend} of {kind}"
        if _snapshot(module) is None or not hasattr(module, "mem_get_info"):
            return f"torch.{kind} does not list its segments and free bytes (memory_snapshot, mem_get_info)"
        if kind != CUDA and not _bare(module) and self._history(kind) is None:
            return f"torch.{kind} does not tell whether a memory history is recorded, nor leaves one out of a snapshot"
        return ""

    def free_bytes(self, kind: str, index: int) -> tuple[int, int | None]:
        """Bytes that a device has free, and those that this process may reserve (None: all); asks the driver.

        Only of a device that the process uses: any other one would get a context.
        """
        module = self.device_module(kind)
        free, total = module.mem_get_info(index)
        read = getattr(module, "get_per_process_memory_fraction", None)
        share = float(read(index)) if read is not None else 1.0  # older ones do not tell
        return int(free), int(share * total) if share < 1 else None

    def records_history(self, kind: str) -> bool:
        """Does the host record a memory history, as far as torch tells?"""
        return bool(self._history(kind))

    def resolves_stacks(self, kind: str) -> bool:
        """Would a snapshot resolve the stacks of a recorded history, those of C++ too, which may take seconds?"""
        return self.records_history(kind) and (kind == CUDA or not _bare(self.device_module(kind)))

    def _history(self, kind: str) -> bool | None:
        read = (getattr(self._c, f"_{kind}_isHistoryEnabled", None)
                or getattr(self.device_module(kind), "is_history_enabled", None))
        return bool(read()) if read is not None else None

    def segments(self, kind: str) -> list[Mapping[str, Any]]:
        """The segments of all devices of a kind, without traces."""
        module = self.device_module(kind)
        read: Any = _snapshot(module)
        found: list[Mapping[str, Any]] = read(include_traces=False) if _bare(module) else read()
        return found

    def current_stream(self, kind: str, index: int) -> int:
        """The calling thread's current stream of a device, as segments name it; 0 where torch does not tell."""
        raw = getattr(self._c, f"_{kind}_getCurrentRawStream", None)
        if raw is not None:
            return int(raw(index))
        current = getattr(self.device_module(kind), "current_stream", None)
        return int(current(index).stream_id) if current is not None else 0


def _snapshot(module: Any) -> Any:
    return getattr(getattr(module, "memory", None), "memory_snapshot", None) or getattr(module, "memory_snapshot", None)


def _bare(module: Any) -> bool:
    """Can a snapshot leave the traces out?"""
    try:
        return "include_traces" in inspect.signature(_snapshot(module)).parameters
    except ValueError:  # a function of C that does not tell its parameters
        return False
