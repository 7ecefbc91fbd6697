"""How often everything of a process is looked at and committed: once a second, or less where the engine lacks what it
takes. Pure.

A look takes 5 to 20 ms of CPU, most of it for the commit and for the points of each metric, and the drain threads of a
serving engine's processes take turns with the engine on processors that it fills. What happens meanwhile is not lost:
events wait on the bus, and have their own times.
"""

from __future__ import annotations

SECOND_NS = 1_000_000_000
# Of an engine's other processes while nothing happens in them that kvobs hooks: metrics forget what was polled after
# 5 s, and a view calls a process silent after 6 s.
RESTING_NS = 4 * SECOND_NS
RESTING = frozenset({"api_server", "worker"})
CORE, CORE_NS = "engine_core", 2 * SECOND_NS


class Pace:
    """``role`` is what the process is, once that is known; one in which a breaker decides never takes its time."""

    def __init__(self, *, decides: bool) -> None:
        self.role = ""
        self._decides = decides
        self._heard = True  # since the last look
        self._looked_ns = -RESTING_NS

    def due(self, now_ns: int, heard: bool) -> bool:
        """Whether to look at everything now; ``heard`` says whether something happened since the last call."""
        self._heard = self._heard or heard
        return now_ns - self._looked_ns >= self._every_ns()

    def _every_ns(self) -> int:
        if self._decides:
            return SECOND_NS
        if self.role in RESTING:
            return SECOND_NS if self._heard else RESTING_NS
        return CORE_NS if self.role == CORE else SECOND_NS

    def looked(self, now_ns: int) -> None:
        """Everything was looked at."""
        self._looked_ns, self._heard = now_ns, False
