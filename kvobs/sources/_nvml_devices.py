"""What one NVIDIA device tells through NVML: which devices there are, and their fields one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

MIG_HIDDEN = "MIG is on, and none of its instances is visible"
Readings = list[tuple[str, tuple[str, ...], float]]


class Device(msgspec.Struct, frozen=True):
    """A GPU, or a MIG instance (``gpu`` is false); ``memory`` is false for a GPU whose memory its instances tell."""

    handle: Any
    uuid: str
    name: str
    label: str
    memory: bool = True
    gpu: bool = True


def devices(nvml: Any) -> tuple[list[Device], dict[str, str]]:
    """The GPUs and their visible MIG instances, and the errors of the GPUs that do not answer.

    Raises:
        nvml.NVMLError: the GPUs cannot be counted.
    """
    found: list[Device] = []
    missing: dict[str, str] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        label = f"gpu:{index}"
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        except nvml.NVMLError as error:
            missing[label] = str(error).rstrip(".")
            continue
        split = _mig(nvml, handle)
        found.append(Device(handle, uuid, name, label, memory=not split))
        if split:
            found += _instances(nvml, handle, label)
    return found, missing


def _mig(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return False  # a device without MIG does not support the question
    return bool(current)


def _instances(nvml: Any, parent: Any, label: str) -> list[Device]:
    found: list[Device] = []
    try:
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(parent)
    except nvml.NVMLError:
        return found
    for index in range(most):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index)
            found.append(Device(handle, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle),
                                f"{label}.{index}", gpu=False))
        except nvml.NVMLError:
            continue  # instances do not fill their places in order
    return found


def utilization(nvml: Any, device: Device) -> Readings:
    """The share of the driver's last sample period in which a kernel ran."""
    rates = nvml.nvmlDeviceGetUtilizationRates(device.handle)
    return [("hw.gpu.utilization", (device.uuid, device.name), rates.gpu / 100)]


def power(nvml: Any, device: Device) -> Readings:
    """Watts; NVML tells milliwatts."""
    return [("hw.power", (device.uuid, "gpu", device.name), nvml.nvmlDeviceGetPowerUsage(device.handle) / 1000)]


def energy(nvml: Any, device: Device) -> Readings:
    """Joules since the driver was loaded; NVML tells millijoules."""
    used = nvml.nvmlDeviceGetTotalEnergyConsumption(device.handle)
    return [("hw.energy", (device.uuid, "gpu", device.name), used / 1000)]


def temperature(nvml: Any, device: Device) -> Readings:
    """Degrees Celsius of the chip."""
    found = nvml.nvmlDeviceGetTemperature(device.handle, nvml.NVML_TEMPERATURE_GPU)
    return [("hw.temperature", (device.uuid, device.name), float(found))]


FIELDS: dict[str, Callable[[Any, Device], Readings]] = {
    "utilization": utilization, "power": power, "energy": energy, "temperature": temperature}


def memory(device: Device, total: int, free: int) -> Readings:
    """What is used is what is not free.

    The second version of NVML's answer leaves out from ``used`` what the driver reserves for itself, while total and
    free are the same in both versions: so their difference means the same with every driver.
    """
    who = (device.uuid, device.name)
    readings: Readings = [("hw.gpu.memory.limit", who, total), ("hw.gpu.memory.usage", who, total - free)]
    return [*readings, ("hw.gpu.memory.utilization", who, (total - free) / total)] if total else readings
