"""The virtual GPU at its edges: devices that do not fit, devices that are not there, observers that raise."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.vgpu import ROOT, needs_vgpu, on_vgpu

pytestmark = needs_vgpu()


ONE_TOO_MANY = """
import resource
from pathlib import Path
import torch
from kvobs import virtual

tib = 2**40
own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (own + 100 * tib, -1))  # a device of 1 TiB wants 65 TiB of addresses
try:
    virtual.setup(["1TiB", "1TiB"])
except virtual.Unavailable as error:
    print(error)
print(virtual.setup(["1TiB"])[0].bytes == tib)
"""


def test_addresses_of_devices_that_do_not_fit_are_given_back() -> None:
    """After a set-up that was refused for want of addresses, a smaller one succeeds."""
    done = subprocess.run([sys.executable, "-c", ONE_TOO_MANY], capture_output=True, text=True, timeout=300, check=True,
                          cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    refused, then = done.stdout.splitlines()
    assert "no addresses" in refused
    assert then == "True"


def strangers() -> list[str]:
    import torch

    told: list[str] = []
    for device in (torch.device("vgpu:99"), torch.device("vgpu:2")):
        try:
            told.append(str(torch.accelerator.current_stream(device)))
        except RuntimeError as error:
            told.append(str(error).splitlines()[0])
    return told


def test_a_device_that_is_not_there_has_no_stream() -> None:
    """The stream of a device that was not set up is refused and not read from beyond the last one."""
    assert on_vgpu(strangers) == [f"There is no device vgpu:{number}; 2 are set up." for number in (99, 2)]


def quarrel() -> list[int | str]:
    import torch

    told: list[int | str] = []

    def raises(*_: int) -> None:
        told.append("raises")
        raise RuntimeError("It is broken.")

    def allocates(device: int, *rest: int) -> None:
        told.append(int(torch.ones(3, device=f"vgpu:{device}").sum()))

    for observer in (raises, allocates):
        torch.vgpu.attach_out_of_memory_observer(observer)
    try:
        torch.empty(2**40, dtype=torch.uint8, device="vgpu:1")
    except torch.OutOfMemoryError:
        told.append("error")
    return told


def test_an_observer_that_raises_hides_the_error_from_nobody() -> None:
    """Every observer is called, may allocate, and the engine gets its own error, although one of them raises."""
    assert on_vgpu(quarrel) == ["raises", 3, "error"]
