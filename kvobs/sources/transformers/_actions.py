"""What can be done to the caches of transformers: the actuator of this engine, and what its hooks call.

The safe point is the end of the outermost forward pass and of a generate call: no code of transformers holds a tensor
of a cache then. While nothing runs, a thread of the actuator's own carries out what waits. What is idle, and may be
moved to host memory, is brought back before the pass that uses it. Read from outside meanwhile, such a cache shows
tensors of the host.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from kvobs.bus import Bus
from kvobs.model import Capability, Effect, Emit
from kvobs.sources._safe_point import Action, Result, SafePoint, refused
from kvobs.sources._torch_capture import anything_captured
from kvobs.sources.transformers._actions_cut import Cuts
from kvobs.sources.transformers._actions_growth import Growth
from kvobs.sources.transformers._actions_moves import Device, Moves, find_device
from kvobs.sources.transformers._actions_use import Uses
from kvobs.sources.transformers._caches import SOURCE, CacheRecord, CacheRegistry

NOT_THERE = "transformers has not been imported in this process."
PAUSED = "Observation is paused, so that it is not known which caches are in use."
CAPTURING = "A CUDA graph is being captured, and nothing is done meanwhile."
NO_CACHES = "No cache that may be moved is alive."
NONE_IDLE = "No cache on an accelerator has been without a step for {seconds:g} s."
ON_HOST = "All caches lie in host memory already."
NONE_GROWS = "No live cache grows by concatenation; there are {kinds}."
OTHERS = "Layers of {kinds} stay as they are."
STAY = "{failed} caches stay in host memory, for want of room, and come back when they are used."
_log = logging.getLogger("kvobs")


class Actions:
    """One process's actions on caches. ``attach`` tells of the caches once transformers is there."""

    def __init__(self, bus: Bus, emit: Emit, *, cut: bool = False) -> None:
        self._bus = bus
        self._registry: CacheRegistry | None = None
        self._tell: Callable[[CacheRecord], None] = lambda record: None
        self.uses = Uses()
        self.growth = Growth(emit, _is_compiling)
        self._moves = Moves(self.uses, self.growth, self._records, self._everything, self._told)
        self.cuts = Cuts(self.uses, self.growth, self._records, self._told) if cut else None
        self.point = SafePoint(SOURCE, (
            Action(Capability(1, "chunked_growth", True, "Let growing layers write into spare room instead of copying "
                                                         "all of K and V for each token."),
                   self._plan_chunks, self._chunks, self._plain),
            Action(Capability(1, "compact", False, "Copy K and V that waste room or pin a segment into exact buffers, "
                                                   "and return empty segments."), self._plan_compact, self._compact),
            Action(Capability(2, "offload", True, "Move idle caches to host memory; each is back before it is used.",
                              again=True),
                   self._plan_offload, self._offload, self._fetch_all),
            *self._cutting(),
        ), emit, idle=self.uses.idle)

    def attach(self, registry: CacheRegistry, tell: Callable[[CacheRecord], None]) -> None:
        """The caches to act on, and who tells what one holds after it was rearranged."""
        self._registry, self._tell = registry, tell

    # -- what the hooks call ---------------------------------------------------------------------------

    def begins(self, record: CacheRecord | None = None) -> None:
        """A pass (over a cache) or a generate call begins on this thread; never raises."""
        self.uses.begins(record)
        if record is not None and self.growth.any_away():
            try:
                self._moves.fetch(record, find_device)  # what has no room is tried again, layer by layer, in the pass
            except Exception as error:
                _log.warning("kvobs: a cache could not be brought back ahead of a pass (%s: %s).",
                             type(error).__name__, error)

    def ends(self, record: CacheRecord | None = None) -> None:
        """It has ended."""
        self.uses.ends(record)

    def close(self) -> None:
        """Undo what is in effect; a layer that cannot be brought back now still comes back when it is used."""
        self.point.close()
        self.growth.plain()
        if self.growth.any_away():
            with contextlib.suppress(Exception):  # what stays away is told below, and comes back when it is used
                self._moves.fetch_all(find_device(), left=0.0)
        if self.growth.any_away():
            _log.warning("kvobs: some caches have no room on their device and stay in host memory until they are used.")
        self._registry = None

    def after_fork_in_child(self) -> None:
        """Other threads' passes and orders are the parent's."""
        self.point.after_fork_in_child()
        self.uses.after_fork_in_child()
        self.growth.after_fork_in_child()

    # -- what there is ---------------------------------------------------------------------------------

    def _records(self) -> list[CacheRecord]:
        """Live caches that have been seen in a pass since observation began, or began again."""
        epoch = self._bus.epoch
        return [record for record in self._everything() if not record.blind and record.epoch == epoch]

    def _everything(self) -> list[CacheRecord]:
        return self._registry.records() if self._registry is not None else []

    def _told(self, record: CacheRecord) -> None:
        if self._bus.active and record.epoch == self._bus.epoch:
            with contextlib.suppress(Exception):  # the sweep after its next pass tells the same
                self._tell(record)

    def _cannot(self) -> str:
        if self._registry is None or not self.growth.classes:
            return NOT_THERE
        if not self._bus.active:
            return PAUSED
        return CAPTURING if anything_captured() else ""

    def _rest(self) -> str:
        kinds = self._moves.others()
        return OTHERS.format(kinds=", ".join(kinds)) if kinds else ""

    # -- cuts ------------------------------------------------------------------------------------------

    def _cutting(self) -> tuple[Action, ...]:
        cuts = self.cuts
        if cuts is None:
            return ()
        return (Action(Capability(1, "cut_pending_evict", False, "Remove tokens from caches that no layer attends to "
                                                                 "any more; the others keep their positions."),
                       lambda: Effect(None, None, why) if (why := self._cannot()) else cuts.plan(),
                       lambda deadline_ns: refused(why) if (why := self._cannot()) else cuts.carry_out(deadline_ns)),)

    # -- growth ----------------------------------------------------------------------------------------

    def _cannot_grow(self) -> str:
        if why := self._cannot():
            return why
        layers = [layer for record in self._records() for layer in record.layers() or ()]
        if not layers or any(map(self.growth.growing, layers)):
            return ""
        return NONE_GROWS.format(kinds=", ".join(sorted({type(layer).__name__ for layer in layers})))

    def _plan_chunks(self) -> Effect:
        why = self._cannot_grow()
        return Effect(None if why else 0, None, why)

    def _chunks(self, deadline_ns: int) -> Result:
        if self.growth.chunked:
            return Result(True)
        if why := self._cannot_grow():
            return refused(why)
        self.growth.chunks()
        return Result(True, 0, self._rest())

    def _plain(self, deadline_ns: int) -> Result:
        self.growth.plain()
        return Result(True, self._moves.trim(deadline_ns) if not self._cannot() else 0)

    # -- compaction ------------------------------------------------------------------------------------

    def _plan_compact(self) -> Effect:
        if why := self._cannot():
            return Effect(None, None, why)
        wasted = self._moves.wasted()
        return Effect(wasted, None, "" if wasted else "No live cache wastes room; what pins segments shows only then.")

    def _compact(self, deadline_ns: int) -> Result:
        if why := self._cannot():
            return refused(why)
        if not any(self._moves.layers(record) for record in self._records()):
            return refused(f"{NO_CACHES} {self._rest()}".strip())
        return Result(True, self._moves.compact(find_device(), deadline_ns), self._rest())

    # -- host memory -----------------------------------------------------------------------------------

    def _plan_offload(self) -> Effect:
        if why := self._cannot():
            return Effect(None, None, why)
        idle = self._moves.idle()
        return Effect(idle, None, "" if idle else NONE_IDLE.format(seconds=self.uses.idle_ns / 1e9))

    def _offload(self, deadline_ns: int) -> Result:
        if why := self._cannot():
            return refused(why)
        if not self._moves.idle():
            if self.growth.any_away():
                return Result(True)
            return refused(f"{NONE_IDLE.format(seconds=self.uses.idle_ns / 1e9)} {self._rest()}".strip())
        device: Device = find_device()
        freed = self._moves.offload(device, deadline_ns)
        if not self.growth.any_away():
            return refused("Every idle cache began to be used meanwhile.")
        return Result(True, freed, self._rest())

    def _fetch_all(self, deadline_ns: int) -> Result:
        failed = self._moves.fetch_all(find_device()) if self.growth.any_away() else 0
        return Result(True, 0, STAY.format(failed=failed) if failed else "")


def _is_compiling() -> bool:
    import torch

    return bool(torch.compiler.is_compiling())


