"""NVIDIA devices: what the driver says is told as it was said, and who holds the memory always adds up.

The drivers here imitate real ones (nvml.h, pynvml, the figures of nvidia-smi); none was at hand to be recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.catalog import BY_NAME
from kvobs.model import Availability, Event, Poll
from kvobs.sources import _nvml
from kvobs.sources._device_memory import UNLISTED, UNTOLD
from kvobs.sources._nvml import NO_DEVICE, RETRY_NS, UNMATCHED, NvmlSource
from kvobs.sources._nvml_torch import TorchDevice
from tests.support import wait_until

MiB, GiB = 1 << 20, 1 << 30
SECOND = 1_000_000_000
PID = 4242
# The codes of nvml.h that the imitated drivers answer with.
UNINITIALIZED, NOT_SUPPORTED, NOT_FOUND, DRIVER_NOT_LOADED, GPU_IS_LOST, NO_PERMISSION = 1, 3, 6, 9, 15, 4
WORDS = {UNINITIALIZED: "Uninitialized", NOT_SUPPORTED: "Not Supported", NOT_FOUND: "Not Found",
         DRIVER_NOT_LOADED: "Driver Not Loaded", GPU_IS_LOST: "GPU is lost", NO_PERMISSION: "Insufficient Permissions"}
ALL = ("memory", "utilization", "power", "energy", "temperature", "processes", "torch")


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(WORDS[value])
        self.value = value


class Gpu(SimpleNamespace):
    """One device's answers; an int instead of an answer is the error that it gives."""

    uuid: str
    name: str


def a100(**changes: Any) -> Gpu:
    """Imitates an A100-SXM4-80GB while one process of 3,434 MiB runs; the reserve of 632 MiB that nvidia-smi lists
    apart is in total - free."""
    return Gpu(**({"uuid": "GPU-5c1b7f2e-90aa-4b1d-8c53-2f0d3c1e7a10", "name": "NVIDIA A100-SXM4-80GB",
                   "memory": (81920 * MiB, 77854 * MiB), "utilization": 37, "power": 91_452, "energy": 1_893_204_551,
                   "temperature": 41, "processes": [(PID, 3434 * MiB)], "mig": [0, 0]} | changes))


def t4(**changes: Any) -> Gpu:
    """Imitates a Tesla T4 with a process of somebody else on it; it has no MIG mode."""
    return Gpu(**({"uuid": "GPU-0d9a4c3b-1111-2222-3333-444455556666", "name": "Tesla T4",
                   "memory": (15360 * MiB, 13000 * MiB), "utilization": 0, "power": 9_871, "energy": 55_000_123,
                   "temperature": 33, "processes": [(77, 2000 * MiB)], "mig": NOT_SUPPORTED} | changes))


class Driver:
    """An NVML: the functions of pynvml that are used, over a list of devices."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *gpus: Gpu | int) -> None:
        self.gpus = list(gpus)
        self.calls: list[str] = []
        self.inside: Callable[[], object] = lambda: None
        self.broken: int | None = None

    def _tell(self, answer: Any) -> Any:
        self.inside()
        if self.broken is not None:
            raise NVMLError(self.broken)
        if isinstance(answer, NVMLError):
            raise answer
        return answer

    def _field(self, gpu: Gpu, field: str) -> Any:
        answer = getattr(gpu, field)
        failed = isinstance(answer, int) and answer in WORDS and field in gpu.__dict__.get("errors", ())
        return self._tell(NVMLError(answer) if failed else answer)

    def nvmlInit(self) -> None:
        self._tell(None)
        self.calls.append("init")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")
        self._tell(None)

    def nvmlDeviceGetCount(self) -> int:
        return int(self._tell(len(self.gpus)))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        gpu = self.gpus[index]
        found: Gpu = self._tell(NVMLError(gpu) if isinstance(gpu, int) else gpu)
        return found

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return str(self._tell(gpu.uuid))

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return str(self._tell(gpu.name))

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        found: list[int] = self._tell(NVMLError(gpu.mig) if isinstance(gpu.mig, int) else gpu.mig)
        return found

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return int(self._tell(7))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu:
        found: Gpu = self._tell(gpu.instances.get(index, NVMLError(NOT_FOUND)))
        return found

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> SimpleNamespace:
        total, free = self._field(gpu, "memory")
        return SimpleNamespace(total=total, free=free, used=total - free)

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._field(gpu, "utilization"), memory=5)

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:
        return int(self._field(gpu, "power"))

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: Gpu) -> int:
        return int(self._field(gpu, "energy"))

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return int(self._field(gpu, "temperature"))

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._field(gpu, "processes")]


Values = dict[tuple[str, ...], float]


def source(driver: Driver, torch: list[TorchDevice] | str | None = None, *, namespaced: bool = False) -> NvmlSource:
    made = NvmlSource(driver, lambda: [] if torch is None else torch, lambda: namespaced, lambda: PID)
    made.install(lambda event: pytest.fail(f"nothing is emitted outside a poll, but {event}"))
    return made


def told(events: Iterable[Event]) -> Values:
    """The readings of the one poll by (name, *attributes); every reading has its row's attributes, and comes once."""
    (poll,) = events
    assert isinstance(poll, Poll)
    assert poll.source == "nvml"
    for name, attributes, _ in poll.readings:
        assert len(attributes) == len(BY_NAME[name].attributes)
    values = {(name, *attributes): value for name, attributes, value in poll.readings}
    assert len(values) == len(poll.readings)
    return values


def parts(values: Values, device: str) -> dict[str, float]:
    return {key[2]: value for key, value in values.items() if key[:2] == ("kvobs.device.memory", device)}


def facts(made: NvmlSource) -> dict[str, str]:
    """Reasons by subject; a reason is a sentence, and is there where something is not available."""
    found: list[Availability] = list(made.availability())
    assert all(fact.reason.endswith(".") if fact.reason else fact.available for fact in found)
    return {fact.subject: fact.reason for fact in found}


def test_a_driver_is_told_as_it_answers() -> None:
    """Every field of an A100 comes out in the catalog's units, with its UUID and name, and nothing else does."""
    made = source(Driver(a100()), [TorchDevice(0, "5c1b7f2e-90aa-4b1d-8c53-2f0d3c1e7a10", 2900 * MiB)])
    who = ("GPU-5c1b7f2e-90aa-4b1d-8c53-2f0d3c1e7a10", "NVIDIA A100-SXM4-80GB")
    assert told(made.sample(SECOND)) == pytest.approx({
        ("hw.gpu.memory.limit", *who): 81920 * MiB, ("hw.gpu.memory.usage", *who): 4066 * MiB,
        ("hw.gpu.memory.utilization", *who): 4066 / 81920, ("hw.gpu.utilization", *who): 0.37,
        ("hw.power", who[0], "gpu", who[1]): 91.452, ("hw.energy", who[0], "gpu", who[1]): 1_893_204.551,
        ("hw.temperature", *who): 41,
        ("kvobs.device.memory", "cuda:0", "torch"): 2900 * MiB, ("kvobs.device.memory", "cuda:0", "context"): 534 * MiB,
        ("kvobs.device.memory", "cuda:0", "others"): 0, ("kvobs.device.memory", "cuda:0", "unexplained"): 632 * MiB,
        ("kvobs.device.memory", "cuda:0", "free"): 77854 * MiB})
    assert facts(made) == dict.fromkeys(["nvml", *(f"nvml.{subject}" for subject in ALL)], "")


def test_devices_are_matched_by_uuid_not_by_number() -> None:
    """With CUDA_VISIBLE_DEVICES=1,0 torch's cuda:0 is NVML's second device: its bytes are counted there."""
    made = source(Driver(a100(processes=[(PID, 900 * MiB), (8, 100 * MiB)]),
                         t4(processes=[(PID, 700 * MiB), (9, 50 * MiB), (9, 25 * MiB)])),
                  [TorchDevice(0, "0D9A4C3B-1111-2222-3333-444455556666", 300 * MiB),
                   TorchDevice(1, "5c1b7f2e-90aa-4b1d-8c53-2f0d3c1e7a10", 500 * MiB)])
    values = told(made.sample(SECOND))
    assert parts(values, "cuda:0") == {"torch": 300 * MiB, "context": 400 * MiB, "others": 75 * MiB,
                                       "unexplained": (2360 - 775) * MiB, "free": 13000 * MiB}
    assert parts(values, "cuda:1") == {"torch": 500 * MiB, "context": 400 * MiB, "others": 100 * MiB,
                                       "unexplained": (4066 - 1000) * MiB, "free": 77854 * MiB}


def test_a_device_that_torch_does_not_see_keeps_the_drivers_number() -> None:
    """Hidden from torch, or before torch initialised CUDA, a device is gpu:N, and torch's part of it is truly 0."""
    made = source(Driver(a100(), t4()), [TorchDevice(0, "5c1b7f2e-90aa-4b1d-8c53-2f0d3c1e7a10", 1000 * MiB)])
    assert parts(told(made.sample(SECOND)), "gpu:1") == {"torch": 0, "context": 0, "others": 2000 * MiB,
                                                         "unexplained": 360 * MiB, "free": 13000 * MiB}


@pytest.mark.parametrize("field", ["memory", "utilization", "power", "energy", "temperature"])
def test_a_field_that_is_not_supported_is_absent_alone(field: str) -> None:
    """NOT_SUPPORTED of one field on one of two devices (WSL, vGPU): its metrics of that device, no other value."""
    everything = told(source(Driver(a100(), t4())).sample(SECOND))
    made = source(Driver(a100(), t4(**{field: NOT_SUPPORTED, "errors": (field,)})))
    names = {"memory": ("hw.gpu.memory", "kvobs.device"), "utilization": ("hw.gpu.utilization",),
             "power": ("hw.power",), "energy": ("hw.energy",), "temperature": ("hw.temperature",)}[field]
    missing = {key for key in everything if key[0].startswith(names) and ("gpu:1" in key or "Tesla T4" in key)}
    assert missing
    assert told(made.sample(SECOND)) == {key: value for key, value in everything.items() if key not in missing}
    assert {subject: why for subject, why in facts(made).items() if why} == {
        f"nvml.{field}": f"The driver does not tell the {field} of gpu:1 (Not Supported)."}


@pytest.mark.parametrize(("processes", "errors", "said"), [
    ([], (), UNLISTED), ([(1, 900 * MiB)], (), UNLISTED), ([(PID, None)], (), UNTOLD), ([(PID, 0)], (), UNTOLD),
    (NO_PERMISSION, ("processes",), "The driver does not tell the processes of gpu:0 (Insufficient Permissions)."),
])
def test_a_container_without_its_processes_still_adds_up(processes: Any, errors: tuple[str, ...], said: str) -> None:
    """Where the driver lists no process, or in other numbers, context and others are absent, not 0, and the rest is
    the total."""
    made = source(Driver(a100(processes=processes, errors=errors)),
                  [TorchDevice(0, "5c1b7f2e-90aa-4b1d-8c53-2f0d3c1e7a10", 2900 * MiB)], namespaced=True)
    found = parts(told(made.sample(SECOND)), "cuda:0")
    assert found == {"torch": 2900 * MiB, "unexplained": 1166 * MiB, "free": 77854 * MiB}
    assert sum(found.values()) == 81920 * MiB
    assert said in facts(made)["nvml.processes"]


@pytest.mark.parametrize(("torch", "said"), [
    ("torch does not tell.", "torch does not tell."), ([TorchDevice(0, "11111111-aaaa", 5)], UNMATCHED)])
def test_without_torch_only_its_own_parts_are_absent(torch: Any, said: str) -> None:
    """If what torch holds of which device is not known, torch and context are absent; others and the rest are told."""
    made = source(Driver(a100(processes=[(PID, 3000 * MiB), (8, 100 * MiB)])), torch)
    assert parts(told(made.sample(SECOND)), "gpu:0") == {
        "others": 100 * MiB, "unexplained": 966 * MiB, "free": 77854 * MiB}
    assert said in facts(made)["nvml.torch"]


def test_mig_instances_tell_their_own_memory() -> None:
    """With MIG on, memory and accounting are those of each visible instance; power and heat are the GPU's."""
    instance = Gpu(uuid="MIG-aaaabbbb-0000-5555-9999-ccccddddeeee", name="NVIDIA A100-SXM4-80GB MIG 1g.10gb",
                   memory=(9856 * MiB, 9000 * MiB), processes=[(PID, 800 * MiB)])
    gpu = a100(mig=[1, 1], instances={3: instance}, utilization=NOT_SUPPORTED, errors=("utilization",))
    made = source(Driver(gpu), [TorchDevice(0, "aaaabbbb-0000-5555-9999-ccccddddeeee", 500 * MiB)])
    values = told(made.sample(SECOND))
    assert {key[1] for key in values if key[0].startswith("hw.gpu.memory")} == {instance.uuid}
    assert {key[1] for key in values if key[0] in ("hw.power", "hw.temperature")} == {gpu.uuid}
    assert parts(values, "cuda:0") == {"torch": 500 * MiB, "context": 300 * MiB, "others": 0, "unexplained": 56 * MiB,
                                       "free": 9000 * MiB}
    assert facts(made)["nvml.utilization"] == "The driver does not tell the utilization of gpu:0 (Not Supported)."
    hidden = source(Driver(a100(mig=[1, 1], instances={})))
    assert not [key for key in told(hidden.sample(SECOND)) if "memory" in key[0]]
    assert "MIG is on" in facts(hidden)["nvml.memory"]


# -- the driver comes and goes -------------------------------------------------------------------------


def test_a_driver_that_disappears_comes_back() -> None:
    """A driver that answers nothing any more is let go of, is asked again after 30 s and not before, and then tells."""
    driver = Driver(a100())
    made = source(driver)
    before = told(made.sample(SECOND))
    driver.broken = UNINITIALIZED
    for at in (2 * SECOND, RETRY_NS):
        assert list(made.sample(at)) == []
        assert set(facts(made).values()) == {"The driver does not answer any more (Uninitialized)."}
    driver.broken = None
    assert list(made.sample(2 * SECOND + RETRY_NS - 1)) == []
    assert told(made.sample(2 * SECOND + RETRY_NS)) == before
    assert set(facts(made).values()) == {""}
    assert driver.calls == ["init", "shutdown", "init"]


def test_a_driver_that_is_not_there_is_asked_every_30_s() -> None:
    """In 100 s of polls a driver that is not loaded is initialised at 0, 30, 60 and 90 s, and one subject says why."""
    driver = Driver(a100())
    driver.broken = DRIVER_NOT_LOADED
    asked: list[int] = []
    made = source(driver)
    for second in range(100):
        driver.inside = lambda second=second: asked.append(second)  # type: ignore[misc]
        assert list(made.sample(second * SECOND)) == []
    assert asked == [0, 30, 60, 90]
    assert facts(made) == {"nvml": "The NVIDIA driver does not answer (Driver Not Loaded)."}


def test_one_lost_device_does_not_hide_the_other() -> None:
    """A GPU that fell off the bus is named as such; the other one is told, under its own number."""
    made = source(Driver(GPU_IS_LOST, t4()))
    values = told(made.sample(SECOND))
    assert {key[1] for key in values if key[0] == "kvobs.device.memory"} == {"gpu:1"}
    assert facts(made)["nvml"] == "The driver tells nothing of gpu:0 (GPU is lost)."


def test_no_device_is_a_reason() -> None:
    """A driver without devices, and devices of which none answers, are absences with a reason."""
    made = source(Driver())
    assert list(made.sample(SECOND)) == []
    assert facts(made) == {"nvml": NO_DEVICE}
    silent = source(Driver(GPU_IS_LOST))
    assert list(silent.sample(SECOND)) == []
    assert facts(silent) == {"nvml": "The driver tells nothing of gpu:0 (GPU is lost)."}


def test_devices_are_listed_anew() -> None:
    """A device that is added is told at most 30 s later, without another initialisation."""
    driver = Driver(a100())
    made = source(driver)
    first = told(made.sample(0))
    driver.gpus.append(t4())
    assert told(made.sample(RETRY_NS - 1)).keys() == first.keys()
    assert len(told(made.sample(RETRY_NS))) == 2 * len(first)
    assert driver.calls == ["init"]


def test_what_is_installed_is_let_go_of() -> None:
    """One initialisation, one shutdown at uninstall (also a second one), nothing asked before and after."""
    driver = Driver(a100())
    made = source(driver)
    assert driver.calls == []
    made.sample(SECOND)
    made.sample(2 * SECOND)
    made.uninstall()
    made.uninstall()
    assert driver.calls == ["init", "shutdown"]
    assert list(made.sample(3 * SECOND)) == []
    assert facts(made) == {}
    made.install(lambda _: None)
    assert told(made.sample(4 * SECOND))
    assert driver.calls == ["init", "shutdown", "init"]


def test_uninstall_during_a_poll_leaves_nothing_initialised() -> None:
    """If the source is uninstalled while the driver is being asked, the driver is shut down once, by whoever comes."""
    driver = Driver(a100())
    made = source(driver)
    made.sample(SECOND)
    began = threading.Event()

    def uninstall() -> None:
        began.set()
        made.uninstall()

    thread = threading.Thread(target=uninstall)

    def start() -> None:
        driver.inside = lambda: None
        thread.start()
        wait_until(began.is_set)

    driver.inside = start
    made.sample(2 * SECOND)
    thread.join()
    assert driver.calls == ["init", "shutdown"]
    assert list(made.sample(3 * SECOND)) == []


def test_a_driver_that_hangs_does_not_hold_up_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninstalling while the driver does not answer returns; the one who asks shuts it down once it is answered."""
    monkeypatch.setattr(_nvml, "STOP_S", 0.01)
    driver = Driver(a100())
    made = source(driver)
    made.sample(SECOND)

    def hang() -> None:
        driver.inside = lambda: None
        made.uninstall()  # would wait for this very question for ever
        assert driver.calls == ["init"]

    driver.inside = hang
    made.sample(2 * SECOND)
    assert driver.calls == ["init", "shutdown"]
