"""vLLM as the runtime sees it: the engine core's hooks, in whichever process the scheduler lives."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from kvobs.model import Actuator, Availability, Emit, Event, Poll
from kvobs.sessions import Names, TurnNumbers
from kvobs.sources import Wiring
from kvobs.sources._patch import Patches
from kvobs.sources.vllm._hooks import EngineHooks
from kvobs.sources.vllm._requests import SOURCE, Desk


class VllmSource:
    """Observes vLLM (V1) in this process from the moment its parts are imported."""

    name = SOURCE

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._patches: Patches | None = None
        self._engine: EngineHooks | None = None

    @property
    def actuators(self) -> list[Actuator]:
        """The hands of the engines whose schedulers live in this process."""
        return list(self._engine.actuators) if self._engine is not None else []

    def install(self, emit: Emit) -> None:
        """Hook in now, or as soon as the parts of vLLM that are hooked have been imported."""
        if self._patches is not None:
            return
        config = self._wiring.config
        self._patches = Patches(SOURCE, emit)
        desk = Desk(self._wiring.tracer, emit, Names(config.session_ids, config.session_key), TurnNumbers())
        self._engine = EngineHooks(self._wiring, emit, self._patches, desk)
        self._engine.install()

    def uninstall(self) -> None:
        """Put every original back."""
        if self._engine is not None:
            self._engine.uninstall()
        if self._patches is not None:
            self._patches.restore()
        self._patches, self._engine = None, None

    def sample(self, now_ns: int) -> Iterable[Event]:
        """Who is in an engine whose step takes long, or that is idle; how many requests a pause cut."""
        if self._engine is None:
            return ()
        self._engine.actuators.expire()
        began, found = time.monotonic_ns(), list(self._engine.sample(now_ns))
        cut = (("kvobs.self.turns.cut", (), float(self._engine.cut)),) if self._engine.cut else ()
        return [*found, Poll(now_ns, SOURCE, time.monotonic_ns() - began, cut)] if found or cut else ()

    def after_fork_in_child(self) -> None:
        """Leave the parent's open requests to it."""
        if self._patches is not None:
            self._patches.after_fork_in_child()
        if self._engine is not None:
            self._engine.cut = 0
            self._engine.actuators.after_fork_in_child()

    def availability(self) -> Iterable[Availability]:
        """Whether vLLM is there, and what of it is observed in this process."""
        if "vllm" not in sys.modules:
            yield Availability(SOURCE, False, "vLLM has not been imported in this process.")
            return
        yield Availability(SOURCE, True, "")
        if self._engine is not None:
            yield from self._engine.availability()
