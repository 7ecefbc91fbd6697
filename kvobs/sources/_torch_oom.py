"""What an accelerator's allocator held when it ran out of memory.

The observer runs in the allocating thread after the allocator's lock was released, before the error is raised; an
exception from it would replace that error, so none leaves it. At most one error per second and six per minute are
recorded; the next record says how many were not.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from kvobs.allocator.forecast import Forecast
from kvobs.allocator.live import retry
from kvobs.allocator.next_step import next_step, told
from kvobs.errors import note_verdict
from kvobs.flight import Ration
from kvobs.model import Emit, FlightRecord, HookFailed
from kvobs.sources._torch_handle import CUDA, Torch
from kvobs.sources._torch_listen import Listener
from kvobs.sources._torch_segments import summary
from kvobs.sources._torch_stats import blocks

PER_MINUTE = 6
MOST_BLOCKS = 50_000  # 65 ms to sum up, beside torch's own time to list them
MOST_JUDGED = 10_000  # blocks: a verdict takes about 10 us per block
MOST_WORK = 300_000  # requests of the next step times blocks: 0.2 s
SNAPSHOT_LIMIT = 48_000  # ASCII characters, of which a verdict takes about 3,000, and the next step's as many
CAPTURING = "No snapshot: a CUDA graph was being captured."
UNLISTED = "No snapshot: {why}."
HISTORY = "No snapshot: the host records a memory history, whose stacks it would resolve."
CROWDED = f"No snapshot: there were more than {MOST_BLOCKS} blocks."
UNJUDGED = f"There were more than {MOST_JUDGED} blocks."
_HOOK = "out_of_memory_observer"
_log = logging.getLogger("kvobs")


class OomObserver:
    """Makes a flight record of an out-of-memory error of a kind of accelerator, from ``start`` to ``stop``."""

    def __init__(self, torch: Any, emit: Emit, active: Callable[[], bool], capturing: Callable[[], bool],
                 clock: Callable[[], int] = time.monotonic_ns, forecast: Callable[[], Forecast] = Forecast,
                 kind: str = CUDA) -> None:
        self._forecast = forecast
        self._kind, self._handle = kind, Torch(torch)
        self._emit, self._active, self._capturing, self._clock = emit, active, capturing, clock
        self._lock = threading.Lock()
        self._ration = Ration(PER_MINUTE)
        self._skipped = 0
        self._listener = Listener(torch, kind, self.ran_out)

    def start(self) -> None:
        """Listen from now on, or from when the host initialises CUDA."""
        self._listener.start()

    def stop(self) -> None:
        """Listen no more."""
        self._listener.stop()

    @property
    def reason(self) -> str:
        """Why out-of-memory errors are not told; empty when they are."""
        return self._listener.reason

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def ran_out(self, device: int, requested: int, allowed: int, free: int) -> None:
        """An allocation failed for good: of ``requested`` bytes, with ``free`` bytes free on the device."""
        try:
            if not self._active():
                return
            note_verdict(device, requested, None)
            if not self._lock.acquire(blocking=False):
                self._skipped += 1
                return
            try:
                if self._ration.take(now_ns := self._clock()):
                    self._record(now_ns, device, requested, allowed, free)
                else:
                    self._skipped += 1
            finally:
                self._lock.release()
        except Exception as error:
            self._failed(error)

    def _record(self, now_ns: int, device: int, requested: int, allowed: int, free: int) -> None:
        skipped, self._skipped = self._skipped, 0
        name = f"{self._kind}:{device}"
        said = [f"The allocator of {name} could not get {requested} bytes; {free} bytes of the device were free and "
                f"this process may have {allowed}."]
        snapshot, why = self._snapshot(device, requested, allowed, free)
        said += [why] if why else []
        if skipped:
            said.append(f"At least {skipped} errors before this one were not recorded.")
        self._emit(FlightRecord(now_ns, "out_of_memory", name, requested, " ".join(said), "", snapshot))

    def _snapshot(self, device: int, requested: int, allowed: int, free: int) -> tuple[str, str]:
        """The summary with the verdict in it, or nothing and why."""
        if self._capturing():
            return "", CAPTURING
        if unlisted := self._handle.unlisted(self._kind):
            return "", UNLISTED.format(why=unlisted)
        if self._handle.resolves_stacks(self._kind):
            return "", HISTORY
        held = sum(blocks(self._handle.stats(index)) for index in range(self._handle.device_count()))
        if held > MOST_BLOCKS:
            return "", CROWDED
        segments = self._handle.segments(self._kind)
        unjudged = {"verdict": None, "reason": UNJUDGED}
        judged = {"verdict": unjudged, "next_step": {"estimated": True, **unjudged}} if held > MOST_JUDGED else {
            "verdict": self._verdict(segments, device, requested, allowed, free),
            "next_step": self._next_step(segments, device, allowed, free)}
        rest = "," + json.dumps(judged, separators=(",", ":"))[1:]
        return summary(segments, SNAPSHOT_LIMIT - len(rest) + 1)[:-1] + rest, ""

    def _verdict(self, segments: Any, device: int, requested: int, allowed: int, free: int) -> dict[str, Any]:
        """What would become of the request if it was made again; what goes wrong here costs the verdict only."""
        try:
            stream = self._handle.current_stream(self._kind, device)
            exact = self._kind != CUDA  # whose observers are told the segment that was asked of the device
            found = retry(segments, self._handle.settings()[0], device, stream, requested, allowed, free, exact=exact)
            note_verdict(device, requested, found["verdict"])
            return found
        except Exception as error:
            return {"verdict": None, "reason": f"It could not be told ({type(error).__name__})."}

    def _next_step(self, segments: Any, device: int, allowed: int, free: int) -> dict[str, Any]:
        """What would become of the next step of the live caches; estimated, and as ``_verdict`` no more than lost."""
        try:
            name, conf = f"{self._kind}:{device}", self._handle.settings()[0]
            return told(next_step(segments, conf, name, self._forecast(), free, allowed, MOST_WORK))
        except Exception as error:
            return {"estimated": True, "verdict": None, "reason": f"It could not be told ({type(error).__name__})."}

    def _failed(self, error: Exception) -> None:
        self._listener.fail(f"The observer raised {type(error).__name__} and was detached.")
        _log.warning("kvobs: the hook %s of source torch raised %s: %s; it was detached, the process is not affected.",
                     _HOOK, type(error).__name__, error)
        self._emit(HookFailed(self._clock(), "torch", _HOOK, f"{type(error).__name__}: {error}"))
