"""``torch.vgpu.memory``: statistics, snapshots and histories, with the names and schemas of ``torch.cuda.memory``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from kvobs.allocator import torch_schema
from kvobs.virtual._library import Library
from kvobs.virtual._snapshot import take

_LEVELS = {None: 0, "state": 1, "alloc": 2, "all": 3}
_NO_LIMIT = (1 << 63) - 1


class Memory:
    """The functions over one process's devices."""

    def __init__(self, torch: Any, library: Library, capacities: tuple[int, ...]) -> None:
        self._torch, self._library, self._capacities = torch, library, capacities

    def index(self, device: Any = None) -> int:
        """The number of a device, given as torch lets it be given; of the current one for None.

        Raises:
            ValueError: it is none of the virtual devices.
        """
        if device is None:
            return int(self._torch.accelerator.current_device_index())
        found = device if isinstance(device, int) else self._torch.device(device).index
        if found is None:
            found = self._torch.accelerator.current_device_index()
        if not isinstance(device, int) and self._torch.device(device).type != "vgpu":
            raise ValueError(f"{device} is no virtual device; vgpu:0 to vgpu:{len(self._capacities) - 1} are.")
        if not 0 <= found < len(self._capacities):
            raise ValueError(f"There is no device vgpu:{found}; {len(self._capacities)} are set up.")
        return int(found)

    def memory_stats(self, device: Any = None) -> dict[str, Any]:
        """The allocator's statistics, flat, under torch's own names."""
        found: dict[str, Any] = self._torch.accelerator.memory_stats(self.index(device))
        return found

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes of live tensors' blocks."""
        return int(self.memory_stats(device)["allocated_bytes.all.current"])

    def max_memory_allocated(self, device: Any = None) -> int:
        """Their peak."""
        return int(self.memory_stats(device)["allocated_bytes.all.peak"])

    def memory_reserved(self, device: Any = None) -> int:
        """Bytes that the allocator holds of the device."""
        return int(self.memory_stats(device)["reserved_bytes.all.current"])

    def max_memory_reserved(self, device: Any = None) -> int:
        """Their peak."""
        return int(self.memory_stats(device)["reserved_bytes.all.peak"])

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Begin the peaks anew."""
        self._torch.accelerator.reset_peak_memory_stats(self.index(device))

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        """Begin what is summed anew."""
        self._torch.accelerator.reset_accumulated_memory_stats(self.index(device))

    def empty_cache(self) -> None:
        """Return every segment to the devices that holds nothing."""
        self._torch.accelerator.empty_cache()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Bytes of the device that are free, and all of them."""
        free, total = self._torch.accelerator.get_memory_info(self.index(device))
        return int(free), int(total)

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """Reserve no more than this share of a device (0 to 1) from now on.

        Raises:
            ValueError: out of range.
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"A memory fraction of {fraction} is not allowed; from 0 to 1 is.")
        self._library.check(self._library.set_fraction(self.index(device), float(fraction)))

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        """The share that may be reserved."""
        share = self._library.settings_of(self.index(device)).memory_fraction
        return 1.0 if share is None else share

    def memory_snapshot(self, mempool_id: tuple[int, int] | None = None,
                        include_traces: bool = True) -> list[dict[str, Any]]:
        """Segments and blocks of all devices, or of one private pool; never with traces, whatever is asked."""
        found = [segment for index in range(len(self._capacities)) for segment in take(self._library, index, False)[0]]
        return [segment for segment in found if mempool_id is None or segment["segment_pool_id"] == mempool_id]

    def snapshot(self, device: Any = None) -> dict[str, Any]:
        """State, histories and settings of all devices, or of one, as ``torch.cuda.memory._snapshot`` gives them."""
        wanted = range(len(self._capacities)) if device is None else [self.index(device)]
        segments: list[dict[str, Any]] = []
        traces: list[list[dict[str, Any]]] = []
        for index in range(len(self._capacities)):
            own, events = take(self._library, index, True) if index in wanted else ([], [])
            segments += own
            traces.append(events)
        return {"segments": segments, "device_traces": traces, "allocator_settings": self._settings(),
                "external_annotations": []}

    def dump_snapshot(self, filename: str | Path = "dump_snapshot.pickle") -> None:
        """Write ``snapshot()`` as a pickle, which ``kvobs explain`` and torch's memory viewer read."""
        Path(filename).write_bytes(pickle.dumps(self.snapshot()))

    def record_memory_history(self, enabled: str | None = "all", context: str | None = "all", stacks: str = "all",
                              max_entries: int = _NO_LIMIT, device: Any = None, clear_history: bool = False) -> None:
        """Keep a ring of the last ``max_entries`` events per device, with Python stacks; None stops.

        Args are those of ``torch.cuda.memory._record_memory_history``; stacks of C++ are not recorded.

        Raises:
            ValueError: one is not allowed.
        """
        if enabled not in (None, "state", "all"):
            raise ValueError(f"enabled={enabled!r} is not allowed; None, 'state' and 'all' are.")
        if context not in _LEVELS:
            raise ValueError(f"context={context!r} is not allowed; None, 'state', 'alloc' and 'all' are.")
        if stacks not in ("python", "all"):
            raise ValueError(f"stacks={stacks!r} is not allowed; 'python' and 'all' are.")
        entries = max(1, min(max_entries, _NO_LIMIT)) if enabled == "all" else 1
        for index in range(len(self._capacities)) if device is None else [self.index(device)]:
            self._library.check(self._library.history(
                index, int(enabled is not None), _LEVELS[context] if enabled else 0, entries,
                int(clear_history or enabled is None)))

    def is_history_enabled(self) -> bool:
        """Is a history recorded on any device?"""
        return any(self._library.records(index) for index in range(len(self._capacities)))

    def _settings(self) -> dict[str, Any]:
        text, own = self._torch._C._accelerator_getAllocatorSettings(), self._library.settings_of(0)
        return torch_schema.settings(own, text) | {"PYTORCH_ALLOC_CONF": text}
