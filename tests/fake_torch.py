"""A torch for CUDA without a device: the names that kvobs reads, answering with what the test sets.

The nested statistics follow the schema that ``torch.cuda.memory_stats`` documents (torch 2.13); the order of events in
``cuda`` (queued calls run once, at initialisation, under the lock) follows ``torch/cuda/__init__.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

MiB = 1 << 20
GiB = 1 << 30


def stat(current: int, peak: int | None = None, allocated: int | None = None) -> dict[str, dict[str, int]]:
    """One family: the same figures for ``all`` and the large pool, nothing in the small pool."""
    peak = current if peak is None else peak
    allocated = peak if allocated is None else allocated
    figures = {"current": current, "peak": peak, "allocated": allocated, "freed": allocated - current}
    return {"all": figures, "large_pool": dict(figures), "small_pool": dict.fromkeys(figures, 0)}


def stats(**families: Any) -> dict[str, Any]:
    """Statistics of a device with 3 GiB reserved of which 2 GiB are allocated; ``families`` replace parts of them."""
    whole = {
        "num_alloc_retries": 2, "num_ooms": 1, "max_split_size": -1, "num_sync_all_streams": 0,
        "num_device_alloc": 7, "num_device_free": 3,
        "allocated_bytes": stat(2 * GiB), "reserved_bytes": stat(3 * GiB), "active_bytes": stat(2 * GiB + 64 * MiB),
        "requested_bytes": stat(2 * GiB - MiB), "allocation": stat(400), "segment": stat(40), "active": stat(404),
        "inactive_split": stat(12), "inactive_split_bytes": stat(300 * MiB),
        "oversize_allocations": stat(0)["all"], "oversize_segments": stat(0)["all"],
    }
    return whole | families


def unused() -> dict[str, Any]:
    """Statistics of a device that this process has not used."""
    return {name: stat(0) if isinstance(value, dict) and "all" in value else value if isinstance(value, dict) else 0
            for name, value in stats().items()}


def segment(*blocks: tuple[int, str], device: int = 0, stream: int = 0, pool: tuple[int, int] = (0, 0),
            kind: str = "large", expandable: bool = False) -> dict[str, Any]:
    """A segment of ``torch.cuda.memory_snapshot`` made of the blocks (size, state)."""
    return {"device": device, "stream": stream, "segment_pool_id": pool, "segment_type": kind,
            "is_expandable": expandable, "address": 0, "total_size": sum(size for size, _ in blocks),
            "blocks": [{"address": 0, "size": size, "requested_size": size, "state": state} for size, state in blocks]}


def timed(buckets: list[int], sum_ns: int = 0, frees: int = 0) -> dict[str, Any]:
    """What a virtual GPU tells of allocations of 1 MiB each, all of them timed."""
    return {"allocations": sum(buckets), "frees": frees, "allocated_bytes": sum(buckets) * MiB,
            "freed_bytes": frees * MiB, "buckets": tuple(buckets), "sum_ns": sum_ns, "sampled_every": 1}


class FakeGraph:
    """A CUDA graph that can fail to begin."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> str:
        if self.error is not None:
            raise self.error
        return capture_error_mode

    def capture_end(self) -> None:
        pass


class FakeTorch:
    """The injected module. ``devices`` holds each device's nested statistics."""

    def __init__(self, devices: list[dict[str, Any]] | None = None, *, kind: str | None = "cuda",
                 backend: str = "native", settings: str = "", initialised: bool = True) -> None:
        self.devices = [stats()] if devices is None else devices
        self.kind, self.backend, self.conf = kind, backend, settings
        self.ready, self.forked, self.history = initialised, False, False
        self.snapshot: list[dict[str, Any]] = []
        self.snapshots = 0
        self.reads: list[int] = []
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self._C = SimpleNamespace(
            _accelerator_isAllocatorInitialized=lambda: self.ready,
            _accelerator_getDeviceStats=self._stats,
            _accelerator_getAllocatorSettings=lambda: self.conf,
            _cuda_getAllocatorBackend=lambda: self.backend,
            _cuda_isHistoryEnabled=lambda: self.history,
            _cuda_attach_out_of_memory_observer=self._attach)
        self.accelerator = SimpleNamespace(
            current_accelerator=lambda: None if self.kind is None else SimpleNamespace(type=self.kind),
            device_count=lambda: len(self.devices))
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.ready and not self.forked, _is_in_bad_fork=lambda: self.forked,
            _queued_calls=[(self.host_call, [])], _initialization_lock=threading.Lock(), _lazy_call=self._lazy_call,
            graphs=SimpleNamespace(CUDAGraph=type("CUDAGraph", (FakeGraph,), dict(vars(FakeGraph)))),
            memory=SimpleNamespace(memory_snapshot=self._snapshot), mem_get_info=self._info)
        self.virtual_observers: list[Callable[[int, int, int, int], None]] = []
        if kind == "vgpu":
            self.vgpu = self._virtual()

    def without_cuda(self) -> FakeTorch:
        """Make it a build for the CPU, which has none of CUDA's functions in C."""
        for name in [name for name in vars(self._C) if name.startswith("_cuda_")]:
            delattr(self._C, name)
        return self

    def register(self) -> None:
        """The host registers a virtual GPU, which is the accelerator from then on."""
        self.kind, self.ready, self.vgpu = "vgpu", True, self._virtual()

    def _virtual(self) -> SimpleNamespace:
        """The module of a registered accelerator: the names of ``torch.cuda``, and what only a virtual GPU tells."""
        self.copied: dict[tuple[str, str], tuple[int, int]] = {}
        self.timed: dict[int, dict[str, Any]] = {}
        self.largest: dict[int, int] = {}
        self.profile: str | None = None
        self.stream = 0
        return SimpleNamespace(
            memory_snapshot=self._snapshot, mem_get_info=self._info, is_history_enabled=lambda: self.history,
            current_stream=lambda index: SimpleNamespace(stream_id=self.stream),
            attach_out_of_memory_observer=self.virtual_observers.append,
            detach_out_of_memory_observer=self._detach,
            copies=lambda: dict(self.copied), latency_profile=lambda: self.profile,
            largest_free=lambda index: self.largest.get(index, 0),
            allocation_latencies=lambda index, bounds_ns: self.timed.get(index, timed([0] * (len(bounds_ns) + 1))))

    def _detach(self, observer: Callable[[int, int, int, int], None]) -> None:
        at = next(at for at, found in enumerate(self.virtual_observers) if found is observer)
        del self.virtual_observers[at]

    def _info(self, index: int) -> tuple[int, int]:
        return GiB, 80 * GiB

    def host_call(self) -> None:
        """Something that the host itself had queued for CUDA."""

    def initialise(self) -> None:
        """The host uses CUDA for the first time."""
        with self.cuda._initialization_lock:
            for call, _ in self.cuda._queued_calls:
                call()
            self.ready = True

    def run_out(self, device: int = 0, requested: int = 2 * GiB) -> None:
        """An allocation fails for good: the observers are called as the allocator calls them."""
        for observer in list(self.virtual_observers if self.kind == "vgpu" else self.observers):
            observer(device, requested, 80 * GiB, 100 * MiB)

    def _lazy_call(self, call: Callable[[], None]) -> None:
        with self.cuda._initialization_lock:
            if self.cuda.is_initialized():
                call()
            else:
                self.cuda._queued_calls.append((call, []))

    def _attach(self, observer: Callable[[int, int, int, int], None]) -> None:
        if self.backend != "native":
            raise RuntimeError("attachOutOfMemoryObserver is not supported")
        self.observers.append(observer)

    def _stats(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        return self.devices[index]

    def _snapshot(self, mempool_id: object = None, include_traces: bool = True) -> list[dict[str, Any]]:
        assert not include_traces, "A snapshot with traces costs without bound."
        self.snapshots += 1
        return self.snapshot
