"""Source: NVIDIA devices as their driver tells them through NVML, polled once a second on the drain thread."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from kvobs.model import Availability, Emit, Event, Poll
from kvobs.sources._device_memory import owners, split
from kvobs.sources._nvml_devices import FIELDS, MIG_HIDDEN, Device, Readings, devices, memory
from kvobs.sources._nvml_torch import TorchDevice, reserved

SOURCE = "nvml"
MEMORY, PROCESSES, TORCH = "memory", "processes", "torch"
SUBJECTS = (MEMORY, *FIELDS, PROCESSES, TORCH)
RETRY_NS = 30_000_000_000  # a driver that failed is asked again, and devices are listed anew, so often
STOP_S = 2.0
NOT_INSTALLED = "The module pynvml is not installed; pip install 'kvobs[nvml]' brings it."
NO_DEVICE = "The driver lists no device."
SILENT = "None of the devices answers the driver."
FORKED = "This process was forked while its parent was asking the driver, which cannot be asked here."
UNMATCHED = "torch uses a device that the driver does not list, so what it holds of this one is not known."
_NEVER_NS = 1 << 63
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # its inode number is fixed in the kernel (PROC_PID_INIT_INO)
# Errors of the driver rather than of one question: UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, and that the
# library and the kernel's part of the driver differ in version.
_LOST = frozenset((1, 9, 12, 18))


class DriverLost(Exception):
    """The driver answers nothing any more; the message is a whole sentence."""


def namespaced() -> bool:
    """Does this process number processes otherwise than the machine does?"""
    try:
        return os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE
    except OSError:
        return True  # it must then find itself in the driver's list


class NvmlSource:
    """Polls the driver; ``nvml`` is pynvml or an object with its functions, ``torch`` tells what torch holds."""

    name = SOURCE

    def __init__(self, nvml: Any = None, torch: Callable[[], list[TorchDevice] | str] = reserved,
                 namespaced: Callable[[], bool] = namespaced, pid: Callable[[], int] = os.getpid) -> None:
        self._given, self._torch, self._namespaced, self._pid = nvml, torch, namespaced, pid
        self._installed, self._asking = False, False
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._nvml: Any = None
        self._devices: list[Device] = []
        self._next_ns: int | None = None
        self._reason = ""
        self._unlisted = ""
        self._told: dict[str, dict[str, str]] | None = None

    def install(self, emit: Emit) -> None:
        """Nothing is hooked, and the driver is asked only on the drain thread."""
        self._installed = True

    def uninstall(self) -> None:
        """Let go of the driver; if it is being asked at this moment and does not answer, whoever asks lets go."""
        self._installed = False
        if self._lock.acquire(timeout=STOP_S):
            try:
                self._close()
                self._forget()
            finally:
                self._lock.release()

    def after_fork_in_child(self) -> None:
        """The child initialises NVML itself; it shuts nothing down that is its parent's."""
        asking, self._asking = self._asking, False
        self._lock = threading.Lock()
        self._forget()
        if asking:  # locks inside the library may be held for ever
            self._reason, self._next_ns = FORKED, _NEVER_NS

    def sample(self, now_ns: int) -> Iterable[Event]:
        """What every device tells now."""
        with self._lock:
            began = time.perf_counter_ns()
            self._asking = True
            try:
                readings = self._look(now_ns) if self._installed else []
            except DriverLost as lost:
                readings, self._reason, self._next_ns = [], str(lost), now_ns + RETRY_NS
                self._close()
            finally:
                self._asking = False
                if not self._installed:
                    self._close()
        return (Poll(now_ns, SOURCE, time.perf_counter_ns() - began, tuple(readings)),) if readings else ()

    def availability(self) -> Iterable[Availability]:
        """Whether the driver answers and, once it has, what it tells of all its devices."""
        if self._reason:
            yield Availability(SOURCE, False, self._reason)
        elif self._devices:
            yield Availability(SOURCE, True, self._unlisted)
        for subject in SUBJECTS if self._told is not None else ():
            reason = self._reason or _sentence(subject, (self._told or {}).get(subject, {}))
            yield Availability(f"{SOURCE}.{subject}", not reason, reason)

    # -- the driver ------------------------------------------------------------------------------------

    def _look(self, now_ns: int) -> Readings:
        if self._next_ns is None or now_ns >= self._next_ns:
            self._next_ns = now_ns + RETRY_NS
            self._open()
        if self._nvml is None:
            return []
        readings: Readings = []
        self._told = {}
        torch = self._torch()
        for device in self._devices:
            readings += self._fields(device) if device.gpu else []
            readings += self._memory(device, torch)
        if not readings:
            raise DriverLost(SILENT)
        return readings

    def _open(self) -> None:
        nvml = self._nvml
        if nvml is None:
            nvml = self._given if self._given is not None else _pynvml()
            try:
                nvml.nvmlInit()
            except nvml.NVMLError as error:
                raise DriverLost(f"The NVIDIA driver does not answer ({_text(error)}).") from error
            self._nvml = nvml
        try:
            self._devices, missing = devices(nvml)
        except nvml.NVMLError as error:
            raise DriverLost(f"The driver does not list its devices ({_text(error)}).") from error
        self._unlisted = " ".join(f"The driver tells nothing of {label} ({error})." for label, error in missing.items())
        if not self._devices:
            raise DriverLost(self._unlisted or NO_DEVICE)
        self._reason = ""

    def _close(self) -> None:
        nvml, self._nvml, self._devices = self._nvml, None, []
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):  # it may have gone already
                nvml.nvmlShutdown()

    def _ask(self, subject: str, device: Device, question: Callable[[], Any]) -> Any:
        """The answer, or None where the driver has none to this question."""
        try:
            return question()
        except self._nvml.NVMLError as error:
            if error.value in _LOST:
                raise DriverLost(f"The driver does not answer any more ({_text(error)}).") from error
            self._miss(subject, device, _text(error))
            return None

    def _miss(self, subject: str, device: Device, reason: str) -> None:
        assert self._told is not None
        self._told.setdefault(subject, {})[device.label] = reason

    # -- one device ------------------------------------------------------------------------------------

    def _fields(self, device: Device) -> Readings:
        readings: Readings = []
        for subject, field in FIELDS.items():
            readings += self._ask(subject, device, functools.partial(field, self._nvml, device)) or []
        return readings

    def _memory(self, device: Device, torch: list[TorchDevice] | str) -> Readings:
        if not device.memory:
            if not any(other.label.startswith(f"{device.label}.") for other in self._devices):
                self._miss(MEMORY, device, MIG_HIDDEN)
            return []
        info = self._ask(MEMORY, device, lambda: self._nvml.nvmlDeviceGetMemoryInfo(device.handle))
        if info is None:
            return []
        total, free = int(info.total), min(int(info.free), int(info.total))
        listed = self._ask(PROCESSES, device, lambda: [
            (process.pid, process.usedGpuMemory)
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(device.handle)])
        label, held = self._held(device, torch)
        owned = None
        if listed is not None:
            found = owners(listed, self._pid(), held, namespaced=self._namespaced())
            if isinstance(found, str):
                self._miss(PROCESSES, device, found)
            else:
                owned = found
        return memory(device, total, free) + [
            ("kvobs.device.memory", (label, part), value) for part, value in split(total, free, held, owned).items()]

    def _held(self, device: Device, torch: list[TorchDevice] | str) -> tuple[str, int | None]:
        """The device's name as torch has it, if it has, and the bytes that torch has reserved of it."""
        if isinstance(torch, str):
            self._miss(TORCH, device, torch)
            return device.label, None
        for entry in torch:
            if _plain(entry.uuid) == _plain(device.uuid):
                return f"cuda:{entry.index}", entry.reserved_bytes
        if {_plain(entry.uuid) for entry in torch} - {_plain(other.uuid) for other in self._devices if other.memory}:
            self._miss(TORCH, device, UNMATCHED)
            return device.label, None
        return device.label, 0


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise DriverLost(NOT_INSTALLED) from error
    return pynvml


def _plain(uuid: str) -> str:
    """A UUID as torch tells it, without NVML's ``GPU-`` or ``MIG-`` in front."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def _text(error: Exception) -> str:
    return str(error).rstrip(".")


def _sentence(subject: str, absent: dict[str, str]) -> str:
    """One sentence for all devices of which a subject is absent, in a form that does not change from poll to poll."""
    by_reason: dict[str, list[str]] = {}
    for label, reason in absent.items():
        by_reason.setdefault(reason, []).append(label)
    return " ".join(f"{', '.join(labels)}: {reason}" if reason.endswith(".")
                    else f"The driver does not tell the {subject} of {', '.join(labels)} ({reason})."
                    for reason, labels in by_reason.items())
