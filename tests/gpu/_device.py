"""One accelerator, CUDA or kvobs's virtual GPU, through the module that torch has for it.

Everything used of ``torch.cuda`` is there from 2.6 to 2.13; ``torch.vgpu`` mirrors it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

KINDS = ("cuda", "vgpu")
VIRTUAL = "24GiB"
MOST_EVENTS = 4_000_000
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_VERSIONS = ("torch", "transformers", "kvobs", "nvidia-ml-py")
Observer = Callable[[int, int, int, int], None]


class NoDevice(Exception):
    """There is no such device here; one sentence."""


class Device:
    """The first device of a kind. Its allocator's history is recorded from before the first allocation."""

    def __init__(self, kind: str, conf: str = "") -> None:
        """Open it with allocator settings ``conf``, which for CUDA are in the environment already.

        Raises:
            NoDevice: it is not there.
        """
        if kind == "vgpu":
            _set_up_virtual(conf)
        import torch

        self.torch, self.kind, self.name = torch, kind, f"{kind}:0"
        self.module: Any = getattr(torch, kind, None)
        if self.module is None or not self.module.is_available():
            raise NoDevice(f"This torch ({torch.__version__}) sees no device of kind {kind}.")
        self.device = torch.device(kind, 0)

    def record(self) -> None:
        """Begin the history. CUDA must be initialised first, for the history is kept per device."""
        getattr(self.module, "init", lambda: None)()
        self.module.memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=MOST_EVENTS)

    def stop_recording(self) -> None:
        """End the history."""
        self.module.memory._record_memory_history(enabled=None)

    def dump(self, path: Path) -> dict[str, Any]:
        """Write the snapshot, as torch dumps it, and return the statistics of the same moment."""
        self.settle()
        stats = self.stats()
        with path.open("wb") as file:
            pickle.dump(self.module.memory._snapshot(), file)
        return stats

    def stats(self) -> dict[str, Any]:
        """``memory_stats``: flat names and numbers."""
        return {key: value for key, value in self.module.memory_stats(0).items() if isinstance(value, int | float)}

    def allocations(self) -> int:
        """Requests served so far."""
        return int(self.stats().get("allocation.all.allocated", 0))

    def settle(self) -> None:
        """Free what nobody refers to, and wait for the device."""
        gc.collect()
        self.module.synchronize()

    def stream(self) -> Any:
        """A new stream."""
        return self.module.Stream()

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Work inside the block goes to the stream."""
        with (self.module.stream(stream) if hasattr(self.module, "stream") else stream):
            yield

    def occupy(self, milliseconds: int) -> None:
        """Keep the current stream busy for about so long; a virtual one until the device is waited for."""
        if self.kind == "cuda":
            self.module._sleep(milliseconds * 1_500_000)  # cycles, at about 1.5 GHz
        else:
            self.module.hold(self.module.current_stream())

    def limit(self, more_bytes: int) -> int:
        """Allow this process ``more_bytes`` beyond what it reserves now; returns what that makes, in bytes."""
        total = self.module.mem_get_info(0)[1]
        allowed = int(self.stats()["reserved_bytes.all.current"]) + more_bytes
        self.module.set_per_process_memory_fraction(min(float(allowed) / total, 1.0), 0)
        return allowed

    def unlimit(self) -> None:
        """Allow this process everything."""
        self.module.set_per_process_memory_fraction(1.0, 0)

    def watch_out_of_memory(self, observer: Observer) -> None:
        """Call ``observer(device, requested, allowed, free)`` at each failure, for the rest of the process."""
        attach = getattr(self.module, "attach_out_of_memory_observer", None)
        (attach or self.torch._C._cuda_attach_out_of_memory_observer)(observer)

    def about(self) -> dict[str, Any]:
        """Versions, device, driver and settings; nothing that names the machine."""
        free, total = self.module.mem_get_info(0)
        found: dict[str, Any] = {
            "kind": self.kind, "python": platform.python_version(), "machine": platform.machine(),
            "versions": versions(), "cuda": self.torch.version.cuda, "device_count": self.module.device_count(),
            "free_bytes": free, "total_bytes": total, "backend": "native",
            "settings_of_environment": {name: os.environ[name] for name in _SETTINGS if name in os.environ}}
        if self.kind == "cuda":
            properties = self.module.get_device_properties(0)
            found |= {"device": properties.name, "capability": f"{properties.major}.{properties.minor}",
                      "properties_total_bytes": properties.total_memory, "driver": driver(),
                      "backend": self.module.memory.get_allocator_backend()}
        return found


def versions(named: Callable[[str], str] = metadata.version) -> dict[str, str | None]:
    """The versions of what matters; None where it is not installed as a distribution."""
    found: dict[str, str | None] = {}
    for name in _VERSIONS:
        try:
            found[name] = named(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def driver() -> str | None:
    """The version of NVIDIA's driver, None where its tool does not tell."""
    try:
        told = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], timeout=20,
                              capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(told.split()), None)


def environment_for(conf: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child whose CUDA allocator has these settings, under either of the variable's names."""
    kept = {name: value for name, value in environ.items()
            if name not in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") and not name.startswith("KVOBS_")}
    settings = {"PYTORCH_ALLOC_CONF": conf, "PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {}
    return kept | settings | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def _set_up_virtual(conf: str) -> None:
    try:
        from kvobs import virtual
    except ImportError:
        raise NoDevice("This version of kvobs has no virtual GPU.") from None
    try:
        virtual.setup(devices=[VIRTUAL], settings=conf)
    except ValueError as error:
        raise NoDevice(str(error)) from None
