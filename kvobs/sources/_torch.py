"""Source: the caching allocator of the accelerator that torch uses, polled once a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from kvobs.allocator.forecast import Forecast, NextStep, absent
from kvobs.bus import Bus
from kvobs.model import Actuator, AllocatorState, Availability, DeviceNow, Emit, Event, Poll
from kvobs.sources._imports import when_imported
from kvobs.sources._patch import Patches
from kvobs.sources._torch_actions import NOT_THERE, TorchActions
from kvobs.sources._torch_capture import Captures, anything_captured
from kvobs.sources._torch_extras import Extras
from kvobs.sources._torch_handle import CUDA, Torch
from kvobs.sources._torch_live import Live
from kvobs.sources._torch_map import Maps
from kvobs.sources._torch_oom import OomObserver
from kvobs.sources._torch_stats import ASYNC, NATIVE, Readings, read, settings, touched
from kvobs.sources._torch_verdict import FAILED, UNLISTED, verdicts

SOURCE = "torch"
SPLIT = "torch: inactive split blocks"
COUNTS = "torch: blocks and counters"
SETTINGS = "torch: allocator settings"
ERRORS = "torch: out-of-memory records"
VERDICTS = "torch: verdicts"
NOT_IMPORTED = "torch has not been imported in this process."
NO_ACCELERATOR = "This torch has no accelerator; what CPU tensors use is told by the source heap."
NOT_YET = "The host has not used the accelerator yet, and kvobs never initialises it."
FORKED = "This process was forked after its parent had initialised the accelerator, which cannot be used here."
CAPTURING = "A CUDA graph is being captured, and nothing is read meanwhile."
EXPANDABLE = "With expandable segments the allocator's figure has no meaning."
ASYNC_ONLY = "The back end cudaMallocAsync tells reserved and allocated bytes only."
FROM_ENVIRONMENT = "This torch does not tell its settings, so they are the environment's; later changes are not seen."
NO_OBSERVER = "This torch tells nobody of the allocator's errors."
_MOST_DEVICES = 64
_log = logging.getLogger("kvobs")


class TorchSource:
    """Observes torch's device allocator from the moment the host has initialised it; ``torch`` can be injected."""

    name = SOURCE

    def __init__(self, bus: Bus, torch: Any = None) -> None:
        self._bus, self._injected = bus, torch
        self._forecast: Callable[[], Forecast] = Forecast
        self._cancel: Callable[[], None] | None = None
        self._attaching = threading.Lock()
        self.maps = Maps()
        self._actions: TorchActions | None = None
        self._forget()

    def _forget(self) -> None:
        self._patches: Patches | None = None
        self._module: Any = None
        self._torch: Torch | None = None
        self._captures: Captures | None = None
        self._observers: dict[str, OomObserver] = {}
        self._extras: Extras | None = None
        self._forked, self._expandable = False, False
        self._live = Live()
        self._facts: list[Availability] | None = None

    @property
    def actuators(self) -> tuple[Actuator, ...]:
        """What can act on the allocators while the source is installed."""
        return () if self._actions is None else (self._actions.point,)

    def _usable(self) -> tuple[Torch, str] | str:
        """The torch whose allocator may be acted on, and the kind of its devices; or why there is none."""
        if self._torch is None or self._forked:
            return FORKED if self._forked else NOT_IMPORTED
        kind = self._torch.in_use()
        return (self._torch, kind) if kind is not None else NOT_THERE

    def foresee(self, forecast: Callable[[], Forecast]) -> None:
        """Before ``install``: who tells what the next step of the live caches will ask for."""
        self._forecast = forecast

    def install(self, emit: Emit) -> None:
        """Look at torch now if it is imported, else once the host imports it."""
        if self._patches is not None:
            return
        self._emit = emit
        self._patches = Patches(SOURCE, emit)
        self._actions = TorchActions(self._usable, anything_captured, emit)
        if self._injected is not None:
            self._on_torch(self._injected)
        else:
            self._cancel = when_imported("torch", self._on_torch)

    def _on_torch(self, torch: Any) -> None:
        """Runs inside the host's ``import torch``."""
        try:
            if self._patches is None or self._torch is not None:
                return
            handle = Torch(torch)
            captures = Captures(self._patches)
            if handle.built_with_cuda():
                captures.install(torch.cuda.graphs.CUDAGraph)
            self._module, self._captures, self._torch = torch, captures, handle
            if handle.built_with_cuda():
                self._observe(CUDA)
            kind = handle.in_use()
            if kind is not None:
                self._observe(kind)
        except Exception as error:
            _log.warning("kvobs: torch's allocator could not be observed (%s: %s); the process is not affected.",
                         type(error).__name__, error)

    def _observe(self, kind: str) -> Extras:
        """Listen to the errors of a kind from the moment it is there (before a CUDA device is used), once."""
        with self._attaching:
            captures = self._captures
            if captures is not None and kind not in self._observers:
                self._observers[kind] = OomObserver(self._module, self._emit, lambda: self._bus.active,
                                                    captures.running, forecast=self._forecast, kind=kind)
                self._observers[kind].start()
            if self._extras is None or self._extras.kind != kind:
                self._extras = Extras(kind, getattr(self._module, kind, None))
            return self._extras

    def uninstall(self) -> None:
        """Read and listen no more, and put torch's own methods back."""
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
        if self._actions is not None:
            self._actions.point.close()
            self._actions = None
        with self._attaching:
            for observer in self._observers.values():
                observer.stop()
            if self._patches is not None:
                self._patches.restore()
            self._forget()

    def after_fork_in_child(self) -> None:
        """Never touch an accelerator that the parent had initialised: its locks and context are the parent's."""
        if self._patches is not None:
            self._patches.after_fork_in_child()
        self._attaching = threading.Lock()
        if self._actions is not None:
            self._actions.point.after_fork_in_child()
        for observer in self._observers.values():
            observer.after_fork_in_child()
        self._forked = self._torch is not None and self._torch.inherited()
        if self._extras is not None and not self._forked:
            self._extras.after_fork_in_child()
        self._facts = None

    def sample(self, now_ns: int) -> Iterable[Event]:
        """The state of each device that this process has used, and the readings of all of them."""
        events, self._facts = self._look(now_ns)
        return events

    def availability(self) -> Iterable[Availability]:
        """What the last sample could see and what not."""
        if self._facts is None:
            _, self._facts = self._look(time.monotonic_ns())
        return self._facts

    def verdict(self, device: str | None = None) -> list[NextStep]:
        """What would become of the next step of the live caches, per device; estimated. Never raises, never empty.

        Takes one snapshot, which holds up the engine's allocations meanwhile: for a person who asks, not for polling.
        """
        torch, captures = self._torch, self._captures
        if torch is None or captures is None:
            return [absent(NOT_IMPORTED, device or "")]
        try:
            kind = None if self._forked else torch.accelerator()
            if kind is None:
                return [absent(FORKED if self._forked else NO_ACCELERATOR, device or "")]
            if not torch.initialised(kind):
                return [absent(NOT_YET, device or "")]
            return verdicts(torch, kind, captures.running, self._forecast(), device)
        except Exception as error:
            return [absent(FAILED.format(error=type(error).__name__), device or "")]

    def live(self, now_ns: int, share: float) -> list[DeviceNow] | None:
        """What is left on each device, and what becomes of the next step there, for a breaker that asks each second.

        None where nothing can be told at this moment; takes at most ``share`` of the time. Never raises.
        """
        torch, captures = self._torch, self._captures
        if torch is None or captures is None or self._forked:
            return None
        try:
            kind = torch.in_use()
            if kind is None or captures.running():
                return None
            return self._live.look(torch, kind, captures.running, self._forecast, now_ns, share)
        except Exception as error:
            _log.debug("kvobs: what is left on the devices could not be told (%s).", type(error).__name__)
            return None

    def _look(self, now_ns: int) -> tuple[list[Event], list[Availability]]:
        if self._torch is None:
            return _absent(NOT_IMPORTED)
        if self._forked:
            return _absent(FORKED)
        began = time.perf_counter_ns()
        kind: str | None = None
        try:
            kind = self._torch.accelerator()
            if kind is None:
                return _absent(NO_ACCELERATOR)
            if not self._torch.initialised(kind):
                return _absent(NOT_YET)
            extras = self._observe(kind)
            backend = self._torch.backend(kind)
            if backend not in (NATIVE, ASYNC):
                return _absent(f"The allocator back end {backend} tells no statistics.")
            if self._captures is not None and self._captures.running():
                return _absent(CAPTURING)
            return self._read(self._torch, extras, now_ns, began, kind, backend)
        except Exception as error:
            return _absent(f"The back end {kind or 'unknown'} does not tell the statistics of a caching allocator "
                           f"({type(error).__name__}).")

    def _read(self, torch: Torch, extras: Extras, now_ns: int, began: int, kind: str,
              backend: str) -> tuple[list[Event], list[Availability]]:
        text, told = torch.settings()
        pairs = settings(text)
        # Segments that were made expandable stay so when the setting is taken back.
        self._expandable = self._expandable or ("expandable_segments", "True") in pairs
        events: list[Event] = []
        readings: Readings = tuple(("kvobs.allocator.setting", pair, 1.0) for pair in pairs)
        readings += extras.profile() + extras.copies()
        taken = self.maps.take(torch, kind, now_ns)
        events += taken.maps
        for index in range(min(torch.device_count(), _MOST_DEVICES)):
            stats = taken.stats.get(index) or torch.stats(index)
            if touched(stats):
                found = read(f"{kind}:{index}", stats, backend=backend, expandable=self._expandable)
                readings += found.readings
                if found.reserved_bytes is not None and found.allocated_bytes is not None:
                    events.append(AllocatorState(now_ns, found.device, found.reserved_bytes, found.allocated_bytes,
                                                 extras.largest_free(index)))
                timed, counts = extras.latencies(now_ns, index)
                events += [timed] if timed is not None else []
                readings += counts
        events.append(Poll(now_ns, SOURCE, time.perf_counter_ns() - began, readings))
        return events, [*self._seen(torch, extras, backend, told), *taken.facts]

    def _seen(self, torch: Torch, extras: Extras, backend: str, told: bool) -> list[Availability]:
        observer, unlisted = self._observers.get(extras.kind), torch.unlisted(extras.kind)
        silent = NO_OBSERVER if observer is None else observer.reason
        return [
            Availability(SOURCE, True, ""),
            Availability(SPLIT, not self._expandable and backend == NATIVE,
                         EXPANDABLE if self._expandable else ASYNC_ONLY if backend == ASYNC else ""),
            Availability(COUNTS, backend == NATIVE, ASYNC_ONLY if backend == ASYNC else ""),
            Availability(SETTINGS, True, "" if told else FROM_ENVIRONMENT),
            Availability(ERRORS, not silent, silent),
            Availability(VERDICTS, not unlisted, UNLISTED.format(why=unlisted) if unlisted else ""),
            *extras.facts(),
        ]


def _absent(reason: str) -> tuple[list[Event], list[Availability]]:
    return [], [Availability(SOURCE, False, reason)]
