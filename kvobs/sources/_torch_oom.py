"""What the CUDA allocator held when it ran out of memory.

torch's out-of-memory observers cannot be detached, so one trampoline per process is attached for good, which asks who
listens now. It runs in the allocating thread after the allocator's lock was released, before the error is raised; an
exception from it would replace that error, so none leaves it. At most one error per second and six per minute are
recorded; the next record says how many were not.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from kvobs.allocator.forecast import Forecast
from kvobs.allocator.live import retry
from kvobs.allocator.next_step import next_step, told
from kvobs.flight import Ration
from kvobs.model import Emit, FlightRecord, HookFailed
from kvobs.sources._torch_handle import CUDA, Torch
from kvobs.sources._torch_segments import summary
from kvobs.sources._torch_stats import blocks

PER_MINUTE = 6
MOST_BLOCKS = 50_000  # 65 ms to sum up, beside torch's own time to list them
MOST_JUDGED = 10_000  # blocks: a verdict takes about 10 us per block
MOST_WORK = 300_000  # requests of the next step times blocks: 0.2 s
SNAPSHOT_LIMIT = 48_000  # ASCII characters, of which a verdict takes about 3,000, and the next step's as many
WAITING = "Out-of-memory errors are told once the host has initialised CUDA."
CAPTURING = "No snapshot: a CUDA graph was being captured."
HISTORY = "No snapshot: the host records a memory history, whose stacks it would resolve."
CROWDED = f"No snapshot: there were more than {MOST_BLOCKS} blocks."
UNJUDGED = f"There were more than {MOST_JUDGED} blocks."
_QUEUE_S = 1.0
_HOOK = "out_of_memory_observer"
_log = logging.getLogger("kvobs")
_listening: weakref.ref[OomObserver] | None = None
_attached: list[Any] = []  # torch modules that call the trampoline for the rest of the process


def _trampoline(device: int, requested: int, allowed: int, free: int) -> None:
    observer = _listening() if _listening is not None else None
    if observer is not None:
        observer.ran_out(device, requested, allowed, free)


class OomObserver:
    """Makes a flight record of an out-of-memory error. ``reason`` says why it cannot, and is empty when it can."""

    def __init__(self, torch: Any, emit: Emit, active: Callable[[], bool], capturing: Callable[[], bool],
                 clock: Callable[[], int] = time.monotonic_ns, forecast: Callable[[], Forecast] = Forecast) -> None:
        self._forecast = forecast
        self._torch, self._handle = torch, Torch(torch)
        self._emit, self._active, self._capturing, self._clock = emit, active, capturing, clock
        self._lock = threading.Lock()
        self._ration = Ration(PER_MINUTE)
        self._skipped = 0
        self._deferred = self._attach  # one object, to be found again in torch's queue
        self.reason = WAITING

    def start(self) -> None:
        """Listen; the trampoline is attached right after CUDA is initialised, by whoever initialises it, or now."""
        global _listening
        _listening = weakref.ref(self)
        self._torch.cuda._lazy_call(self._deferred)

    def stop(self) -> None:
        """Listen no more; what still waits for CUDA is taken back."""
        global _listening
        if _listening is not None and _listening() is self:
            _listening = None
        cuda = self._torch.cuda
        # While torch initialises CUDA it walks this list, which must not change then: the entry does nothing any more.
        if cuda._initialization_lock.acquire(timeout=_QUEUE_S):
            try:
                cuda._queued_calls[:] = [entry for entry in cuda._queued_calls if entry[0] is not self._deferred]
            finally:
                cuda._initialization_lock.release()

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def _attach(self) -> None:
        """Runs inside torch's initialisation of CUDA, which an exception would break."""
        try:
            if _listening is None or _listening() is not self:
                return
            if not any(torch is self._torch for torch in _attached):
                self._torch._C._cuda_attach_out_of_memory_observer(_trampoline)
                _attached.append(self._torch)
            self.reason = ""
        except Exception as error:
            self.reason = f"The allocator takes no out-of-memory observer ({type(error).__name__})."

    def ran_out(self, device: int, requested: int, allowed: int, free: int) -> None:
        """An allocation failed for good: of ``requested`` bytes, with ``free`` bytes free on the device."""
        try:
            if not self._active():
                return
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
        name = f"{CUDA}:{device}"
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
        if self._handle.records_history():
            return "", HISTORY
        held = sum(blocks(self._handle.stats(index)) for index in range(self._handle.device_count()))
        if held > MOST_BLOCKS:
            return "", CROWDED
        segments = self._handle.segments()
        unjudged = {"verdict": None, "reason": UNJUDGED}
        judged = {"verdict": unjudged, "next_step": {"estimated": True, **unjudged}} if held > MOST_JUDGED else {
            "verdict": self._verdict(segments, device, requested, allowed, free),
            "next_step": self._next_step(segments, device, allowed, free)}
        rest = "," + json.dumps(judged, separators=(",", ":"))[1:]
        return summary(segments, SNAPSHOT_LIMIT - len(rest) + 1)[:-1] + rest, ""

    def _verdict(self, segments: Any, device: int, requested: int, allowed: int, free: int) -> dict[str, Any]:
        """What would become of the request if it was made again; what goes wrong here costs the verdict only."""
        try:
            raw_stream = getattr(self._torch._C, "_cuda_getCurrentRawStream", None)
            stream = int(raw_stream(device)) if raw_stream is not None else 0
            return retry(segments, self._handle.settings()[0], device, stream, requested, allowed, free)
        except Exception as error:
            return {"verdict": None, "reason": f"It could not be told ({type(error).__name__})."}

    def _next_step(self, segments: Any, device: int, allowed: int, free: int) -> dict[str, Any]:
        """What would become of the next step of the live caches; estimated, and as ``_verdict`` no more than lost."""
        try:
            return told(next_step(segments, self._handle.settings()[0], f"{CUDA}:{device}", self._forecast(), free,
                                  allowed, MOST_WORK))
        except Exception as error:
            return {"estimated": True, "verdict": None, "reason": f"It could not be told ({type(error).__name__})."}

    def _failed(self, error: Exception) -> None:
        global _listening
        if _listening is not None and _listening() is self:
            _listening = None
        self.reason = f"The observer raised {type(error).__name__} and was detached."
        _log.warning("kvobs: the hook %s of source torch raised %s: %s; it was detached, the process is not affected.",
                     _HOOK, type(error).__name__, error)
        self._emit(HookFailed(self._clock(), "torch", _HOOK, f"{type(error).__name__}: {error}"))
