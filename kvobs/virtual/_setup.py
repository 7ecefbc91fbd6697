"""Registering the accelerator, once per process: torch cannot take a device type back."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

from kvobs.virtual import _library
from kvobs.virtual._devices import Device, Latencies, Unavailable, latencies, sizes
from kvobs.virtual._library import Library

NAME = "vgpu"
_lock = threading.Lock()
_library_of_process: Library | None = None
_set_up: tuple[tuple[int, ...], str | None] | None = None


def setup(devices: Sequence[str | int] = ("24GiB",), settings: str = "", latency: str | None = None) -> list[Device]:
    """Make the accelerator ``vgpu`` with these devices; the same again changes nothing but the settings.

    Args:
        devices: the memory of each, as ``"24GiB"`` or in bytes. Of the host only what is written to is used.
        settings: as in ``PYTORCH_ALLOC_CONF``; changed in what is in effect, see ``change_settings``.
        latency: a profile of ``latency_profiles()``: calls of the driver take the time that it says (modelled).

    Raises:
        Unavailable: no torch, no compiler, another accelerator, or a size or setting that is not allowed.
    """
    from kvobs.virtual._settings import change_settings

    global _library_of_process, _set_up
    wanted, profile = sizes(devices), latencies(latency)
    with _lock:
        if _set_up is None:
            _library_of_process = _register(wanted)
        elif _set_up[0] != wanted:
            raise Unavailable(f"This process has virtual devices of {list(_set_up[0])} bytes already, and torch cannot "
                              "take a device back; start a new process for others.")
        assert _library_of_process is not None
        _model(_library_of_process, len(wanted), profile)
        _set_up = wanted, latency
    if settings:
        change_settings(settings)
    return [Device(index, size) for index, size in enumerate(wanted)]


def devices() -> list[Device]:
    """The devices of this process; none before ``setup``."""
    return [] if _set_up is None else [Device(index, size) for index, size in enumerate(_set_up[0])]


def profile_name() -> str | None:
    """The latency profile in use."""
    return None if _set_up is None else _set_up[1]


def _register(wanted: tuple[int, ...]) -> Library:
    import torch

    own = torch._C._get_privateuse1_backend_name()
    if own not in ("privateuseone", NAME):
        raise Unavailable(f"This process has an accelerator of its own ({own}) in the place of the virtual GPU.")
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        raise Unavailable(f"This process has a real accelerator ({kind}), beside which torch allows no virtual one.")
    found = _library.opened()
    torch._C._profiler.gather_traceback(python=True, script=False, cpp=False)  # stacks of Python can be had from now on
    torch.utils.rename_privateuse1_backend(NAME)
    from kvobs.virtual import _module

    capacities, bounds = array("Q", wanted), array("Q", _module.BOUNDS_NS)
    try:
        found.check(found.setup(len(capacities), capacities.buffer_info()[0], len(bounds), bounds.buffer_info()[0]))
    except ValueError as error:
        raise Unavailable(str(error)) from None
    _module.install(torch, found, wanted)
    return found


def _model(found: Library, count: int, profile: Latencies | None) -> None:
    four = array("Q", profile[:4] if profile else (0, 0, 0, 0))
    for index in range(count):
        found.check(found.latencies(index, four.buffer_info()[0]))
