"""What this process is of a vLLM server: its role and its ranks, from vLLM's own configuration.

A process may be several things at once (an engine in process has its scheduler, its worker and its front end in
one): it is called what ``ROLES`` names first. ``dp`` is the rank of the replica, also where replicas are independent
of each other; ``tp``, ``pp`` and ``pcp`` are ranks within it; ``api`` numbers API servers where there are several.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvobs.model import Emit, ProcessRole

ENGINE = "vllm"
ROLES = ("engine_core", "worker", "api_server", "llm")  # llm: the front end of an engine that serves no network

Ranks = tuple[tuple[str, int], ...]


def replica(parallel: Any) -> Ranks:
    """The rank of an engine core among the replicas of the model, of a ``ParallelConfig``."""
    return (("dp", int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))),)


def worker(parallel: Any, rank: int) -> Ranks:
    """The ranks of the worker number ``rank`` of a replica.

    vLLM numbers workers by pipeline stage, then by prefill context, then by tensor slice: ``parallel_state`` of 0.29
    and 0.32, "ExternalDP x DP x PP x PCP x TP".
    """
    tensor, context = int(parallel.tensor_parallel_size), int(getattr(parallel, "prefill_context_parallel_size", 1))
    ranks: Ranks = (*replica(parallel), ("tp", rank % tensor), ("pp", rank // (tensor * context)))
    return (*ranks, ("pcp", rank // tensor % context)) if context > 1 else ranks


def api_server(parallel: Any) -> Ranks:
    """The number of an API server; none where there is one."""
    count, number = getattr(parallel, "_api_process_count", 1), getattr(parallel, "_api_process_rank", 0)
    return (("api", int(number)),) if count > 1 and number >= 0 else ()


class Roles:
    """The roles that this process was seen to have; the foremost is told when it changes."""

    def __init__(self, emit: Emit, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._emit = emit
        self._clock = clock
        self._found: dict[str, Ranks] = {}
        self.told: ProcessRole | None = None

    def found(self, role: str, ranks: Ranks) -> None:
        """This process has a role (too)."""
        self._found[role] = ranks
        foremost = min(self._found, key=ROLES.index)
        told = ProcessRole(self._clock(), ENGINE, foremost, self._found[foremost])
        if self.told is None or (told.role, told.ranks) != (self.told.role, self.told.ranks):
            self.told = told
            self._emit(told)

    def after_fork_in_child(self) -> None:
        """What the parent is, the child is not."""
        self._found.clear()
        self.told = None
