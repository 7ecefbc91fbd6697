"""The process in which vLLM runs, seen from here: started in its environment with this very kvobs, heard, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

import kvobs
from kvobs.lab.demo import _vllm_script as script
from kvobs.lab.demo._errors import DemoError
from kvobs.lab.demo._progress import say, stage

LOG = "vllm.log"
_QUOTED = 200  # characters of the log's last line
# What the process must not inherit: another Python's places, and an observer that would be armed beside the demo's.
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "VLLM_PLUGINS")


class Told(msgspec.Struct, frozen=True):
    """What the process told at its end.

    ``turns`` has for each turn what vLLM's own metrics said once it was over (``engine``) and what kvobs's metrics
    said (``kvobs``, as name, attributes, value). ``counted`` are the Unix nanoseconds at which vLLM's own counter of
    preemptions had grown; ``process`` is the id under which kvobs wrote its store.
    """

    version: str
    turns: list[dict[str, Any]]
    counted: list[int]
    process: str


def serve(python: Path, model: Path, settings: Mapping[str, str]) -> Told:
    """Run the dialogues through vLLM.

    Args:
        python: of the environment with vLLM.
        model: the checkpoint's directory.
        settings: of kvobs, by their names.
    Raises:
        DemoError: vLLM did not come to the end; the sentence names the file with its output.
    """
    scratch = Path(tempfile.mkdtemp(prefix="kvobs-demo-vllm-"))
    packages, log = scratch / "packages", scratch / LOG
    packages.mkdir()
    # The package alone: the directory that it is in may hold another torch.
    (packages / "kvobs").symlink_to(Path(kvobs.__file__).resolve().parent, target_is_directory=True)
    reading, writing = os.pipe()
    given = {"pipe": writing, "model": str(model), "name": model.name, "settings": dict(settings)}
    command = [str(python), "-s", "-P", "-m", "kvobs.lab.demo._vllm_child", json.dumps(given)]
    with open(reading, encoding="utf-8") as pipe:
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(command, env=_environment(packages), stdin=subprocess.DEVNULL, stdout=output,
                                           stderr=subprocess.STDOUT, pass_fds=(writing,), cwd=scratch)
        finally:
            os.close(writing)
        with _ended(process):
            try:
                told = _listen(pipe)
            except ValueError:  # it ended within a line
                told = None
    if told is None or process.returncode:
        raise DemoError(f"vLLM did not come to its end ({_how(process.returncode)}); its output is in {log}, the last "
                        f"line: {_last_line(log)}", 1)
    with contextlib.suppress(OSError):
        (packages / "kvobs").unlink()
        log.unlink()
        packages.rmdir()
        scratch.rmdir()
    return told


def _environment(packages: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    return kept | {
        "PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: its engine core is observed from within
        "OMP_NUM_THREADS": "1",  # two are five times slower on two cores
        "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false"}


def _listen(pipe: IO[str]) -> Told | None:
    """Show how far the process is, until it ends; None if it did so before it told the rest."""
    last: dict[str, Any] = {}
    with stage("Loading vLLM and the model (about 30 s)"):
        loaded = json.loads(pipe.readline() or "{}")
    if "loaded" not in loaded:
        return None
    if loaded["endpoint"]:
        say(f"Metrics are served at {loaded['endpoint']} while vLLM runs.")
    for turn in range(1, script.TURNS + 1):
        sessions = len(script.DIALOGUES)
        with stage(f"Turn {turn} of {script.TURNS}: {sessions} sessions at once", sessions * script.NEW_TOKENS) as show:
            for line in pipe:
                last = json.loads(line)
                if last.get("turn") != turn:
                    break
                show(last["tokens"])
                if last["tokens"] >= last["of"]:
                    break
    for line in pipe:
        last = json.loads(line)
    return Told(loaded["loaded"], last["turns"], last["counted"], last["process"]) if "turns" in last else None


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for the process; end it where the block was left otherwise."""
    try:
        yield
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = lines[-1][:_QUOTED] if lines else "(there is none)"
    return said if said.endswith((".", ")", "!", "?")) else f"{said}."
