"""What the allocator of a virtual device holds, by the published definitions: one snapshot, taken between turns."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from kvobs.allocator.definitions import Peaks, definitions
from kvobs.allocator.live import state_of
from kvobs.allocator.memory_map import sums
from kvobs.allocator.settings import known
from kvobs.analysis import unused_share


class Held(msgspec.Struct, frozen=True):
    """One device's allocator at one instant; None where there is no such figure.

    ``article_rate`` and ``gmlake`` (whose peaks are since the process began) are the definitions of
    ``kvobs.allocator.definitions``, ``unused_share`` is (reserved - allocated) / reserved.
    """

    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    largest_free_bytes: int | None = None
    article_rate: float | None = None
    gmlake: float | None = None
    unused_share: float | None = None


def look(device: str) -> Held:
    """What a virtual device's allocator holds now."""
    vgpu: Any = torch.vgpu
    index = int(device.rpartition(":")[2])
    state = state_of(vgpu.memory_snapshot(include_traces=False), index)
    stats = vgpu.memory_stats(index)
    reserved, allocated, active = (stats[f"{name}_bytes.all.peak"] for name in ("reserved", "allocated", "active"))
    by_name = {found.name: found.value for found in definitions(
        state, known(torch._C._accelerator_getAllocatorSettings()), Peaks(reserved, allocated, active))}
    total = sums(state)
    return Held(total.reserved, total.allocated, total.largest_free, by_name["article"], by_name["gmlake"],
                unused_share(total.reserved, total.allocated))
