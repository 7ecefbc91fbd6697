"""What polled sources read, and what kvobs says of itself."""

from __future__ import annotations

import msgspec


class HookFailed(msgspec.Struct, frozen=True, gc=False):
    """A hook of kvobs raised and was detached; the host did not see it."""

    t_ns: int
    source: str
    hook: str
    error: str


class Poll(msgspec.Struct, frozen=True, gc=False):
    """What a polled source read at one instant: (metric of the catalog, its attributes, value).

    A gauge that the source's next poll does not name is absent from then on; a counter's value is the count since
    its own beginning (the process's, the device's), not a difference.
    """

    t_ns: int
    source: str
    duration_ns: int
    readings: tuple[tuple[str, tuple[str, ...], float], ...]


class Availability(msgspec.Struct, frozen=True, gc=False):
    """Whether something can be observed here; ``reason`` is a whole sentence when it cannot."""

    subject: str
    available: bool
    reason: str
