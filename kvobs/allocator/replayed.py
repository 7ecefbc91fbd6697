"""What replaying a recording gave, and how far it agrees with what was recorded."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvobs.allocator.state import State


@dataclass(frozen=True, slots=True)
class Score:
    """How many recorded facts the twin was asked about, and how many it told exactly."""

    checked: int = 0
    matched: int = 0


@dataclass(frozen=True, slots=True)
class RecordedOom:
    """An OOM of the history. ``event`` is its index, ``device_free`` what the device had left, ``state`` the
    allocator's state at that moment (None beyond the first 64 of a file). ``reproduced`` tells whether the twin ran out
    of memory there too, None where it was not replayed to there.
    """

    event: int
    requested: int
    stream: int
    pool: int
    device_free: int
    time_us: int
    state: State | None
    reproduced: bool | None


@dataclass(frozen=True, slots=True)
class Replay:
    """A device's history, replayed.

    ``addresses`` scores where each alloc was placed, ``device_allocs`` and ``device_frees`` whether and with which
    size the twin took memory from and gave it back to the device (segments, and pages of expandable segments).
    ``usable`` is false, with a ``reason`` in one sentence, where there is no history or it could not be followed.
    ``initial`` is the state before the first event. The columns have one entry per event: bytes reserved, allocated
    and active (allocated plus pending) after it. ``forced`` lists the alloc events for which the twin's allocator had
    to go to the device. ``engine`` is "C++" or "Python".
    """

    addresses: Score
    device_allocs: Score
    device_frees: Score
    usable: bool
    reason: str
    initial: State
    reserved: array[int]
    allocated: array[int]
    active: array[int]
    forced: array[int]
    ooms: tuple[RecordedOom, ...]
    engine: str

    @property
    def events(self) -> int:
        """Events replayed."""
        return len(self.reserved)
