"""Retractions: running requests that lose their blocks, at the moment when they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvobs import model
from kvobs.model import Emit
from kvobs.sources.sglang._pools import PoolSet

MOST_HOLDERS = 8


class Retractions:
    """Between ``begin`` and ``end`` the decode batch is in SGLang's retraction loop.

    ``cause`` of a preemption: ``blocks`` (the batch's next step did not fit; SGLang asks for the batch as a whole, so
    that nobody is named as who wanted the blocks), ``forced`` (SGLang's test mode retracts without need) or ``reset``
    (outside the loop: an operator paused the engine and had it retract, say).
    """

    def __init__(self, emit: Emit, shown: Callable[[str], str]) -> None:
        self._emit, self._shown = emit, shown
        self._pools: PoolSet | None = None
        self._held: dict[str, tuple[int, int]] = {}
        self._cause = "blocks"
        self.refused = False

    @property
    def open(self) -> bool:
        """Whether a retraction is going on."""
        return self._pools is not None

    def begin(self, pools: PoolSet, reqs: Sequence[Any]) -> None:
        """Note who holds what: pages in all, and pages outside the tree."""
        page = pools.page_size
        self._pools, self._cause = pools, "blocks" if self.refused else "forced"
        self._held = {req.rid: (-(-req.kv.kv_allocated_len // page),
                                -(-req.kv.kv_allocated_len // page) - req.kv.cache_protected_len // page)
                      for req in reqs}

    def end(self) -> None:
        """The loop is left."""
        self._pools, self._held, self.refused = None, {}, False

    def victim(self, req: Any, outside: PoolSet | None) -> None:
        """A request gave its blocks back. ``outside`` is whose it is where no retraction loop is going on."""
        pools = self._pools or outside
        computed = int(req.kv.kv_committed_len)
        if pools is None or not computed:
            return
        pool = pools.first
        pool.preemptions += 1
        saved = req.kv.retraction_backup is not None  # a copy on the host: nothing is computed again
        lost = 0 if saved else computed
        pools.remember_lost(req.rid, lost)
        _, own = self._held.get(req.rid, (0, pool.blocks(computed)))
        holders = sorted(((rid, held) for rid, (held, _) in self._held.items()), key=lambda one: -one[1])
        self._emit(model.Preemption(
            time.monotonic_ns(), pool.origin, pool.cache_id, req.rid, self._shown(str(req.session_id or "")),
            self._cause if self.open else "reset", "", lost, own, tuple(holders[:MOST_HOLDERS])))
