"""pip for an environment of its own: its steps shown as they go, its failure as one sentence."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from packaging.requirements import Requirement
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvobs.lab.demo._download import _last_error
from kvobs.lab.demo._errors import DemoError
from kvobs.lab.demo._progress import say

_WIDTH = 60  # of pip's line beside the step's name


def run(python: Path, arguments: Sequence[str], step: str, scratch: Path) -> None:
    """Run ``python -m pip`` and show the line that it is at.

    Args:
        python: the interpreter whose environment it is.
        arguments: those of pip.
        step: what it is for, as in "Installing torch".
        scratch: where pip keeps what it downloads meanwhile, a directory.
    Raises:
        DemoError: pip failed; the sentence ends with what it complained of last.
    """
    command = [str(python), "-m", "pip", *arguments[:1], "--no-input", "--disable-pip-version-check", "--retries=2",
               "--progress-bar=off", *arguments[1:]]
    output: list[str] = []
    with subprocess.Popen(command, env=_environment(scratch), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace") as process, _shown(step) as show:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output = [*output[-199:], line]
                show(line.strip())
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise DemoError(f"{step} failed: pip {arguments[0]} said: {_last_error(''.join(output))}")


def needs(wheel: Path, without: frozenset[str]) -> list[str]:
    """What a wheel says that it needs in this Python, without extras and without some projects.

    Raises:
        DemoError: the wheel cannot be read.
    """
    try:
        with ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            declared = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    except (BadZipFile, OSError, ValueError) as error:
        raise DemoError(f"The downloaded {wheel.name} cannot be read ({error}).") from None
    return wanted(declared, without)


def wanted(declared: Sequence[str], without: frozenset[str] = frozenset()) -> list[str]:
    """The requirements of a project that hold in this Python without any extra, less those of some projects."""
    found = map(Requirement, declared)
    return [f"{one.name}{extras_of(one)}{one.specifier}" for one in found
            if one.name.lower() not in without and (one.marker is None or one.marker.evaluate({"extra": ""}))]


def extras_of(requirement: Requirement) -> str:
    """The extras as they are written, with their brackets."""
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _environment(scratch: Path) -> dict[str, str]:
    # Where this process's own packages are must not matter to the other environment.
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET")}
    return kept | {"TMPDIR": str(scratch)}


@contextlib.contextmanager
def _shown(step: str) -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    if not console.is_terminal:
        say(f"{step} ...")
        yield lambda line: None
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(),
               TextColumn("{task.fields[line]}", markup=False, style="dim")]
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bars:
        task = bars.add_task(step, total=None, line="")
        yield lambda line: bars.update(task, line=line[:_WIDTH])
