"""kvobs's C++ as shared libraries: compiled with the system's compiler at first use, and kept in the user's cache."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).resolve().parent / "native"
FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 300.0
_UNFINISHED = ".building-"
_DIGEST = 32  # bytes of SHA-256


class BuildError(Exception):
    """One sentence: why there is no library."""


class Unit(NamedTuple):
    """One library: what it is called in sentences, its main file, the directories of its sources, and its flags.

    ``depends`` is what else decides what is compiled: the version of a library whose headers are included, say.
    """

    name: str
    main: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()


def core_unit() -> Unit:
    """The allocator core, which needs nothing but the compiler."""
    return Unit("the core", "core.cpp", (SOURCES,))


def library(compilers: Sequence[str] = COMPILERS, directories: Sequence[Path] | None = None,
            unit: Unit | None = None) -> ctypes.CDLL:
    """The library, from the cache or compiled now (the core: about 3 s).

    Raises:
        BuildError: there is no compiler, it failed, or no directory is fit to keep the library in.
    """
    compiler = compiler_of(compilers)
    if compiler is None:
        raise BuildError(f"There is no C++ compiler ({', '.join(compilers)}) on the PATH.")
    unit = unit or core_unit()
    name = f"{_fingerprint(compiler, unit)}.so"
    problems: list[str] = []
    for directory in cache_directories() if directories is None else directories:
        try:
            return _load(compiler, _private(directory) / name, unit)
        except OSError as error:
            problems.append(f"{directory}: {error.strerror or error}")
    raise BuildError(f"No directory is fit to keep {unit.name} in ({'; '.join(problems) or 'none is known'}).")


def compiler_of(compilers: Sequence[str] = COMPILERS) -> str | None:
    """The path of the compiler that serves; None if there is none."""
    return next((found for found in map(shutil.which, compilers) if found), None)


def in_cache(unit: Unit) -> bool:
    """Is the library there, so that ``library`` compiles nothing? A damaged one counts too.

    Raises:
        BuildError: the compiler does not run, or the sources cannot be read.
    """
    compiler = compiler_of()
    return compiler is not None and any((directory / f"{_fingerprint(compiler, unit)}.so").exists()
                                        for directory in cache_directories())


def cache_directories() -> list[Path]:
    """Where compiled libraries may be kept, the best first: the user's cache, else one of this user in the temporary
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


def compile_unit(compiler: str, target: Path, unit: Unit, flags: Sequence[str] = FLAGS) -> None:
    """Compile a library into ``target``, which appears at once and whole.

    Raises:
        BuildError: the compiler failed; its first complaint.
        OSError: the target's directory cannot be written.
    """
    handle, unfinished = tempfile.mkstemp(prefix=_UNFINISHED, suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        command = [compiler, *flags, "-o", unfinished, str(unit.sources[0] / unit.main), *unit.flags]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILE_SECONDS,
                              check=False)
        if done.returncode:
            raise BuildError(f"{compiler} could not compile {unit.name}: {_first_complaint(done.stderr)}")
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


def _fingerprint(compiler: str, unit: Unit) -> str:
    """What the compiled code depends on: the sources, how and by whom they are compiled, and for which machine."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=30.0,
                                 check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} does not run: {error}.") from None
    digest = hashlib.sha256()
    for part in _parts(compiler, version, unit):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]


def _parts(compiler: str, version: bytes, unit: Unit) -> Iterator[bytes]:
    yield from (" ".join(FLAGS).encode(), os.fsencode(compiler), version, platform.machine().encode())
    yield os.fsencode(unit.main)
    yield from map(os.fsencode, (*unit.flags, *unit.depends))
    try:
        for directory in unit.sources:
            for source in sorted(directory.glob("*.[hc]pp")) + sorted(directory.glob("*.h")):
                yield os.fsencode(source.name)
                yield source.read_bytes()
    except OSError as error:
        raise BuildError(f"The sources of {unit.name} cannot be read: {error}.") from None


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


def _load(compiler: str, path: Path, unit: Unit) -> ctypes.CDLL:
    found = _from_cache(path)
    if found is not None:
        return found
    with _alone(path.with_suffix(".lock")):  # several processes of a server begin at once: one compiles for all
        _sweep(path.parent)
        found = _from_cache(path)
        if found is None:
            compile_unit(compiler, path, unit)
    if found is None and not _trusted(path):
        raise PermissionError("the library there is not this user's")
    return found or ctypes.CDLL(str(path))


def _sweep(directory: Path) -> None:
    """Remove what compilers left behind whose process was killed."""
    for left in directory.glob(f"{_UNFINISHED}*.so"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.lstat().st_mtime > 2 * COMPILE_SECONDS:
                left.unlink()


def _from_cache(path: Path) -> ctypes.CDLL | None:
    if not _trusted(path) or not _whole(path):
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # of another system, for instance
        path.unlink(missing_ok=True)
        return None


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process does the same; the system ends the lock of one that dies."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            lock.unlink()


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
