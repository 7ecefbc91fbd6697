"""The module ``torch.vgpu``, which torch and its libraries look for beside an accelerator; its names are CUDA's."""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from kvobs.catalog import LATENCY_BOUNDS_NS
from kvobs.model import LatencyCounts
from kvobs.virtual._library import OBSERVER, Library
from kvobs.virtual._memory import Memory

Observer = Callable[[int, int, int, int], None]
_HOST = -1


def install(torch: Any, library: Library, capacities: tuple[int, ...]) -> None:
    """Register the module; ``torch.vgpu`` exists from now on."""
    module = ModuleType("torch.vgpu", __doc__)
    memory = Memory(torch, library, capacities)
    device = _Devices(torch, library, memory, len(capacities))
    own = ModuleType("torch.vgpu.memory", Memory.__doc__)
    for name in ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
                 "reset_peak_memory_stats", "reset_accumulated_memory_stats", "empty_cache", "mem_get_info",
                 "set_per_process_memory_fraction", "get_per_process_memory_fraction", "memory_snapshot",
                 "is_history_enabled"):
        setattr(module, name, getattr(memory, name))
        setattr(own, name, getattr(memory, name))
    vars(own).update(_snapshot=memory.snapshot, _dump_snapshot=memory.dump_snapshot,
                     _record_memory_history=memory.record_memory_history)
    vars(module).update(memory=own, _is_in_bad_fork=lambda: False)  # its memory is copied by a fork as all of it is
    for name in dir(device):
        if not name.startswith("_"):
            setattr(module, name, getattr(device, name))
    torch._register_device_module("vgpu", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


class PrivatePool:
    """A private pool, as a CUDA graph has one: its segments serve nobody else until it is let go."""

    _numbers = itertools.count(1)

    def __init__(self, library: Library) -> None:
        self._library, self._number = library, next(PrivatePool._numbers)
        self._opened: set[int] = set()

    @property
    def id(self) -> tuple[int, int]:
        """Its name in snapshots."""
        return 0, self._number

    def _open(self, device: int) -> int:
        if device not in self._opened:
            self._opened.add(device)
            self._library.check(self._library.open_pool(device, self._number))
        return self._number

    def __del__(self) -> None:
        for device in self._opened:
            self._library.release_pool(device, self._number)


class _Devices:
    """Devices, streams, random numbers; and what only a virtual GPU can tell or do."""

    def __init__(self, torch: Any, library: Library, memory: Memory, count: int) -> None:
        self._torch, self._library, self._memory, self._count = torch, library, memory, count
        self._observers: list[Observer] = []
        self._observing = threading.Lock()
        self._callback = OBSERVER(self._out_of_memory)
        accelerator = torch.accelerator

        class device(accelerator.device_index):  # type: ignore[misc,name-defined]
            """Make a device the current one for a while."""

            def __init__(self, device: Any) -> None:
                super().__init__(memory.index(device))

        self.device, self.Stream, self.Event = device, torch.Stream, torch.Event

    def is_available(self) -> bool:
        """There is a device."""
        return True

    def is_initialized(self) -> bool:
        """It can be used."""
        return True

    def device_count(self) -> int:
        """How many devices were set up."""
        return self._count

    def current_device(self) -> int:
        """The calling thread's device."""
        return int(self._torch.accelerator.current_device_index())

    def set_device(self, device: Any) -> None:
        """Make a device the calling thread's."""
        self._torch.accelerator.set_device_index(self._memory.index(device))

    def synchronize(self, device: Any = None) -> None:
        """Wait for a device: work is done as it is given, so that only held streams are let go."""
        self._torch.accelerator.synchronize(self._memory.index(device))

    def get_device_name(self, device: Any = None) -> str:
        """What it is."""
        return f"kvobs virtual GPU {self._memory.index(device)}"

    def current_stream(self, device: Any = None) -> Any:
        """The calling thread's stream on a device."""
        return self._torch.accelerator.current_stream(self._memory.index(device))

    def stream(self, stream: Any) -> Any:
        """A context in which a stream is the current one."""
        return stream

    def manual_seed(self, seed: int) -> None:
        """Seed the host's generator, from which kernels draw that are given none of their own."""
        self._torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """The same: the devices share it."""
        self.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Any:
        """The state of that generator."""
        return self._torch.default_generator.get_state()

    def set_rng_state(self, state: Any, device: Any = None) -> None:
        """Set it."""
        self._torch.default_generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[Any]:
        """Types that autocast may use."""
        return [self._torch.bfloat16, self._torch.float16]

    def is_bf16_supported(self) -> bool:
        """The host computes in bfloat16."""
        return True

    def attach_out_of_memory_observer(self, observer: Observer) -> None:
        """Call ``observer(device, requested, allowed, free)``, in bytes, before an OutOfMemoryError is raised."""
        with self._observing:
            self._observers = [*self._observers, observer]
            self._library.observe(self._callback)

    def detach_out_of_memory_observer(self, observer: Observer) -> None:
        """Call it no more."""
        with self._observing:
            self._observers = [one for one in self._observers if one != observer]
            if not self._observers:
                self._library.observe(OBSERVER())

    def copies(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Copies between devices so far: (from, to) to (copies, bytes); the host is ``cpu``."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        pair = array("Q", (0, 0))
        for source, sink in itertools.permutations(range(_HOST, self._count), 2):
            self._library.copies(source, sink, pair.buffer_info()[0])
            if pair[0]:
                found[_name(source), _name(sink)] = pair[0], pair[1]
        return found

    def largest_free(self, device: Any = None) -> int:
        """Bytes of the largest free block of any stream and pool."""
        return int(self._library.largest_free(self._memory.index(device)))

    def latency_profile(self) -> str | None:
        """The profile that the time of device calls is modelled with; None: they take no time but the host's."""
        from kvobs.virtual._setup import profile_name

        return profile_name()

    def hold(self, stream: Any) -> None:
        """Keep a stream busy until it is synchronized: what it uses and is freed stays pending."""
        self._library.check(self._library.hold(stream.device_index, stream.stream_id, 1))

    def MemPool(self) -> PrivatePool:
        """A new private pool."""
        return PrivatePool(self._library)

    @contextmanager
    def use_mem_pool(self, pool: PrivatePool, device: Any = None) -> Iterator[None]:
        """Serve the calling thread's requests for a device from a private pool."""
        index = self._memory.index(device)
        before = self._library.enter_pool(index, pool._open(index))
        try:
            yield
        finally:
            self._library.enter_pool(index, before)

    def allocation_latencies(self, device: Any, bounds_ns: Sequence[int]) -> LatencyCounts:
        """How long requests took so far, by buckets: those of ``kvobs.alloc.latency``, which alone are counted.

        Raises:
            ValueError: the bounds are others.
        """
        own = LATENCY_BOUNDS_NS
        if list(bounds_ns) != list(own):
            raise ValueError(f"Latencies are counted up to {list(own)} ns, and not for {list(bounds_ns)}.")
        counts, totals = array("Q", bytes(8 * (len(own) + 1))), array("Q", bytes(40))
        self._library.check(self._library.timing(self._memory.index(device), counts.buffer_info()[0],
                                                 totals.buffer_info()[0]))
        allocations, frees, allocated_bytes, freed_bytes, sum_ns = totals
        return LatencyCounts(allocations, frees, allocated_bytes, freed_bytes, tuple(counts), sum_ns, sampled_every=1)

    def _out_of_memory(self, device: int, requested: int, allowed: int, free: int) -> None:
        with ExitStack() as stack:  # all are called, whichever of them raises
            for observer in reversed(self._observers):
                stack.callback(observer, device, requested, allowed, free)


def _name(number: int) -> str:
    return "cpu" if number == _HOST else f"vgpu:{number}"
