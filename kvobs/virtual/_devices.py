"""What a virtual device is described by: its size, and how long its driver's calls are modelled to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvobs.config import LEAST_DEVICE, MOST_DEVICE, MOST_DEVICES, parse_size


class Unavailable(ValueError):
    """One sentence: why there is no virtual GPU."""


class Device(NamedTuple):
    """One virtual device: its number, and its memory in bytes."""

    number: int
    bytes: int


class Latencies(NamedTuple):
    """How long calls of a driver are modelled to take, ns: cudaMalloc, cudaFree, mapping and unmapping 2 MiB."""

    malloc: int
    free: int
    map_page: int
    unmap_page: int
    source: str


# Medians of published measurements; no spread is modelled.
_PROFILES = {
    "A100": Latencies(360_000, 180_000, 193_000, 96_000,
                      "cudaMalloc: median 0.36 ms in a public PyTorch trace; mapping: 193 us on average per 2 MiB page "
                      "(CUDA VMM on an A100); giving back: half of taking, assumed"),
    "L40S": Latencies(5_500_000, 2_750_000, 568_000, 284_000,
                      "cudaMalloc: median 5.5 ms in a public PyTorch trace; mapping: 14.2 ms for 25 pages of 2 MiB on "
                      "an L40S; giving back: half of taking, assumed"),
}


def latency_profiles() -> dict[str, Latencies]:
    """The profiles by name, each with its source."""
    return dict(_PROFILES)


def latencies(name: str | None) -> Latencies | None:
    """The profile of a name; None for none.

    Raises:
        Unavailable: there is no such profile.
    """
    if name is None:
        return None
    if name not in _PROFILES:
        raise Unavailable(f"There is no latency profile {name!r}; {', '.join(_PROFILES)} are known.")
    return _PROFILES[name]


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
