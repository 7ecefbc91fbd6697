"""What virtual devices are described by: their sizes, and how long the driver's calls are modelled to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvobs.allocator.calls import FAST, SLOW, Costs
from kvobs.config import LEAST_DEVICE, MOST_DEVICE, MOST_DEVICES, parse_size


class Unavailable(ValueError):
    """One sentence: why there is no virtual GPU."""


class Device(NamedTuple):
    """One virtual device: its number, and its memory in bytes."""

    number: int
    bytes: int


# Each with what is published of such a device: the source of every figure is in it, also where it is another device's.
_PROFILES = {"A100": FAST, "L40S": SLOW}


def latency_profiles() -> dict[str, Costs]:
    """What calls of a driver are modelled to take, by the profile's name; medians, no spread is modelled.

    What ``source`` does not tell (None: unmapping) takes no time but the host's.
    """
    return dict(_PROFILES)


def costs_named(name: str | None) -> Costs | None:
    """The profile of a name; None for none.

    Raises:
        Unavailable: there is no such profile.
    """
    if name is not None and name not in _PROFILES:
        raise Unavailable(f"There is no latency profile {name!r}; {', '.join(_PROFILES)} are known.")
    return None if name is None else _PROFILES[name]


def sizes(devices: Sequence[str | int]) -> tuple[int, ...]:
    """Bytes of each device, of texts such as ``"24GiB"`` or numbers of bytes.

    Raises:
        Unavailable: no size, too many of them, or one out of range.
    """
    if isinstance(devices, str):
        raise Unavailable(f"{devices!r} is no list of devices; a size for each is one, such as ['24GiB'].")
    if not 1 <= len(devices) <= MOST_DEVICES:
        raise Unavailable(f"{len(devices)} virtual devices are not allowed; from 1 to {MOST_DEVICES} are.")
    found: list[int] = []
    for text in devices:
        try:
            size = text if isinstance(text, int) else parse_size(text)
        except (TypeError, ValueError):
            size = 0
        if not LEAST_DEVICE <= size <= MOST_DEVICE:
            raise Unavailable(f"{text!r} is no size of a virtual device; from 32MiB to 1TiB is allowed, such as 24GiB.")
        found.append(size)
    return tuple(found)
