"""What the machine knows: its policy, its state and what it tells. Inert."""

from __future__ import annotations

from enum import Enum

import msgspec

from kvobs.breaker._conditions import Condition, Latch

SECOND = 10**9
LEVELS = ("normal", "reorganise", "offload", "degrade")


class Phase(Enum):
    """A level's phase: its actions are not applied, are applied, or are lifted on probation."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """When a level begins and how it ends again. Times in seconds.

    It stays open for ``open_s`` at least, twice as long each time that its probation failed, up to ``longest_open_s``.
    Probation lasts ``half_open_s`` at most, with at most ``probes`` in flight, ``probe_every_s`` apart (and up to the
    policy's jitter more), and ends well after ``probes_needed`` good ones; then it stays closed for ``closed_s``. A
    probe that has told nothing for half of ``half_open_s`` is forgotten, so that another may go out.
    """

    condition: Condition
    open_s: float = 5.0
    closed_s: float = 5.0
    longest_open_s: float = 300.0
    half_open_s: float = 10.0
    probes: int = 1
    probes_needed: int = 3
    probe_every_s: float = 1.0


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The levels 1, 2 and 3 in their order, and what holds for all of them.

    A level follows the one below by ``escalate_s`` at least. At most ``transitions`` fall into any ``within_s``
    seconds. A pause of the machine longer than ``gap_s`` (a stopped process) counts as no time in which anything held.
    """

    name: str
    levels: tuple[Level, ...]
    escalate_s: float = 2.0
    transitions: int = 20
    within_s: float = 60.0
    gap_s: float = 5.0
    jitter: float = 0.2
    seed: int = 0
    caveat: str = ""


class LevelState(msgspec.Struct, frozen=True, kw_only=True):
    """One level: its phase, since when, how long at least, and its probation."""

    phase: Phase = Phase.CLOSED
    since_ns: int
    until_ns: int
    generation: int = 0
    failures: int = 0  # probations that failed in a row
    in_flight: tuple[tuple[int, int], ...] = ()  # the probes that are out: their numbers, and since when (ns)
    sent: int = 0
    passed: int = 0
    failed: bool = False
    probe_ns: int = 0  # when the next probe may go out


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The machine of one scope (a device, a model): levels 1 to 3, latches of their conditions, recent transitions."""

    now_ns: int
    levels: tuple[LevelState, ...]
    latches: tuple[tuple[Latch, ...], ...]
    recent_ns: tuple[int, ...] = ()
    override: int | None = None
    clock_steps: int = 0  # times at which the clock went back

    @property
    def level(self) -> int:
        """The highest level that is applied: 0 to 3."""
        return max((number for number, level in enumerate(self.levels, 1) if level.phase is Phase.OPEN), default=0)

    @property
    def engaged(self) -> int:
        """How many levels are open or half-open."""
        return sum(level.phase is not Phase.CLOSED for level in self.levels)


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """A level changed its phase: why, on which readings, and what was not done instead."""

    t_ns: int
    level: int
    before: Phase
    after: Phase
    reason: str
    readings: tuple[tuple[str, float | str], ...]
    rejected: tuple[str, ...]
    generation: int


class Probe(msgspec.Struct, frozen=True, gc=False):
    """A probe that is out; its outcome counts only while the level has the same generation."""

    level: int
    generation: int
    number: int
