"""What a breaker orders from an engine, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Capability(msgspec.Struct, frozen=True, gc=False):
    """Something that an actuator can do: at which level, by which name, and whether it can be undone.

    ``again``: it acts on what is there at that moment, so that it is worth ordering again while its level stays open,
    whenever its plan says that it would give something back.
    """

    level: int
    kind: str
    reversible: bool
    meaning: str
    again: bool = False


class Effect(msgspec.Struct, frozen=True, gc=False):
    """What an action would do now (estimated); ``reason`` is a sentence where that is nothing, or it is refused."""

    bytes: int | None
    duration_ns: int | None
    reason: str = ""


class Order(msgspec.Struct, frozen=True, gc=False):
    """Do an action, or undo it. ``deadline_ns`` (monotonic) is when it must have begun, and by ``limit_ns`` after its
    beginning it must have ended; without a limit, by the deadline. ``generation`` is the breaker's decision that it
    belongs to.
    """

    level: int
    kind: str
    generation: int
    deadline_ns: int
    undo: bool = False
    limit_ns: int | None = None


class ActionTaken(msgspec.Struct, frozen=True, gc=False):
    """What became of an order. ``bytes`` were given back to the allocator or the device, measured; ``done`` is False
    where nothing was changed, and then ``reason`` is a whole sentence.
    """

    t_ns: int
    actuator: str
    level: int
    kind: str
    undo: bool
    generation: int
    done: bool
    bytes: int
    duration_ns: int
    late: bool
    reason: str


class Decided(msgspec.Struct, frozen=True, gc=False):
    """The breaker changed a level's phase. ``scope`` is a device or a model; ``mode`` is ``observe`` (nothing was done)
    or ``act``; ``before`` and ``after`` are ``closed``, ``open`` or ``half-open``; ``reason`` is a sentence,
    ``rejected`` are clauses on what was not done instead; ``readings`` are the signals' values.
    """

    t_ns: int
    scope: str
    policy: str
    mode: str
    level: int
    before: str
    after: str
    reason: str
    readings: tuple[tuple[str, float | str], ...]
    rejected: tuple[str, ...]
    generation: int


class Actuator(Protocol):
    """An engine's hands. ``submit`` may be called on any thread and never blocks; the orders are carried out at the
    engine's next safe point, each once, in their order, and each is answered by one ``ActionTaken``.

    An order whose deadline has passed before it was begun (unless it is to undo), or whose generation is older than the
    newest of its level that was submitted, is answered and not carried out. Carrying out what is already so changes
    nothing and is answered as done with 0 bytes. Undoing puts the engine back as it was.
    """

    name: str

    def capabilities(self) -> Sequence[Capability]:
        """What it can do here."""
        ...

    def plan(self, kind: str) -> Effect:
        """What that would do now. Raises ValueError for what is not among the capabilities."""
        ...

    def submit(self, order: Order) -> None:
        """Order something for the next safe point."""
        ...


class DeviceNow(msgspec.Struct, frozen=True):
    """One device now. ``headroom`` is the share (0 to 1) of the bytes that this process may have there which is not
    allocated; ``verdict`` is what becomes of the next step of its live caches (estimated), None where ``why`` says, or
    where there is nothing newer than what was told before.
    It is GROW where the device has room for all of it, whether or not free blocks would serve.
    """

    device: str
    headroom: float | None
    verdict: str | None
    why: str = ""
