"""Sources: one leaf per third party, imported only inside its factory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvobs.bus import Bus
from kvobs.config import Config
from kvobs.model import Source

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class Wiring:
    """What a source may use: the configuration, the bus (``active`` and ``publish``) and the process's tracer."""

    __slots__ = ("bus", "config", "tracer")

    def __init__(self, config: Config, bus: Bus, tracer: Callable[[], Tracer]) -> None:
        self.config = config
        self.bus = bus
        self.tracer = tracer


Factory = Callable[[Wiring], Source]


def _transformers(wiring: Wiring) -> Source:
    from kvobs.sources.transformers import TransformersSource

    return TransformersSource(wiring)


def _vllm(wiring: Wiring) -> Source:
    from kvobs.sources.vllm import VllmSource

    return VllmSource(wiring)


def _vllm_front_end(wiring: Wiring) -> Source:
    from kvobs.sources.vllm import FrontEndSource

    return FrontEndSource(wiring)


def _sglang(wiring: Wiring) -> Source:
    from kvobs.sources.sglang import SglangSource

    return SglangSource(wiring)


def _device_allocators(wiring: Wiring) -> Source:
    from kvobs.sources._torch import TorchSource

    return TorchSource(wiring.bus)


def _cpu_allocations(wiring: Wiring) -> Source:
    from kvobs.sources._cpu_alloc import CpuAllocSource

    refused = next((name for name in ("cpu_allocations", "native") if getattr(wiring.config, name) == "off"), "")
    return CpuAllocSource(wiring.bus, f"The setting {refused} is off." if refused else "")


def _c_heap(_: Wiring) -> Source:
    from kvobs.sources._heap import HeapSource

    return HeapSource()


def _machine(_: Wiring) -> Source:
    from kvobs.sources._host import HostSource

    return HostSource()


def _nvidia_devices(_: Wiring) -> Source:
    from kvobs.sources._nvml import NvmlSource

    return NvmlSource()


def _middleware(_: Wiring) -> Source:
    from kvobs.sources._admission import AdmissionSource

    return AdmissionSource()


def _requests_that_fail(_: Wiring) -> Source:
    from kvobs.sources._failures import FailureSource

    return FailureSource()


def factories() -> tuple[Factory, ...]:
    """The sources of this version, in the order they are installed."""
    return (_transformers, _vllm, _vllm_front_end, _sglang, _device_allocators, _cpu_allocations, _c_heap,
            _machine, _nvidia_devices, _middleware, _requests_that_fail)


__all__ = ["Factory", "Wiring", "factories"]
