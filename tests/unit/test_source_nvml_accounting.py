"""NVML: who holds a device's memory, forks, and the real modules of this machine."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.sources import _nvml_torch
from kvobs.sources._device_memory import UNLISTED, UNTOLD, owners, split
from kvobs.sources._nvml import FORKED, NO_DEVICE, NOT_INSTALLED, RETRY_NS, NvmlSource
from kvobs.sources._nvml_torch import TorchDevice
from tests.unit.test_source_nvml import (
    PID,
    SECOND,
    Driver,
    MiB,
    a100,
    facts,
    source,
    told,
)

# -- who holds the memory ------------------------------------------------------------------------------

BYTES = st.integers(0, 1 << 40)


@given(BYTES, BYTES, st.none() | BYTES, st.lists(st.tuples(st.integers(1, 4), st.none() | BYTES), max_size=6),
       st.booleans())
def test_the_parts_add_up(total: int, free: int, torch: int | None, processes: list[tuple[int, int | None]],
                          namespaced: bool) -> None:
    """Whatever the driver and torch say, and however they contradict: no part is negative, and all of them are the
    total; only where torch is not known the sum lacks what this process holds."""
    found = owners(processes, 1, torch, namespaced=namespaced)
    owned = None if isinstance(found, str) else found
    result = split(total, free, torch, owned)
    assert min(result.values()) >= 0
    lacking = 0 if torch is not None or owned is None else min(owned[0], total - min(free, total))
    assert sum(result.values()) == total - lacking
    assert ("torch" in result) == (torch is not None)
    assert ("context" in result) == (torch is not None and owned is not None)
    assert ("others" in result) == (owned is not None)


@given(st.lists(BYTES, min_size=5, max_size=5))
def test_parts_without_a_race_are_what_they_were(truth: list[int]) -> None:
    """Built from known parts, the driver's figures are taken apart into the same parts again."""
    torch, context, others, unexplained, free = truth
    processes = [(1, torch + context), *([(2, others)] if others else [])]
    found = owners(processes, 1, torch, namespaced=False)
    assert not isinstance(found, str)
    assert split(sum(truth), free, torch, found) == {
        "torch": torch, "context": context, "others": others, "unexplained": unexplained, "free": free}


def test_a_race_makes_a_part_smaller_not_negative() -> None:
    """Torch freed 300 after the driver's instant and a neighbour took 500: torch keeps its claim, others the rest."""
    assert split(1000, 200, 700, (650, 500)) == {
        "free": 200, "torch": 700, "context": 0, "others": 100, "unexplained": 0}


@pytest.mark.parametrize(("processes", "torch", "namespaced", "expected"), [
    ([], 0, False, (0, 0)), ([(2, 5)], 0, False, (0, 5)), ([(2, 5)], None, False, (0, 5)),
    ([(1, 7), (2, 5), (1, 3)], 4, True, (10, 5)), ([(1, 7)], 0, True, (7, 0)),
    ([], 0, True, UNLISTED), ([(2, 5)], 0, True, UNLISTED), ([(2, 5)], 3, False, UNLISTED),
    ([(1, 7), (2, None)], 3, False, UNTOLD), ([(1, 0)], 3, False, UNTOLD),
])
def test_the_list_of_processes_is_believed_only_where_it_can_be(
        processes: list[tuple[int, int | None]], torch: int | None, namespaced: bool, expected: Any) -> None:
    """A list that lacks this process counts only on the machine itself, and only while torch holds nothing."""
    assert owners(processes, 1, torch, namespaced=namespaced) == expected


# -- the real modules of this machine ------------------------------------------------------------------


def test_the_real_driver_or_its_reason() -> None:
    """On this machine the real pynvml tells its devices, or there is no poll and one reason."""
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed.")
    devices, refusal = [], ""
    try:
        pynvml.nvmlInit()
        devices = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
                   for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        refusal = str(error)
    made = NvmlSource()
    made.install(lambda _: None)
    polls = list(made.sample(SECOND))
    if devices:
        assert {key[1] for key in told(polls) if key[0] == "hw.power"} <= set(devices)
    else:
        assert polls == []
        assert facts(made) == {"nvml": f"The NVIDIA driver does not answer ({refusal})." if refusal else NO_DEVICE}
    made.uninstall()
    if not refusal:
        pynvml.nvmlDeviceGetCount()  # another user's initialisation is still there
        pynvml.nvmlShutdown()


def test_without_the_module_the_reason_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pynvml is not installed the reason has the line that installs it."""
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    made = NvmlSource()
    made.install(lambda _: None)
    assert list(made.sample(SECOND)) == []
    assert facts(made) == {"nvml": NOT_INSTALLED}


def test_torch_without_cuda_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torch, and a torch that has not initialised CUDA, hold nothing of any device, and CUDA stays uninitialised."""
    import sys

    torch = pytest.importorskip("torch", reason="torch is not installed.")
    before = torch.cuda.is_initialized()
    if not before:
        assert _nvml_torch.reserved() == []
    assert torch.cuda.is_initialized() == before
    monkeypatch.delitem(sys.modules, "torch")
    assert _nvml_torch.reserved() == []


def _cuda(**changes: Any) -> SimpleNamespace:
    """A torch of two CUDA devices after it has initialised them, as far as it is asked."""
    stats = [{"reserved_bytes": {"all": {"current": held, "peak": held}}, "num_ooms": 0} for held in (300, 0)]
    uuids = ["0d9a4c3b-1111-2222-3333-444455556666", "5c1b7f2e-90aa-4b1d-8c53-2f0d3c1e7a10"]
    parts: dict[str, Any] = {"stats": stats.__getitem__, "initialised": True,
                             "properties": lambda index: SimpleNamespace(uuid=uuids[index])} | changes
    return SimpleNamespace(
        _C=SimpleNamespace(_accelerator_getDeviceStats=parts["stats"],
                           _accelerator_isAllocatorInitialized=lambda: parts["initialised"]),
        accelerator=SimpleNamespace(current_accelerator=lambda: SimpleNamespace(type="cuda"), device_count=lambda: 2),
        cuda=SimpleNamespace(is_initialized=lambda: parts["initialised"], get_device_properties=parts["properties"]))


def _refuse(_: int) -> Any:
    raise AttributeError("uuid")


@pytest.mark.parametrize(("torch", "expected"), [
    (_cuda(), [TorchDevice(0, "0d9a4c3b-1111-2222-3333-444455556666", 300),
               TorchDevice(1, "5c1b7f2e-90aa-4b1d-8c53-2f0d3c1e7a10", 0)]),
    (_cuda(initialised=False, properties=lambda _: pytest.fail("CUDA would be initialised")), []),
    (_cuda(properties=_refuse), "torch does not tell what it has reserved of which device (AttributeError)."),
    (_cuda(stats=lambda _: {}), "The allocator of torch does not tell what it has reserved of cuda:0."),
    (SimpleNamespace(), "torch does not tell what it has reserved of which device (AttributeError)."),
])
def test_torch_tells_what_it_has_reserved(torch: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved bytes by UUID once CUDA is initialised; before, nothing and no question that would initialise it; an
    older torch, or one that is just being imported, is a reason."""
    import sys

    monkeypatch.setitem(sys.modules, "torch", torch)
    assert _nvml_torch.reserved() == expected


def test_a_forked_child_initialises_for_itself() -> None:
    """The child initialises NVML again and never shuts down what is its parent's; the parent goes on."""
    driver = Driver(a100(processes=[(PID, 3434 * MiB)]))
    made = source(driver)
    made.sample(SECOND)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            made.after_fork_in_child()
            polled = bool(list(made.sample(SECOND + 1)))
            os.write(writing, f"{polled} {' '.join(driver.calls)}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "True init init"
    os.waitpid(child, 0)
    assert told(made.sample(2 * SECOND))
    assert driver.calls == ["init"]


def test_a_child_forked_in_the_middle_of_a_question_asks_nothing() -> None:
    """Forked by another thread while the driver was being asked, the child leaves the driver alone and says why."""
    driver = Driver(a100())
    made = source(driver)
    seen: list[object] = []

    def fork() -> None:
        driver.inside = lambda: None
        child = NvmlSource(driver, list, lambda: False, lambda: PID)
        child.__dict__.update(made.__dict__)  # what a child of this moment has in its memory
        child.after_fork_in_child()
        seen.extend([list(child.sample(SECOND)), list(child.sample(10 * RETRY_NS)), facts(child)])

    driver.inside = fork
    made.sample(SECOND)
    assert seen == [[], [], {"nvml": FORKED}]
