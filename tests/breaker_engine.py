"""A process with a breaker, a sensor and two engines, which fail as they are told: ``python -m tests.breaker_engine``.

It reads commands from its standard input, one JSON object per line, and answers each by its state on one line.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvobs import config, model, runtime
from kvobs.sources._safe_point import Action, Result, SafePoint
from tests import events

SECOND = 10**9
POOL = 1_000  # blocks
LEVELS = (1, 2, 3)


class Sensor:
    """Tells how many of the pool's blocks are in use, or what a broken one would."""

    name = "sensor"

    def __init__(self) -> None:
        self.load, self.how = 0.0, "fine"

    def install(self, emit: Any) -> None:
        pass

    def uninstall(self) -> None:
        pass

    def availability(self) -> list[model.Availability]:
        return []

    def sample(self, now_ns: int) -> list[model.Event]:
        if self.how == "raises":
            raise OSError("no such device")
        if self.how == "silent":
            return []
        used: Any = {"nan": float("nan"), "infinite": float("inf"), "negative": -5, "word": "full"}.get(
            self.how, round(self.load * POOL))
        away = {"future": 3_600, "past": -3_600}.get(self.how, 0) * SECOND
        return [events.blocks(t_ns=now_ns + away, used=used, cached=0, free=POOL - round(self.load * POOL))]


class Engine:
    """Two threads that step without end, and a flag per level that its actuator sets and unsets at safe points."""

    def __init__(self, name: str) -> None:
        self.name, self.how = name, "fine"
        self.flags: set[int] = set()
        self.steps = [0, 0]
        self.hanging = 0
        self.free, self._ended = threading.Event(), threading.Event()

    def install(self, emit: Any) -> None:
        self.point = SafePoint(self.name, [self._action(level) for level in LEVELS], emit)
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(2)]
        for thread in self._threads:
            thread.start()

    def uninstall(self) -> None:
        self.free.set()
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self.point.close()

    def sample(self, now_ns: int) -> list[model.Event]:
        return []

    def availability(self) -> list[model.Availability]:
        return []

    @property
    def actuators(self) -> Sequence[SafePoint]:
        if self.how == "lost":
            raise RuntimeError("no actuators")
        return [self.point]

    def after_fork_in_child(self) -> None:
        self.point.after_fork_in_child()

    def _run(self, number: int) -> None:
        while not self._ended.wait(0.002):
            self.steps[number] += 1
            if self.point.waiting:
                self.point.run()

    def _action(self, level: int) -> Action:
        def carry_out(_: int) -> Result:
            self.flags.add(level)
            if self.how == "hangs":
                self.hanging += 1
                self.free.wait()
                self.hanging -= 1
            if self.how == "raises":
                raise OSError("half way")
            return Result(True, 1)

        def undo(_: int) -> Result:
            self.flags.discard(level)
            return Result(True)

        return Action(model.Capability(level, f"flag{level}", True, "Set a flag."), lambda: model.Effect(0, None),
                      carry_out, undo)


class World:
    """The process."""

    def __init__(self) -> None:
        self.sensor, self.engines = Sensor(), {name: Engine(name) for name in ("one", "two")}
        self.runtime = runtime.Runtime(config.load(), [self.sensor, *self.engines.values()])
        runtime._current = self.runtime
        self.runtime.start()

    def state(self, **more: Any) -> dict[str, Any]:
        return {"flags": {name: sorted(one.flags) for name, one in self.engines.items()},
                "steps": {name: list(one.steps) for name, one in self.engines.items()},
                "hanging": sum(one.hanging for one in self.engines.values()), **more}

    def obey(self, told: dict[str, Any]) -> dict[str, Any]:
        """Do what a line says, and tell the state."""
        what: str = told["what"]
        value: Any = told.get("value")
        if what in ("load", "how"):
            setattr(self.sensor, what, value)
        elif what in self.engines:
            self.engines[what].how = value
        elif what == "release":
            for one in self.engines.values():
                one.free.set()
        elif what == "clock":
            set_clock(value)
        elif what == "files":
            resource.setrlimit(resource.RLIMIT_FSIZE, (value, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif what == "fork":
            return self.state(child=fork(hooks=value))
        return self.state()


def set_clock(ahead_s: float) -> None:
    """The wall clock is so many seconds ahead from now on; the monotonic one goes on."""
    time.time = lambda: REAL_NS() / SECOND + ahead_s
    time.time_ns = lambda: REAL_NS() + round(ahead_s * SECOND)


def fork(*, hooks: bool) -> int:
    """A child that only waits, by Python's fork or by the C library's, of which Python knows nothing; its pid."""
    child = os.fork() if hooks else int(ctypes.CDLL(None).fork())
    if child == 0:
        while True:
            signal.pause()
    return child


REAL_NS = time.time_ns


def main() -> None:
    world = World()
    print(json.dumps(world.state()), flush=True)
    for line in sys.stdin:
        print(json.dumps(world.obey(json.loads(line))), flush=True)
    world.runtime.stop()
    print(json.dumps(world.state()), flush=True)


if __name__ == "__main__":
    main()
