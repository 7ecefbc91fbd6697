"""Where the demo runs: on two virtual GPUs where they can be had, else on the CPU, and why."""

from __future__ import annotations

from typing import NamedTuple

from kvobs import virtual
from kvobs.lab.demo._errors import DemoError
from kvobs.lab.demo._progress import stage

CHOICES = ("auto", "cpu", "vgpu")
SIZES = ("1GiB", "1GiB")  # a small model's weights take a quarter of it


class Place(NamedTuple):
    """The devices, the first of them where everything begins, and a sentence or two on what they are."""

    devices: tuple[str, ...]
    sentence: str

    @property
    def is_virtual(self) -> bool:
        """Whether memory is a virtual GPU's."""
        return self.devices[0] != "cpu"


def preparing() -> str:
    """What is done before the first use of the virtual GPU; the first time of a machine it takes a while."""
    once = "" if virtual.why_not(build=False) is not None or virtual.compiled() else ", compiled once: half a minute"
    return f"Preparing the virtual GPU{once}"


def choose(wanted: str) -> Place:
    """The place for ``auto``, ``cpu`` or ``vgpu``; virtual devices that the process has already are used.

    Raises:
        DemoError: no such choice, or ``vgpu`` cannot be had.
    """
    if wanted not in CHOICES:
        raise DemoError(f"--device: '{wanted}' is not known; allowed are {', '.join(CHOICES)}.")
    if wanted == "cpu":
        return Place(("cpu",), "Device: cpu, as asked for: compute and memory are this machine's.")
    try:
        with stage(preparing()):
            found = virtual.devices() or virtual.setup(SIZES)
    except virtual.Unavailable as error:
        if wanted == "vgpu":
            raise DemoError(str(error)) from None
        return Place(("cpu",), f"Device: cpu, compute and memory are this machine's. {error}")
    names = tuple(f"vgpu:{device.number}" for device in found)
    sizes = " and ".join(f"{device.bytes / 2**30:.3g} GiB" for device in found)
    return Place(names, f"Device: {' and '.join(names)} ({sizes}): compute is the CPU's, memory is the virtual GPU's, "
                        "whose allocator behaves as CUDA's.")
