"""What can be done to torch's allocators and the C heap: return cached memory, and collect it earlier.

None of it touches a tensor, and torch's and glibc's own locks make it safe on any thread; it belongs to no engine, so
it is a guest at the safe points of those that there are. Nothing is done while a CUDA graph is being captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvobs.analysis import article_fragmentation_rate
from kvobs.model import Capability, Effect, Emit
from kvobs.sources import _glibc
from kvobs.sources._safe_point import Action, Result, SafePoint, refused
from kvobs.sources._torch_handle import Torch
from kvobs.sources._torch_stats import blocks, touched
from kvobs.sources._torch_threshold import KEY, SettingsRefused, change, threshold, value_in, with_key
from kvobs.sources._torch_verdict import MOST_BLOCKS

NOT_THERE = "No allocator of an accelerator is in use in this process."
CAPTURING = "A CUDA graph is being captured, and nothing is done meanwhile."
NO_FRACTION = ("The threshold acts only where this process has a memory fraction, and none is set: "
               "set_per_process_memory_fraction.")
UNLISTED = "The fragmentation that decides the threshold cannot be read: {why}."
CROWDED = f"there are more than {MOST_BLOCKS:,} blocks"
NOTHING = "Nothing is allocated, so there is no rate to decide by."


class TorchActions:
    """The actions over one torch. ``look`` gives it and the kind of accelerator in use, or the reason why not."""

    def __init__(self, look: Callable[[], tuple[Torch, str] | str], capturing: Callable[[], bool], emit: Emit,
                 find: Callable[[], _glibc.Glibc | str] = _glibc.find) -> None:
        self._look, self._capturing, self._find = look, capturing, find
        self._restoring: tuple[str, str] | None = None  # settings before, and as they were sent
        self.point = SafePoint("torch", (
            Action(Capability(1, "empty_cache", False, "Return cached segments that hold nothing to the device."),
                   self._plan_empty, self._empty),
            Action(Capability(1, "malloc_trim", False, "Return free pages of the C heap to the system."),
                   self._plan_trim, self._trim),
            Action(Capability(1, "gc_threshold", True, "Let the allocator collect unused segments early, by how "
                                                       "fragmented it is (the reference article's formula)."),
                   self._plan_threshold, self._set_threshold, self._restore),
        ), emit, idle=lambda: True, guest=True)

    def _ready(self) -> tuple[Torch, str] | str:
        found = self._look()
        if isinstance(found, str):
            return found
        return CAPTURING if self._capturing() else found

    # -- cached segments -------------------------------------------------------------------------------

    def _plan_empty(self) -> Effect:
        ready = self._ready()
        if isinstance(ready, str):
            return Effect(None, None, ready)
        torch, kind = ready
        if torch.unlisted(kind) or torch.resolves_stacks(kind) or sum(map(blocks, _stats(torch))) > MOST_BLOCKS:
            cached = sum(map(_reserved, _stats(torch))) - sum(map(_active, _stats(torch)))
            return Effect(None, None, f"At most {cached:,} bytes are cached; which of them can go is not known.")
        return Effect(sum(_size(segment) for segment in torch.segments(kind) if _whole(segment)), None)

    def _empty(self, deadline_ns: int) -> Result:
        ready = self._ready()
        if isinstance(ready, str):
            return refused(ready)
        torch, _ = ready
        before = sum(map(_reserved, _stats(torch)))
        torch.empty_cache()
        return Result(True, max(0, before - sum(map(_reserved, _stats(torch)))))

    # -- the C heap ------------------------------------------------------------------------------------

    def _plan_trim(self) -> Effect:
        glibc = self._find()
        if isinstance(glibc, str):
            return Effect(None, None, glibc)
        return Effect(None, None, f"{glibc.mallinfo().free:,} bytes are free in the heap; how many of them fill whole "
                                  "pages is known afterwards.")

    def _trim(self, deadline_ns: int) -> Result:
        glibc = self._find()
        if isinstance(glibc, str):
            return refused(glibc)
        before = _glibc.resident_bytes()
        glibc.trim()
        after = _glibc.resident_bytes()
        return Result(True, max(0, before - after) if before is not None and after is not None else 0)

    # -- the threshold ---------------------------------------------------------------------------------

    def _wanted(self, torch: Torch, kind: str) -> tuple[str, str] | str:
        """The settings in effect, and those that are wanted; or the reason for none."""
        text, told = torch.settings()
        if not told:
            return "This torch does not tell its allocator's settings."
        indices = [index for index, stats in enumerate(_stats(torch)) if touched(stats)]
        if why := torch.unlisted(kind):
            return UNLISTED.format(why=why)
        if all(torch.free_bytes(kind, index)[1] is None for index in indices):
            return NO_FRACTION
        if torch.resolves_stacks(kind) or sum(map(blocks, _stats(torch))) > MOST_BLOCKS:
            return UNLISTED.format(why="a memory history is recorded" if torch.resolves_stacks(kind) else CROWDED)
        rates = [rate for rate in _rates(torch.segments(kind)) if rate is not None]
        if not rates:
            return NOTHING
        before = self._restoring[0] if self._restoring is not None else text
        return before, with_key(text, f"{threshold(max(rates)):.4g}")

    def _plan_threshold(self) -> Effect:
        ready = self._ready()
        wanted = ready if isinstance(ready, str) else self._wanted(*ready)
        if isinstance(wanted, str):
            return Effect(None, None, wanted)
        return Effect(None, None, f"{KEY} becomes {value_in(wanted[1])}; what that frees shows with later allocations.")

    def _set_threshold(self, deadline_ns: int) -> Result:
        ready = self._ready()
        wanted = ready if isinstance(ready, str) else self._wanted(*ready)
        if isinstance(wanted, str):
            return refused(wanted)
        before, text = wanted
        assert not isinstance(ready, str)
        try:
            if ready[0].settings()[0] != text:
                change(ready[0].settings_module(), text)
        except SettingsRefused as error:
            return refused(str(error))
        self._restoring = before, text
        return Result(True, 0, f"{KEY} is {value_in(text)}.")

    def _restore(self, deadline_ns: int) -> Result:
        if self._restoring is None:
            return Result(True)
        found = self._look()
        if isinstance(found, str):
            return refused(found)
        (before, sent), now = self._restoring, found[0].settings()[0]
        try:
            # Somebody may have changed other settings meanwhile: those are theirs.
            change(found[0].settings_module(), before if now == sent else with_key(now, value_in(before)))
        except SettingsRefused as error:
            return refused(str(error))
        self._restoring = None
        return Result(True)


def _stats(torch: Torch) -> list[Mapping[str, Any]]:
    return [torch.stats(index) for index in range(torch.device_count())]


def _figure(stats: Mapping[str, Any], family: str) -> int:
    return int(stats[family]["all"]["current"])


def _reserved(stats: Mapping[str, Any]) -> int:
    return _figure(stats, "reserved_bytes")


def _active(stats: Mapping[str, Any]) -> int:
    return _figure(stats, "active_bytes")


def _size(segment: Mapping[str, Any]) -> int:
    return int(segment["total_size"])


def _whole(segment: Mapping[str, Any]) -> bool:
    """Does a segment hold nothing? Parts of an expandable one can go, too, which is not counted."""
    return all(block["state"] == "inactive" for block in segment["blocks"])


def _rates(segments: Iterable[Mapping[str, Any]]) -> list[float | None]:
    """The article's rate of each device: (allocated - largest free block) / allocated."""
    found: dict[object, list[int]] = {}
    for segment in segments:
        sums = found.setdefault(segment.get("device"), [0, 0])
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                sums[0] += block["size"]
            elif block["state"] == "inactive":
                sums[1] = max(sums[1], block["size"])
    return [article_fragmentation_rate(allocated, largest) for allocated, largest in found.values()]
