"""Programs of allocator operations through torch on virtual devices, and where such a device puts its segments."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from kvobs.allocator.program import ADVANCE, ALLOC, EMPTY_CACHE, FREE, RECORD_STREAM, RELEASE_POOL, SET, Program
from kvobs.allocator.settings import MIB, Settings

STREAMS = 4  # the default one and three more
NO_LIMIT = 8 << 30  # bytes of a device that these programs never fill


class LowestAddress:
    """A device that gives the lowest addresses where something fits, counted from 0, in steps of 2 MiB.

    Written apart from the virtual GPU's own account, with a sorted list of what is taken.
    """

    def __init__(self, capacity: int, told: Callable[[str, int, int], object] = lambda *_: None) -> None:
        self.capacity: int | None = capacity
        self.space: int | None = capacity + capacity // 8
        self._left, self._told = capacity, told
        self._taken: list[tuple[int, int]] = []  # start, end
        self._pages: dict[int, int] = {}  # of each range of pages: bytes mapped

    def malloc(self, size: int) -> int | None:
        """Take memory; None when it does not fit any more."""
        if size > self._left:
            return None
        self._left -= size
        address = self._place(size)
        self._told("segment_alloc", address, size)
        return address

    def free(self, address: int, size: int) -> None:
        """Give memory and its addresses back."""
        self._left += size
        self._drop(address)
        self._told("segment_free", address, size)

    def reserve(self, size: int) -> int:
        """Addresses for pages."""
        address = self._place(size)
        self._pages[address] = 0
        return address

    def map(self, address: int, size: int) -> bool:
        """Put memory behind pages; False when it does not fit any more."""
        if size > self._left:
            return False
        self._left -= size
        self._pages[self._base(address)] += size
        self._told("segment_map", address, size)
        return True

    def unmap(self, address: int, size: int) -> None:
        """Take it away again; addresses without any page are given back."""
        self._left += size
        base = self._base(address)
        self._pages[base] -= size
        if not self._pages[base]:
            del self._pages[base]
            self._drop(base)
        self._told("segment_unmap", address, size)

    def _place(self, size: int) -> int:
        size, at = -(-size // (2 * MIB)) * 2 * MIB, 0
        for start, end in self._taken:
            if start - at >= size:
                break
            at = end
        bisect.insort(self._taken, (at, at + size))
        return at

    def _drop(self, address: int) -> None:
        del self._taken[bisect.bisect_left(self._taken, (address,))]

    def _base(self, address: int) -> int:
        return max(start for start in self._pages if start <= address)


def packed(program: Program, settings: Settings) -> dict[str, Any]:
    """A program as JSON; a request of 0 bytes, which never reaches the allocator, becomes one of 1."""
    return {"op": list(program.op), "handle": list(program.handle), "size": [size or 1 for size in program.size],
            "stream": list(program.stream), "pool": list(program.pool),
            "settings": [told(one) for one in (settings, *program.settings)]}


def told(settings: Settings) -> list[Any]:
    """Settings as torch takes them: a text, and the memory fraction (-1: none).

    Two options are always said: torch 2.13 resets every one that a text leaves out but these.
    """
    words = [word for word in settings.conf().split(",") if word and not word.startswith(
        ("per_process_memory_fraction", "large_segment_size_mb", "expandable_segments"))]
    words += [f"large_segment_size_mb:{settings.large_segment_size // MIB}",
              f"expandable_segments:{settings.expandable_segments}"]
    return [",".join(words), -1.0 if settings.memory_fraction is None else settings.memory_fraction]


class Player:
    """One virtual device, driven by torch's own functions; every stream has work to do until the program says not."""

    def __init__(self, device: int) -> None:
        import torch

        from kvobs.virtual import _setup

        self.torch, self.library, self.device = torch, _setup._library_of_process, device
        self.base = self.library.base(device)
        with torch.vgpu.device(device):
            own = torch.vgpu.current_stream(device)
        made = [torch.Stream(device=f"vgpu:{device}") for _ in range(STREAMS - 1)]
        self.streams = [own, *sorted(made, key=lambda stream: stream.stream_id)]
        for stream in self.streams:
            torch.vgpu.hold(stream)

    def alloc(self, size: int, stream: int = 0, pool: int = 0) -> Any:
        """A tensor of that many bytes; None where memory ran out."""
        torch = self.torch
        before = self.library.enter_pool(self.device, pool)
        try:
            with self.streams[stream]:
                return torch.empty(size, dtype=torch.uint8, device=f"vgpu:{self.device}")
        except torch.OutOfMemoryError:
            return None
        finally:
            self.library.enter_pool(self.device, before)

    def reach(self, stream: int) -> None:
        """The device has done all that was queued on a stream."""
        self.streams[stream].synchronize()
        self.torch.vgpu.hold(self.streams[stream])

    def set(self, told: Sequence[Any]) -> None:
        """Change the settings, and the memory fraction."""
        self.torch._C._accelerator_setAllocatorSettings(told[0])
        self.library.check(self.library.set_fraction(self.device, told[1]))

    def place(self, tensor: Any) -> int:
        """A tensor's address, counted from the beginning of the device's addresses, plus 1; 0 for none."""
        return 0 if tensor is None else tensor.data_ptr() - self.base + 1

    def empty_cache(self) -> None:
        """Return what is free (of every device, as torch does it)."""
        self.torch.accelerator.empty_cache()

    def stats(self) -> dict[str, int]:
        """All statistics, flat, under torch's names."""
        return dict(self.torch.accelerator.memory_stats(self.device))

    def history(self) -> list[Any]:
        """Action, address (counted as a place is; of an OOM the free bytes), size, stream and pool of every event."""
        numbers = {stream.stream_id: number for number, stream in enumerate(self.streams)}
        return [[event["action"], event["device_free"] if event["action"] == "oom" else event["addr"] - self.base,
                 event["size"], numbers[event["stream"]], event["pool_id"][1]]
                for event in self.torch.vgpu.memory._snapshot(self.device)["device_traces"][self.device]
                if event["action"] != "snapshot"]

    def now(self) -> tuple[int, int]:
        """Bytes reserved and allocated."""
        stats = self.torch._C._accelerator_getDeviceStats(self.device)
        return stats["reserved_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]["current"]

    def segments(self) -> list[Any]:
        """The snapshot, addresses counted from the beginning of the device's, streams by their numbers here."""
        numbers = {stream.stream_id: number for number, stream in enumerate(self.streams)}
        return [[one["address"] - self.base, one["total_size"], numbers[one["stream"]], one["segment_pool_id"][1],
                 one["segment_type"] == "small", one["is_expandable"],
                 [[block["address"] - self.base, block["size"],
                   0 if block["state"] == "inactive" else block["requested_size"], block["state"]]
                  for block in one["blocks"]]]
                for one in self.torch.vgpu.memory._snapshot(self.device)["segments"]]


def conserved(stats: dict[str, int], segments: list[dict[str, Any]], device: int) -> list[str]:
    """What a device's statistics and its snapshot disagree about."""
    own = [one for one in segments if one["device"] == device]
    sums: dict[str, int] = {}
    for one in own:
        for kind in ("all", f"{one['segment_type']}_pool"):
            def add(name: str, by: int, kind: str = kind) -> None:
                sums[f"{name}.{kind}.current"] = sums.get(f"{name}.{kind}.current", 0) + by

            add("reserved_bytes", one["total_size"])
            add("segment", not one["is_expandable"])
            for block in one["blocks"]:
                free, allocated = block["state"] == "inactive", block["state"] == "active_allocated"
                part = free and len(one["blocks"]) > 1 and not one["is_expandable"]
                for name, by in (("allocation", allocated), ("allocated_bytes", allocated * block["size"]),
                                 ("active", not free), ("active_bytes", (not free) * block["size"]),
                                 ("requested_bytes", (not free) * block["requested_size"]),
                                 ("inactive_split", part), ("inactive_split_bytes", part * block["size"])):
                    add(name, by)
    faults = [f"{name}: {value}, and {sums.get(name, 0)} by the snapshot" for name, value in stats.items()
              if name.count(".") == 2 and name.endswith(".current") and value != sums.get(name, 0)]
    for name in stats:
        if name.endswith(".current"):
            stem = name.removesuffix("current")
            if stats[stem + "peak"] < stats[name]:
                faults.append(f"{name} is above its peak")
    return faults


def play(packed: dict[str, Any], device: int) -> dict[str, Any]:
    """Run a program; after each operation: the place it got (see ``Player.place``), bytes reserved and allocated."""
    player = Player(device)
    tensors: dict[int, Any] = {}
    places, reserved, allocated = [], [], []
    player.set(packed["settings"][0])
    # empty_cache is for all devices: an earlier program on another one may have had this one waited for.
    synced = player.torch._C._accelerator_getDeviceStats(device)["num_sync_all_streams"]
    columns = zip(*(packed[name] for name in ("op", "handle", "size", "stream", "pool")), strict=True)
    for op, handle, size, stream, pool in columns:
        place = 0
        if op == ALLOC:
            tensors[handle] = player.alloc(size, stream, pool)
            place = player.place(tensors[handle])
        elif op == FREE:
            del tensors[handle]
        elif op == RECORD_STREAM and tensors[handle] is not None:
            tensors[handle].record_stream(player.streams[stream])
        elif op == ADVANCE:
            player.reach(stream)
        elif op == EMPTY_CACHE:
            player.empty_cache()
        elif op == RELEASE_POOL and pool:
            player.library.release_pool(device, pool)
        elif op == SET:
            player.set(packed["settings"][1 + handle])
        places.append(place)
        now = player.now()
        reserved.append(now[0])
        allocated.append(now[1])
    stats = player.torch._C._accelerator_getDeviceStats(device)
    return {"places": places, "reserved": reserved, "allocated": allocated, "segments": player.segments(),
            "stats": {"retries": stats["num_alloc_retries"], "ooms": stats["num_ooms"],
                      "syncs": stats["num_sync_all_streams"] - synced, "device_allocs": stats["num_device_alloc"],
                      "device_frees": stats["num_device_free"],
                      **{f"peak_{name}": stats[f"{name}_bytes"]["all"]["peak"]
                         for name in ("reserved", "allocated", "active")},
                      "requested": stats["requested_bytes"]["all"]["current"]}}
