"""Which panels must move in each incident, by how much, and which must not: what a reader concludes the cause from.

A panel moves if what it shows in the incident fulfils its relation; the same relation must not hold while the process
of the scenario ``calm`` does nothing but chat. Panels are named as on the boards: slug, title and query.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tests.dashboards.answers import Peak

MIB = 1 << 20
Relation = Literal["rises to", "falls to", "is at most", "is mostly", "has nothing"]


class Says(NamedTuple):
    """What a panel shows in an incident; ``times`` is by how much at least it has changed since before it."""

    board: str
    panel: str
    relation: Relation
    value: float = 0.0
    times: float = 1.0
    ref: str = "A"

    @property
    def moves(self) -> bool:
        """Whether it must move."""
        return self.relation in ("rises to", "falls to")

    def holds(self, before: Peak, during: Peak) -> bool:
        """Whether it was so."""
        if self.relation == "has nothing":
            return during.high is None
        if self.relation == "is mostly":  # a busy machine may miss a scrape
            return during.usual == self.value
        if during.high is None or during.low is None:
            return self.relation == "is at most"  # nothing is no rise
        if self.relation == "rises to":
            return during.high >= self.value and during.high >= self.times * (before.high or 0.0)
        if self.relation == "falls to":
            return during.low <= self.value and (before.low is None or during.low * self.times <= before.low)
        return during.high <= self.value


# What is quiet unless it is the incident.
NO_MOVES = Says("overview", "KV moved", "has nothing")
NO_OOM = Says("overview", "Out of memory", "is at most", 0, ref="B")
NO_CALL_LOST = Says("overview", "Out of memory", "is at most", 0)
NO_PREEMPTIONS = Says("overview", "Preemptions", "is at most", 0)
NOTHING_LOST = Says("overview", "Telemetry lost", "is at most", 0)
REACHED = Says("overview", "Unreachable", "is mostly", 0)
FEW_UNUSED = Says("overview", "Reserved but unused", "is at most", 0.25)
FAST = Says("overview", "Allocation p95", "is at most", 0.012)
FITS = Says("allocator", "Free in split segments", "is at most", 16 * MIB)

SAME = {"vllm": "preemption"}  # scenarios with the cause of another, in another engine
EXPLAINED: dict[str, tuple[Says, ...]] = {
    "calm": (NO_MOVES, NO_OOM, NO_PREEMPTIONS, NOTHING_LOST, REACHED, FEW_UNUSED, FAST, FITS),
    # What the session wants (four buffers of 24 MiB) is free in sum, but in segments that live blocks pin, and no free
    # block has room for two of them.
    "fragmentation": (
        Says("overview", "Out of memory", "rises to", 1),
        Says("overview", "Out of memory", "rises to", 1, ref="B"),
        Says("overview", "Reserved but unused", "rises to", 0.4, 4),
        Says("allocator", "Worst share in the window", "rises to", 0.4, 4),
        Says("allocator", "Free in split segments", "rises to", 96 * MIB, 4),
        Says("allocator", "Smallest largest free block", "is at most", 32 * MIB),
        Says("allocator", "Retries and failures", "rises to", 0.5),
        Says("requests", "Turns not ok", "rises to", 0.2),
        Says("slo-breaker", "Burn rate", "rises to", 14.4),
        NO_MOVES, NO_PREEMPTIONS, NOTHING_LOST, REACHED, FAST),
    # Everything is allocated, nothing is unused: there is too little, wherever it lies.
    "capacity": (
        Says("overview", "Out of memory", "rises to", 1),
        Says("overview", "Out of memory", "rises to", 1, ref="B"),
        Says("allocator", "Reserved memory by state", "rises to", 190 * MIB, 1.3),
        Says("requests", "Turns not ok", "rises to", 0.2),
        Says("slo-breaker", "Burn rate", "rises to", 14.4),
        Says("overview", "Reserved but unused", "is at most", 0.1),
        Says("allocator", "Worst share in the window", "is at most", 0.1),
        Says("allocator", "Smallest largest free block", "is at most", 8 * MIB),
        FITS, NO_MOVES, NO_PREEMPTIONS, NOTHING_LOST, REACHED, FAST),
    "migration": (
        Says("overview", "KV moved", "rises to", 100_000),
        Says("overview", "Mean duration of a move", "rises to", 1e-6),
        Says("migration", "Moves now", "rises to", 4),
        Says("migration", "Copied between devices", "rises to", 100_000, 2),
        NO_OOM, NO_PREEMPTIONS, NOTHING_LOST, REACHED, FEW_UNUSED, FAST, FITS),
    "preemption": (
        Says("overview", "Preemptions", "rises to", 0.5),
        Says("overview", "Fullest KV pool", "rises to", 0.8, 1.5),
        Says("kv-cache", "Blocks refused", "rises to", 1),
        Says("slo-breaker", "Burn rate", "rises to", 14.4),
        NO_MOVES, NOTHING_LOST, REACHED, FAST, NO_CALL_LOST,
        Says("overview", "Reserved but unused", "is at most", 0.25)),
    "latency": (
        Says("overview", "Allocation p95", "rises to", 0.012, 4),
        Says("overview", "Allocations within 12 ms", "falls to", 0.95),
        Says("allocator", "Slow allocations", "rises to", 5, 4),
        Says("allocator", "Calls for device memory", "rises to", 10, 4),
        Says("slo-breaker", "Burn rate", "rises to", 14.4),
        NO_MOVES, NO_OOM, NO_PREEMPTIONS, NOTHING_LOST, REACHED, FEW_UNUSED, FITS),
    "telemetry": (
        Says("overview", "Telemetry lost", "rises to", 50),
        Says("telemetry", "Lost by stage", "rises to", 50),
        NO_MOVES, NO_OOM, NO_PREEMPTIONS, REACHED, FEW_UNUSED, FAST, FITS),
    "unreachable": (
        Says("overview", "Unreachable", "rises to", 1),
        Says("telemetry", "Events interpreted", "has nothing"),
        Says("overview", "Reserved but unused", "has nothing"),
        Says("overview", "Turns by outcome", "has nothing"),
        NO_MOVES),
    "pressure": (
        Says("overview", "Breaker", "rises to", 2),
        Says("overview", "Actions", "rises to", 0.1),
        Says("overview", "KV moved", "rises to", 1_000_000),
        Says("slo-breaker", "Memory regained", "rises to", 1_000_000),
        NO_PREEMPTIONS, NOTHING_LOST, REACHED, FAST),
    "throttled": (
        Says("overview", "Observation reduced", "rises to", 2),
        NO_MOVES, NO_PREEMPTIONS, NOTHING_LOST, REACHED),
    "bridge": (
        Says("telemetry", "Engines reached", "falls to", 0),
        Says("telemetry", "Age of what engines said", "rises to", 15, 4),
        Says("requests", "Requests by state, as the engine says", "has nothing"),
        REACHED),
    "vllm": (
        Says("overview", "Preemptions", "rises to", 0.1),
        Says("overview", "Requests by state", "rises to", 4, 3),
        Says("overview", "Fullest KV pool", "rises to", 0.8, 1.5),
        Says("kv-cache", "Blocks refused", "rises to", 1),
        Says("requests", "Why requests wait", "rises to", 1),
        Says("slo-breaker", "Burn rate", "rises to", 14.4),
        NO_MOVES, NOTHING_LOST, REACHED, NO_CALL_LOST),
}
