"""The metrics that no panel draws, each with the reason."""

from __future__ import annotations

WAIVED: dict[str, str] = {
    "process.memory.virtual": "address space, which torch reserves without using it: no question of an operator",
    "process.thread.count": "a constant of the engine; a leak of threads shows as resident memory and context switches",
}
