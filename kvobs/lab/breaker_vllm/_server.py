"""Real vLLM servers on the CPU under kvobs, one per arm: started together, awake one at a time, asked, ended.

The server runs in its environment with this very kvobs: ``kvobs run -- python -m vllm...``, the breaker's middleware
before its API.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import kvobs
from kvobs.breaker._board import BoardReader, board_directory
from kvobs.breaker._commands import FOLDER, Command, send
from kvobs.discovery import DIRECTORY
from kvobs.lab.breaker_vllm._client import MODEL
from kvobs.lab.demo._errors import DemoError

BLOCK, BLOCKS, CONTEXT, AT_ONCE = 32, 24, 512, 8  # tokens, blocks (one is vLLM's null block), tokens, requests
START_S, SETTLE_S = 420, 60
# kvobs's and vLLM's counters that a run's figures are taken from, by their names here.
COUNTERS = {"preemptions": "vllm:num_preemptions_total", "generated": "vllm:generation_tokens_total"}
OWN = {"recomputed": "kvobs_kv_recomputed_total", "transitions": "kvobs_breaker_transitions_total"}
CAUSE = {"recomputed": 'cause="preempted"'}
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "VLLM_PLUGINS")


class Server:
    """One arm's server; all of its processes are of one group."""

    def __init__(self, child: subprocess.Popen[bytes], port: int, directory: Path) -> None:
        self.child, self.port, self._directory = child, port, directory
        self._board = BoardReader(board_directory(directory / "store"), group=child.pid)

    def await_start(self) -> None:
        """Return once it serves.

        Raises:
            DemoError: it ended, or takes too long.
        """
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                self._get(self.port, "/health")
                return
            if self.child.poll() is not None or time.monotonic() > until:
                raise DemoError(f"The vLLM server did not start; its output is in {self._directory / 'vllm.log'}.", 1)
            time.sleep(0.5)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run; outside of this it is stopped, and takes no time from the other arms."""
        os.killpg(self.child.pid, signal.SIGCONT)
        try:
            yield
        finally:
            self.rest()

    def rest(self) -> None:
        """Stop all of its processes."""
        os.killpg(self.child.pid, signal.SIGSTOP)

    def settle(self) -> None:
        """Empty the prefix cache, reset the breaker, and wait until it is at level 0.

        Raises:
            DemoError: it stays elsewhere.
        """
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.port}/reset_prefix_cache", b""),
                               timeout=30).close()
        store = self._directory / "store"
        if any(board_directory(store).glob("*")):  # there is none without a breaker
            for process in self._endpoints():
                send(store, process, Command("reset"))
        until = time.monotonic() + SETTLE_S
        while self.level() or any((store / FOLDER).glob("*")):
            if time.monotonic() > until:
                raise DemoError(f"The breaker is at level {self.level()} though nobody asks for anything.", 1)
            time.sleep(0.2)

    def level(self) -> int:
        """The breaker's level, as its gates see it."""
        decision = self._board.decision()
        return 0 if decision is None else decision.level

    def counters(self) -> dict[str, float]:
        """The counters as of now: vLLM's own, and kvobs's of all processes together."""
        theirs = self._get(self.port, "/metrics")
        found = {name: _total([theirs], metric) for name, metric in COUNTERS.items()}
        ours = [self._get(port, "/metrics") for port in self._endpoints().values()]
        return found | {name: _total(ours, metric, CAUSE.get(name, "")) for name, metric in OWN.items()}

    def _endpoints(self) -> dict[str, int]:
        """The ports of kvobs's endpoints, by the process's id."""
        found = {}
        for path in (self._directory / "store" / DIRECTORY).glob("*.json"):
            entry, = json.loads(path.read_text(encoding="utf-8"))
            found[entry["labels"]["kvobs_process"]] = int(entry["targets"][0].rpartition(":")[2])
        return found

    def _get(self, port: int, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def end(self) -> None:
        """End all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()


def _total(texts: Sequence[str], metric: str, label: str = "") -> float:
    return sum(float(line.rpartition(" ")[2]) for text in texts for line in text.splitlines()
               if line.partition("{")[0].partition(" ")[0] == metric and label in line)


@contextlib.contextmanager
def servers(python: Path, model: Path, arms: Sequence[str], directory: Path, policy: str,
            options: Sequence[str] = ()) -> Iterator[dict[str, Server]]:
    """A server per arm (a mode of the breaker), all of them stopped; ``options`` are further ones of vLLM."""
    packages = directory / "packages"
    packages.mkdir()
    # The package alone: the directory that it is in may hold another torch.
    (packages / "kvobs").symlink_to(Path(kvobs.__file__).resolve().parent, target_is_directory=True)
    with contextlib.ExitStack() as stack:
        found: dict[str, Server] = {}
        for arm in arms:
            (directory / arm).mkdir()
            found[arm] = _start(python, model, arm, directory / arm, packages, policy, options)
            stack.callback(found[arm].end)
        for server in found.values():
            server.await_start()
        for server in found.values():
            server.rest()
        yield found


def _start(python: Path, model: Path, arm: str, directory: Path, packages: Path, policy: str,
           options: Sequence[str]) -> Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python), "-s", "-P", "-m", "kvobs", "run", "--", str(python), "-m",
               "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", MODEL,
               "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
               "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str(CONTEXT),
               "--max-num-seqs", str(AT_ONCE), "--kv-cache-memory-bytes", str(64 << 20),
               "--middleware", "kvobs.asgi.BreakerMiddleware", *options]
    kept = {name: value for name, value in os.environ.items()
            if name not in _DROPPED and not name.startswith("KVOBS_")}
    environment = kept | {
        "PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # has /reset_prefix_cache
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "KVOBS_BREAKER": arm,
        "KVOBS_BREAKER_POLICY": policy,
        "KVOBS_STORE": str(directory / "store"), "KVOBS_PROMETHEUS": "127.0.0.1:0"}
    with (directory / "vllm.log").open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                 env=environment, cwd=directory, start_new_session=True)
    return Server(child, port, directory)
