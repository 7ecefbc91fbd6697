"""Registering the accelerator, once per process: torch cannot take a device type back."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

from kvobs.allocator.calls import Costs
from kvobs.catalog import LATENCY_BOUNDS_NS
from kvobs.virtual import _library
from kvobs.virtual._devices import Device, Unavailable, costs_named, sizes
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
    from kvobs.virtual._settings import change_settings, share_of

    global _library_of_process, _set_up
    wanted, profile, share = sizes(devices), costs_named(latency), share_of(settings)
    with _lock:
        if _set_up is None:
            _library_of_process, share = _register(wanted, settings)
        elif _set_up[0] != wanted:
            raise Unavailable(f"This process has virtual devices of {_told(_set_up[0])} already, and torch cannot "
                              "take a device back; start a new process for others.")
        elif settings:
            change_settings(settings)
        assert _library_of_process is not None
        _model(_library_of_process, len(wanted), profile, share)
        _set_up = wanted, latency
    return [Device(index, size) for index, size in enumerate(wanted)]


def _told(capacities: tuple[int, ...]) -> str:
    return ", ".join(f"{size / 2**20:,.0f} MiB" for size in capacities)


def devices() -> list[Device]:
    """The devices of this process; none before ``setup``."""
    return [] if _set_up is None else [Device(index, size) for index, size in enumerate(_set_up[0])]


def profile_name() -> str | None:
    """The latency profile in use."""
    return None if _set_up is None else _set_up[1]


def _register(wanted: tuple[int, ...], settings: str) -> tuple[Library, float | None]:
    """Until all else has gone well, torch has no accelerator. Tells the library, and the memory fraction in effect."""
    _library.unit()  # says it in a sentence where there is no torch
    import torch

    from kvobs.virtual import _module
    from kvobs.virtual._settings import change_settings, share_of

    own = torch._C._get_privateuse1_backend_name()
    if own not in ("privateuseone", NAME):
        raise Unavailable(f"This process has an accelerator of its own ({own}) in the place of the virtual GPU.")
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        raise Unavailable(f"This process has a real accelerator ({kind}), beside which torch allows no virtual one.")
    before = change_settings(settings) if settings else None
    try:
        share = share_of(torch._C._accelerator_getAllocatorSettings())
        found = _library.opened()
        # Stacks of Python can be had from now on.
        torch._C._profiler.gather_traceback(python=True, script=False, cpp=False)
        capacities, bounds = array("Q", wanted), array("Q", LATENCY_BOUNDS_NS)
        found.check(found.setup(len(capacities), capacities.buffer_info()[0], len(bounds), bounds.buffer_info()[0]))
    except ValueError as error:
        if before is not None:
            torch._C._accelerator_setAllocatorSettings(before)
        raise Unavailable(str(error)) from None
    torch.utils.rename_privateuse1_backend(NAME)
    _module.install(torch, found, wanted)
    return found, share


def _model(found: Library, count: int, profile: Costs | None, share: float | None) -> None:
    told = (profile.alloc_ns, profile.free_ns, profile.map_ns, profile.unmap_ns) if profile else (None,) * 4
    four = array("Q", (ns or 0 for ns in told))
    for index in range(count):
        found.check(found.latencies(index, four.buffer_info()[0]))
        if share is not None:
            found.check(found.set_fraction(index, share))
