"""Source: every request to torch's CPU allocator, counted by a compiled probe in front of it.

The probe is compiled (or found in the user's cache) on a thread of low priority once torch has been imported, never
while it is. Until then, and where it cannot be, the heap's totals (source ``heap``) are all that is known.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from kvobs.bus import Bus
from kvobs.model import Availability, Emit, Event, Poll
from kvobs.sources._alloc_counts import Growth

if TYPE_CHECKING:
    from kvobs.sources._cpu_alloc_native import Probe

_log = logging.getLogger("kvobs")
SOURCE = "cpu_alloc"
SIZES = "cpu_alloc: bytes"
SAMPLED_EVERY = 64  # 34 ns for an allocation and its free, 67 ns if all are timed; torch.empty takes 1.0 us
NICE = 10
JOIN_S = 3.0  # a compilation takes about 2 s; one that is left alone leaves an unfinished file behind
NO_TORCH = "torch is not imported in this process."
BUILDING = "The probe is being compiled or loaded."
OVER = "Another allocator was installed over the probe, so only what that one hands on is counted."
LEFT = "Another allocator was installed over the CPU allocation probe, which therefore stays and hands everything on."
REFUSED = "torch's CPU allocator was set with a priority that the probe does not have."
UNSIZED = "torch's CPU memory does not come from glibc's malloc, so the sizes of blocks are not known."
ENDED = "CPU allocations are not observed any more."


def load_probe(torch: ModuleType) -> Probe:
    """The compiled probe of this torch; raises ``BuildError`` with a sentence where there is none."""
    from kvobs.sources._cpu_alloc_native import load

    return load(torch)


def imported_torch() -> ModuleType | None:
    """torch, once its import has ended."""
    torch = sys.modules.get("torch")
    busy = torch is None or getattr(getattr(torch, "__spec__", None), "_initializing", False)
    return None if busy else torch


class CpuAllocSource:
    """Counts while the bus is active; ``off`` is why nothing is to be counted, or empty."""

    name = SOURCE

    def __init__(self, bus: Bus, off: str = "", torch: Callable[[], ModuleType | None] = imported_torch,
                 load: Callable[[ModuleType], Probe] = load_probe, sampled_every: int = SAMPLED_EVERY) -> None:
        self._bus, self._off, self._torch, self._load, self._every = bus, off, torch, load, sampled_every
        self._lock = threading.Lock()
        self._running = self._paused = False
        self._probe: Probe | None = None
        self._builder: threading.Thread | None = None
        self._reason = off or NO_TORCH

    def install(self, emit: Emit) -> None:
        """Nothing yet: torch may not be imported, and a compiler may be needed."""
        self._running, self._reason = True, self._off or NO_TORCH

    def uninstall(self) -> None:
        """Put the allocator from before back; where that cannot be, the probe hands everything on."""
        with self._lock:
            self._running = False
        if self._builder is not None:
            self._builder.join(JOIN_S)
        with self._lock:
            probe, self._probe, self._builder, self._reason = self._probe, None, None, self._off or ENDED
        if probe is not None and probe.remove() != "away":
            _log.warning("kvobs: %s", LEFT)

    def after_fork_in_child(self) -> None:
        """What the parent counted is the parent's, but what is alive is alive here too."""
        self._lock, self._builder = threading.Lock(), None
        if self._probe is not None:
            self._growth = Growth("cpu", self._probe.read())

    def sample(self, now_ns: int) -> Iterable[Event]:
        """What was counted since the last time, or the first steps towards it."""
        began = time.thread_time_ns()
        probe = self._probe
        if probe is None:
            self._begin()
            return
        if self._paused == self._bus.active:
            self._paused = not self._bus.active
            probe.pause(self._paused)
        latencies, readings = self._growth.take(now_ns, probe.read())
        if latencies is not None:
            yield latencies
        if not probe.sized():
            readings = tuple(reading for reading in readings if reading[0] != "kvobs.alloc.io")
        yield Poll(now_ns, SOURCE, time.thread_time_ns() - began, readings)

    def availability(self) -> Iterable[Availability]:
        """Whether allocations are counted, all of them, and with their sizes."""
        probe = self._probe
        if probe is None:
            yield Availability(SOURCE, False, self._reason)
            return
        yield Availability(SOURCE, True, OVER if probe.place() == "beneath" else "")
        yield Availability(SIZES, probe.sized(), "" if probe.sized() else UNSIZED)

    def _begin(self) -> None:
        if self._off or not self._running or self._reason not in (NO_TORCH, BUILDING) or self._builder is not None:
            return
        torch = self._torch()
        if torch is not None:
            self._reason = BUILDING
            self._builder = threading.Thread(target=self._build, args=(torch,), name="kvobs-probe", daemon=True)
            self._builder.start()

    def _build(self, torch: ModuleType) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # on Linux: of this thread, and its child
            probe = self._load(torch)
        except Exception as error:  # BuildError mostly: a sentence
            self._reason = f"Single CPU allocations are not counted, only the heap is read: {error}"
            return
        with self._lock:
            if not self._running:
                return
            growth = Growth("cpu", probe.read())
            if probe.install(self._every) == "refused":
                self._reason = REFUSED
                return
            self._growth, self._probe, self._paused = growth, probe, False
