"""How often a process is looked at and its store committed: once a second, or less where nothing is to be seen. Pure.

The drain threads of a serving engine's processes take turns with the engine on processors that it fills: what they
take, it lacks.
"""

from __future__ import annotations

SECOND_NS = 1_000_000_000
# Of an engine's other processes while nothing happens in them that kvobs hooks: metrics forget what was polled after
# 5 s, and a view calls a process silent after 6 s.
RESTING_NS = 4 * SECOND_NS
RESTING = frozenset({"api_server", "worker"})
# A commit costs 2 ms of CPU however little is in it.
CORE, CORE_COMMIT_NS = "engine_core", 2 * SECOND_NS
_EARLY_NS = SECOND_NS // 4  # a tick may come so much early


class Pace:
    """``role`` is what the process is, once that is known."""

    def __init__(self) -> None:
        self.role = ""
        self._heard = True  # since the last look
        self._looked_ns = self._committed_ns = -RESTING_NS

    def look(self, now_ns: int, heard: bool) -> bool:
        """Whether to look at everything now; ``heard`` says whether something happened since the last call."""
        self._heard = self._heard or heard
        rests = self.role in RESTING and not self._heard
        return now_ns - self._looked_ns >= (RESTING_NS if rests else SECOND_NS)

    def looked(self, now_ns: int) -> None:
        """Everything was looked at."""
        self._looked_ns, self._heard = now_ns, False

    def commit(self, now_ns: int) -> bool:
        """Whether what was seen, everything having been looked at, is to be committed now."""
        due = self.role != CORE or now_ns - self._committed_ns >= CORE_COMMIT_NS - _EARLY_NS
        if due:
            self._committed_ns = now_ns
        return due
