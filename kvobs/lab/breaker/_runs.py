"""The runs of a job in this process: kvobs over a virtual GPU, started anew for each seed."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvobs import config, virtual
from kvobs.breaker import BoardReader, board_directory
from kvobs.breaker.simulator._trace import read_trace
from kvobs.config import LATENCY_BOUNDS_NS
from kvobs.lab.breaker._engine import build
from kvobs.lab.breaker._front import Front
from kvobs.lab.breaker._load import LOADS, sessions
from kvobs.lab.breaker._outcome import WINDOW_S, Outcome, Windows
from kvobs.lab.breaker._serve import Server
from kvobs.lab.breaker._setting import ARMS, DEVICE_BYTES, PROFILE, WEIGHT_BYTES
from kvobs.runtime import Runtime

SECOND = 1_000_000_000


class _Stepped(Runtime):
    """kvobs without a thread of its own."""

    def _start_thread(self, body: Callable[[], None]) -> None:
        pass


def run(job: dict[str, Any], clock: list[int]) -> Iterator[str]:
    """One JSON object per play (an arm and a load) and seed of the job."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    settings = "expandable_segments:True" if job["expandable"] else ""
    virtual.setup([DEVICE_BYTES], settings=settings, latency=PROFILE)
    weights = torch.empty(WEIGHT_BYTES, dtype=torch.uint8, device="vgpu:0")
    model = build()
    requests = read_trace(Path(job["trace"])).requests
    for play in job["plays"]:
        load = LOADS[play["load"]]
        load = load._replace(seconds=job["seconds"] or load.seconds)
        for seed in job["seeds"]:
            outcome = _one(model, sessions(requests, load, seed), play["arm"], clock)
            gc.collect()
            torch.accelerator.empty_cache()
            outcome.arm, outcome.load, outcome.expandable = play["arm"], play["load"], job["expandable"]
            outcome.seed = seed
            yield msgspec.json.encode(outcome).decode()
    assert weights.numel()


def _one(model: Any, coming: list[Any], arm: str, clock: list[int]) -> Outcome:
    import torch

    mode, policy = ARMS[arm]
    with tempfile.TemporaryDirectory(prefix="kvobs-lab-") as place:
        settings = config.load({}, breaker=mode, breaker_policy=policy, store=place, prometheus="off",
                               overhead_percent="100")
        runtime = _Stepped(settings)
        runtime.start()
        try:
            board = BoardReader(board_directory(Path(place)), clock=time.monotonic_ns)
            pulse = _Pulse(runtime, clock, torch)
            server = Server(model, Front(board, time.monotonic_ns), lambda: pulse.second(server.outcome))
            outcome = server.serve(coming)
            pulse.tell(outcome)
            board.close()
            return outcome
        finally:
            runtime.stop()


class _Pulse:
    """The end of each second."""

    def __init__(self, runtime: Runtime, clock: list[int], torch: Any) -> None:
        self._runtime, self._clock, self._torch = runtime, clock, torch
        self._windows = Windows(lambda: torch.vgpu.allocation_latencies(0, LATENCY_BOUNDS_NS))
        self._seconds = 0
        self._action_s, self._highest = 0.0, 0

    def second(self, outcome: Outcome) -> None:
        """The clock goes on; kvobs looks and decides; what it orders is done at the engine's safe point."""
        self._clock[0] += SECOND
        self._seconds += 1
        if self._seconds % WINDOW_S == 0:
            self._windows.cut(outcome.errors)
        self._runtime.tick(sample=True)
        began = time.perf_counter()
        for source in self._runtime.sources:
            for actuator in getattr(source, "actuators", ()):
                if actuator.waiting:
                    actuator.run()
        self._action_s += time.perf_counter() - began
        breaker = self._runtime.protection.breaker if self._runtime.protection is not None else None
        if breaker is not None:
            self._highest = max(self._highest, *breaker.levels().values(), 0)

    def tell(self, outcome: Outcome) -> None:
        """What the breaker did and how long memory took."""
        self._windows.cut(outcome.errors)
        outcome.windows = self._windows.found
        outcome.histogram, outcome.allocation_s = self._windows.totals()
        outcome.action_s, outcome.highest = self._action_s, self._highest
        breaker = self._runtime.protection.breaker if self._runtime.protection is not None else None
        outcome.transitions = breaker.decisions if breaker is not None else 0
