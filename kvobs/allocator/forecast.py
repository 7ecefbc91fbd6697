"""What the next step is going to ask for, and what is told of it: the words only, imported at a process's start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvobs.allocator.verdict import Evidence, Verdict


class Demand(NamedTuple):
    """The allocations of one step, in order. ``device`` is a name such as ``cuda:0``; sizes in bytes.

    ``returns`` tells of each what the step gives back once it has been served, by address; empty: nothing.
    """

    device: str
    stream: int
    pool: int
    sizes: tuple[int, ...]
    returns: tuple[tuple[int, ...], ...] = ()


class Growth(NamedTuple):
    """What the next step of one cache asks of one device, and an address in a buffer that it has there now (or 0)."""

    demand: Demand
    address: int = 0


class Forecast(NamedTuple):
    """What the next steps will ask for, and in whole sentences what of it is not known."""

    growths: tuple[Growth, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NextStep:
    """What would become of the next step on one device.

    ``verdict`` is that of the request that decides, the ``index``-th (from 0) of ``requests``, which ask for
    ``requested_bytes``: the first one that fails, else the first of those that cost most. It is None where it cannot
    be told; then ``sentence`` says why. ``not_known`` are whole sentences.
    """

    device: str
    verdict: Verdict | None
    sentence: str
    evidence: Evidence | None = None
    index: int | None = None
    requests: int = 0
    requested_bytes: int = 0
    not_known: tuple[str, ...] = ()
    estimated: bool = True


def absent(reason: str, device: str = "", unknown: tuple[str, ...] = ()) -> NextStep:
    """No verdict, and why."""
    return NextStep(device, None, reason, not_known=unknown)
