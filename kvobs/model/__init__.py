"""The inert data model: what happened, in integers with units in their names.

Sources append these records on the engine's thread; one drain thread interprets them. Times ending in
``_ns`` are ``time.monotonic_ns`` of the process that made the record and are never compared across
processes. ``None`` means absent (not known, not applicable), never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kvobs.model._cache import (
    Attention,
    Blocks,
    CacheGone,
    CacheUpdates,
    Migration,
    Origin,
    Resized,
    Rewrite,
    Step,
    Turn,
)
from kvobs.model._memory import (
    Allocation,
    AllocationLatencies,
    AllocatorState,
    FlightRecord,
    LatencyCounts,
    MemoryMap,
    OutOfMemory,
)
from kvobs.model._protect import ActionTaken, Actuator, Capability, Decided, DeviceNow, Effect, Order
from kvobs.model._self import Availability, HookFailed, Poll
from kvobs.model._serving import (
    Evictions,
    PoolWork,
    Preemption,
    ProcessRole,
    RequestPhase,
    RequestRow,
    RequestStates,
)

Event = (
    Step | Migration | Rewrite | Resized | CacheGone | Blocks | Turn | Allocation | AllocationLatencies | AllocatorState
    | OutOfMemory | HookFailed | Attention | CacheUpdates | Poll | FlightRecord | MemoryMap | Availability
    | PoolWork | Evictions | Preemption | RequestPhase | RequestStates | ProcessRole
    | Decided | ActionTaken
)
Emit = Callable[[Event], None]


class Source(Protocol):
    """One third party that kvobs observes. Installing must be exactly undone by uninstalling."""

    name: str

    def install(self, emit: Emit) -> None:
        """Hook in (or arrange to when the library is imported). Never raises for an absent library."""

    def uninstall(self) -> None:
        """Restore every patched object by identity; safe to call twice."""

    def sample(self, now_ns: int) -> Iterable[Event]:
        """Called about once a second on the drain thread; what a poll can see."""

    def availability(self) -> Iterable[Availability]:
        """What this source can observe here and what not, with reasons."""


__all__ = [
    "ActionTaken",
    "Actuator",
    "Allocation",
    "AllocationLatencies",
    "AllocatorState",
    "Attention",
    "Availability",
    "Blocks",
    "CacheGone",
    "CacheUpdates",
    "Capability",
    "Decided",
    "DeviceNow",
    "Effect",
    "Emit",
    "Event",
    "Evictions",
    "FlightRecord",
    "HookFailed",
    "LatencyCounts",
    "MemoryMap",
    "Migration",
    "Order",
    "Origin",
    "OutOfMemory",
    "Poll",
    "PoolWork",
    "Preemption",
    "ProcessRole",
    "RequestPhase",
    "RequestRow",
    "RequestStates",
    "Resized",
    "Rewrite",
    "Source",
    "Step",
    "Turn",
]
