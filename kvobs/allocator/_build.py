"""The C++ core as a shared library: compiled with the system's compiler at first use, and kept in the user's cache."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "native"
MAIN = "core.cpp"
FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 300.0
_DIGEST = 32  # bytes of SHA-256


class BuildError(Exception):
    """One sentence: why there is no library."""


def library(compilers: Sequence[str] = COMPILERS, directories: Sequence[Path] | None = None) -> ctypes.CDLL:
    """The library, from the cache or compiled now (about 3 s).

    Raises:
        BuildError: there is no compiler, it failed, or no directory is fit to keep the library in.
    """
    compiler = next((found for found in map(shutil.which, compilers) if found), None)
    if compiler is None:
        raise BuildError(f"There is no C++ compiler ({', '.join(compilers)}) on the PATH.")
    name = f"{_fingerprint(compiler)}.so"
    problems: list[str] = []
    for directory in cache_directories() if directories is None else directories:
        try:
            return _load(compiler, _private(directory) / name)
        except OSError as error:
            problems.append(f"{directory}: {error.strerror or error}")
    raise BuildError(f"No directory is fit to keep the compiled core in ({'; '.join(problems) or 'none is known'}).")


def cache_directories() -> list[Path]:
    """Where a compiled core may be kept, the best first: the user's cache, else one of this user in the temporary
    directory.
    """
    found = [Path(tempfile.gettempdir()) / f"kvobs-native-{os.getuid()}"]
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # a relative one is to be ignored (XDG base directories)
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return found
    return [Path(base) / "kvobs" / "native", *found]


def compile_core(compiler: str, target: Path, flags: Sequence[str] = FLAGS) -> None:
    """Compile the core into ``target``, which appears at once and whole.

    Raises:
        BuildError: the compiler failed; its first complaint.
        OSError: the target's directory cannot be written.
    """
    handle, unfinished = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        done = subprocess.run([compiler, *flags, "-o", unfinished, str(SOURCES / MAIN)], capture_output=True,
                              stdin=subprocess.DEVNULL, timeout=COMPILE_SECONDS, check=False)
        if done.returncode:
            raise BuildError(f"{compiler} could not compile the core: {_first_complaint(done.stderr)}")
        with open(unfinished, "r+b") as file:  # behind what the loader looks at
            digest = hashlib.file_digest(file, "sha256").digest()
            file.write(digest)
        os.chmod(unfinished, 0o700)
        os.replace(unfinished, target)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{compiler} did not end within {COMPILE_SECONDS:g} s.") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)


def _first_complaint(errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it said nothing")


def _fingerprint(compiler: str) -> str:
    """What the compiled code depends on: the sources, how and by whom they are compiled, and for which machine."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=30.0,
                                 check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} does not run: {error}.") from None
    digest = hashlib.sha256()
    for part in _parts(compiler, version):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]


def _parts(compiler: str, version: bytes) -> Iterator[bytes]:
    yield from (" ".join(FLAGS).encode(), os.fsencode(compiler), version, platform.machine().encode())
    try:
        for source in sorted(SOURCES.glob("*.[hc]pp")) + sorted(SOURCES.glob("*.h")):
            yield os.fsencode(source.name)
            yield source.read_bytes()
    except OSError as error:
        raise BuildError(f"The core's sources cannot be read: {error}.") from None


def _private(directory: Path) -> Path:
    """The directory, made if need be; what lies in it is loaded as code, so nobody else may write there.

    Raises:
        PermissionError: somebody else may.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError("it is not a directory that only this user can write")
    return directory


def _load(compiler: str, path: Path) -> ctypes.CDLL:
    if _trusted(path) and _whole(path):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink()  # of another system, for instance
    compile_core(compiler, path)
    if not _trusted(path):
        raise PermissionError("the library there is not this user's")
    return ctypes.CDLL(str(path))


def _whole(path: Path) -> bool:
    """Whether the file ends with the hash of what is before it. Loading one that was cut short kills the process."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _trusted(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
