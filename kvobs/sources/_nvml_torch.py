"""What torch has reserved of each NVIDIA device, known by the UUID that NVML knows too."""

from __future__ import annotations

import sys

import msgspec

from kvobs.sources._torch_handle import CUDA, Torch
from kvobs.sources._torch_stats import read


class TorchDevice(msgspec.Struct, frozen=True):
    """A CUDA device as torch numbers it (after CUDA_VISIBLE_DEVICES) and the bytes its allocator has reserved."""

    index: int
    uuid: str
    reserved_bytes: int


def reserved() -> list[TorchDevice] | str:
    """The devices of this process's torch, none where torch has not initialised CUDA; or why they are not known.

    Initialises nothing: devices are asked only after the host itself has initialised CUDA. Costs a lock and a copy of
    counters per device, no call that a CUDA graph's capture would mind.
    """
    module = sys.modules.get("torch")
    if module is None:
        return []
    try:
        torch = Torch(module)
        if torch.accelerator() != CUDA or not torch.initialised(CUDA):
            return []
        found = []
        for index in range(torch.device_count()):
            name = f"{CUDA}:{index}"
            held = read(name, torch.stats(index), backend=torch.backend(CUDA)).reserved_bytes
            if held is None:
                return f"The allocator of torch does not tell what it has reserved of {name}."
            found.append(TorchDevice(index, str(module.cuda.get_device_properties(index).uuid), held))
        return found
    except Exception as error:  # of whatever kind: a torch without UUIDs, one that is just being imported
        return f"torch does not tell what it has reserved of which device ({type(error).__name__})."
