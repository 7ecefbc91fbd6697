"""The actuators of vLLM's engines: what a breaker can have done in an engine core, and where it is done.

Orders are carried out on the engine core's thread, at the beginning of ``Scheduler.schedule`` and of
``Scheduler.has_requests``. The latter the core's loop asks between its steps and whenever something wakes it while it
is idle; an order wakes it with vLLM's own message for that. An engine that runs in its caller's process has no such
loop: there orders wait for the next step, or for their deadline.

Tried on vLLM 0.32.0 and 0.29.0. What a version has not is a refusal with the reason. ``max_num_queued_reqs`` is not
here: the API server alone reads it, in a process that the scheduler is not in.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from kvobs.model import Capability, Effect, Emit, Order
from kvobs.sources._identity import ByIdentity
from kvobs.sources._imports import when_imported
from kvobs.sources._patch import Patches
from kvobs.sources._safe_point import Action, Result, SafePoint
from kvobs.sources.vllm._admission import KvAwareAdmission
from kvobs.sources.vllm._hot import HotBlocks
from kvobs.sources.vllm._layout import Layout, block_bytes_of
from kvobs.sources.vllm._protect import Protection
from kvobs.sources.vllm._relief import Clamp, Pause, plan_reset, reset
from kvobs.sources.vllm._requests import SOURCE, outcome_of

MAX_NEW_TOKENS = 64  # of answers of sheddable sessions while they are clamped; as the breaker's own limit for them
_log = logging.getLogger("kvobs")
Original = Callable[..., Any]


class EngineActuator(SafePoint):
    """The actuator of one scheduler, which it does not keep alive."""

    def __init__(self, name: str, scheduler: Any, hot: HotBlocks, emit: Emit) -> None:
        current = weakref.ref(scheduler)
        version = str(getattr(sys.modules.get("vllm"), "__version__", "of unknown version"))
        size = block_bytes_of(scheduler.kv_cache_config)
        self._current = current
        self._core: Callable[[], Any] = lambda: None
        self._wakeup: object = None
        self._changing = threading.Lock()  # for who closes it while the engine is at work
        self.protection = protection = Protection(current, hot, time.monotonic_ns)
        self.admission = KvAwareAdmission(current, Layout(scheduler), version)
        self.pause = Pause(current)
        self.clamp = Clamp(current, MAX_NEW_TOKENS)
        super().__init__(name, [
            Action(Capability(1, "protect_hot_blocks", True,
                              "Let cached blocks that are hit often live twice as long before they are evicted."),
                   protection.plan, protection.begin, protection.end),
            Action(Capability(1, "prefix_cache_reset", False,
                              "Drop the content of cached blocks while none is held and no hot one is protected."),
                   lambda: plan_reset(current(), size, protection.protected()),
                   lambda _: reset(current(), size, protection.protected())),
            Action(Capability(1, "kv_aware_admission", True,
                              "Run as many requests at once as the pool can hold to their ends."),
                   self.admission.plan, self.admission.begin, self._alone(self.admission.end)),
            Action(Capability(2, "pause", True, "Admit nobody while those that run come to their ends."),
                   lambda: Effect(0, None, self.pause.why_not()), self.pause.begin, self._alone(self.pause.end)),
            Action(Capability(3, "clamp_tokens", True,
                              f"Let answers of sheddable sessions have {MAX_NEW_TOKENS} tokens at most."),
                   self.clamp.plan, self._alone(self.clamp.begin), self._alone(self.clamp.end)),
        ], emit)

    def _alone(self, change: Callable[[int], Result]) -> Callable[[int], Result]:
        def call(deadline_ns: int) -> Result:
            with self._changing:
                return change(deadline_ns)
        return call

    # -- any thread ------------------------------------------------------------------------------------

    def submit(self, order: Order) -> None:
        """Queue an order, and wake the engine core if it is idle."""
        super().submit(order)
        self._wake()

    def expire(self) -> None:
        """Answer orders that wait in vain. ``waiting`` may be set for what belongs to no engine, and stays then."""
        if self._orders:
            super().expire()

    def close(self) -> None:
        """Undo what is in effect, and let an engine that was paused go on."""
        super().close()
        self._wake()

    def after_fork_in_child(self) -> None:
        """The parent's threads, and its engine core's loop, stay the parent's."""
        super().after_fork_in_child()
        self._changing = threading.Lock()
        self._core = lambda: None

    def _wake(self) -> None:
        core = self._core()
        try:
            if core is not None:
                core.input_queue.put_nowait((self._wakeup, None))
        except Exception as error:
            self._core = lambda: None
            _log.warning("kvobs: an idle engine core could not be woken (%s: %s); orders wait for its next step.",
                         type(error).__name__, error)

    # -- the engine's thread ---------------------------------------------------------------------------

    def looping(self, core: Any, wakeup: object) -> None:
        """This is the engine core whose loop waits for messages."""
        if self._core() is not core:
            self._core, self._wakeup = weakref.ref(core), wakeup

    def arriving(self, request: Any) -> None:
        """A request is about to be taken in."""
        self.admission.changes += 1
        with self._changing:
            self.clamp.arriving(request)

    def ended(self, request: Any) -> None:
        """A request ended."""
        self.admission.changes += 1
        if outcome_of(request) in ("ok", "stopped") and request not in self.clamp:
            self.admission.lengths.add(int(request.num_output_tokens))

    def step(self) -> None:
        """The engine is at its safe point. Never raises."""
        if self.waiting:
            self.run()
        if not (self.admission.active or self.pause.active) or not self._changing.acquire(blocking=False):
            return
        try:
            self.admission.adjust()
            self.pause.lift()
            return
        except Exception as error:
            _log.warning("kvobs: the actuator %s failed (%s: %s); what it did is undone, and it does nothing more.",
                         self.name, type(error).__name__, error)
        finally:
            self._changing.release()
        self.close()


class Actuators:
    """The actuators of the schedulers in this process."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._points: ByIdentity[EngineActuator] = ByIdentity()
        self._gone: list[EngineActuator] = []
        self._cancel: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[EngineActuator]:
        return iter(self._points.records())

    def found(self, scheduler: Any, hot: HotBlocks) -> None:
        """A scheduler was seen for the first time, and the hot blocks of its pool are known. Never raises: observing
        goes on without an actuator.
        """
        taken = {point.name for point in self._points.records()}
        names = (SOURCE if number == 1 else f"{SOURCE}-{number}" for number in range(1, len(taken) + 2))
        try:
            point = EngineActuator(next(name for name in names if name not in taken), scheduler, hot, self._emit)
        except Exception as error:
            _log.warning("kvobs: there is no actuator for vLLM's scheduler (%s: %s); it is only observed.",
                         type(error).__name__, error)
        else:
            self._points.add(scheduler, point, self._gone.append)

    def patch(self, module: Any, patches: Patches) -> None:
        """Hook the loop of ``vllm.v1.engine.core``, and what it asks the scheduler once that is imported, too.

        What a version has not is left.
        """
        wakeup = getattr(getattr(module, "EngineCoreRequestType", None), "WAKEUP", None)
        loop = getattr(module, "EngineCoreProc", None)
        if wakeup is not None and hasattr(loop, "_process_input_queue"):
            patches.wrap(loop, "_process_input_queue", self._loop(wakeup, patches))

        def patch_scheduler(module: Any) -> None:
            for name, make in (("has_requests", self._asked), ("set_pause_state", self._set)):
                if hasattr(module.Scheduler, name):
                    patches.wrap(module.Scheduler, name, make)

        self._cancel = when_imported("vllm.v1.core.sched.scheduler", patch_scheduler)

    def close(self) -> None:
        """Undo everything, and answer what waits."""
        self._cancel()
        for point in self._points.clear():
            point.close()
        self.expire()

    def expire(self) -> None:
        """Answer orders that wait in vain; for the drain thread."""
        while self._gone:
            self._gone.pop().close()
        for point in self._points.records():
            point.expire()

    def after_fork_in_child(self) -> None:
        """Locks and loops are the parent's."""
        for point in self._points.records():
            point.after_fork_in_child()

    # -- the engine's thread ---------------------------------------------------------------------------

    def at(self, scheduler: Any) -> None:
        """A scheduler's safe point."""
        point = self._points.get(scheduler)
        if point is not None and (point.waiting or point.admission.active or point.pause.active):
            point.step()

    def arriving(self, scheduler: Any, request: Any) -> None:
        """A request is about to be taken in."""
        point = self._points.get(scheduler)
        if point is not None:
            point.arriving(request)

    def ended(self, scheduler: Any, request: Any) -> None:
        """A request ended."""
        point = self._points.get(scheduler)
        if point is not None:
            point.ended(request)

    # -- hooks -----------------------------------------------------------------------------------------

    def _asked(self, original: Original) -> Original:
        def has_requests(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            self.at(scheduler)
            return original(scheduler, *args, **kwargs)
        return has_requests

    def _set(self, original: Original) -> Original:
        def set_pause_state(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scheduler, *args, **kwargs)
            point = self._points.get(scheduler)
            if point is not None:
                point.pause.was_set()
            return result
        return set_pause_state

    def _loop(self, wakeup: object, patches: Patches) -> Callable[[Original], Original]:
        def make(original: Original) -> Original:
            def process_input_queue(core: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    point = self._points.get(core.scheduler)
                    if point is not None:
                        point.looping(core, wakeup)
                except Exception as error:
                    patches.fail("EngineCoreProc._process_input_queue", error)
                return original(core, *args, **kwargs)
            return process_input_queue
        return make
