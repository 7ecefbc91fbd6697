"""Compiling the C++ core at first use: cached, private, and never in the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvobs.allocator import _abi, _build, core
from tests.support import ROOT, child_environment, run_child

COMPILER = next((found for found in map(shutil.which, _build.COMPILERS) if found), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="There is no C++ compiler on the PATH.")
ASK = "from kvobs.allocator import core; print(core.engine()); print(core.why_not())"


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    """A compiler that notes every compilation in a file beside it, and copies what a real one made before."""
    made = core._library()
    if isinstance(made, str):
        pytest.skip(made)
    path = tmp_path / "counting-c++"
    path.write_text(f'''#!/bin/sh
[ "$1" = --version ] && exec {COMPILER} --version
echo once >> "{tmp_path}/compiled"
while [ "$1" != -o ]; do shift; done
exec cp "{made._name}" "$2"
''')
    path.chmod(0o755)
    return path


def compiled(folder: Path) -> int:
    record = folder / "compiled"
    return len(record.read_text().splitlines()) if record.exists() else 0


@needs_compiler
def test_compiled_once(counting: Path, tmp_path: Path) -> None:
    """The second use loads what the first compiled; the directory and the library are this user's alone."""
    cache = tmp_path / "cache"
    for _ in range(2):
        assert _abi.declare(_build.library([str(counting)], [cache])).kvobs_abi() == _abi.VERSION
    assert compiled(tmp_path) == 1
    assert [path.stat().st_mode & 0o777 for path in (cache, *cache.iterdir())] == [0o700, 0o700]


@needs_compiler
def test_processes_that_begin_at_once_compile_once(counting: Path, tmp_path: Path) -> None:
    """While one process compiles, others wait for its library instead of compiling it too; no lock is left behind."""
    slow = tmp_path / "slow-c++"
    slow.write_text(counting.read_text().replace("while [", "sleep 1\nwhile [", 1))
    slow.chmod(0o755)
    cache = tmp_path / "cache"
    code = (f"import pathlib; from kvobs.allocator import _build\n"
            f"_build.library([{str(slow)!r}], [pathlib.Path({str(cache)!r})])")
    children = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert (compiled(tmp_path), len(list(cache.iterdir()))) == (1, 1)


@needs_compiler
@pytest.mark.parametrize("damage", ["cut short", "writable by others", "another user's", "a link"])
def test_a_library_that_cannot_be_trusted_is_compiled_anew(counting: Path, tmp_path: Path, damage: str) -> None:
    """A cached file that is damaged, or that somebody else could have written, is replaced and never loaded."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    path = cache / f"{_build._fingerprint(str(counting), _build.core_unit())}.so"
    shutil.copy(counting, path)  # no library: loading it would fail
    path.chmod(0o700)
    if damage == "cut short":
        path.write_bytes(b"\x7fELF")
    elif damage == "writable by others":
        path.chmod(0o722)
    elif damage == "a link":
        path.rename(tmp_path / "elsewhere.so")
        path.symlink_to(tmp_path / "elsewhere.so")
    elif os.getuid() == 0:
        os.chown(path, 12345, -1)
    else:
        pytest.skip("Only root can make a file another user's.")
    _abi.declare(_build.library([str(counting)], [cache]))
    assert compiled(tmp_path) == 1
    assert not path.is_symlink()
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (os.getuid(), 0o700)


@needs_compiler
@pytest.mark.parametrize("kept", [0.3, 0.9, 0.0], ids=["cut short", "cut short late", "zeros at the end"])
def test_a_damaged_library_does_not_end_the_process(counting: Path, tmp_path: Path, kept: float) -> None:
    """Half a library (the loader would die of a bus error in it) is told by its hash, and compiled anew."""
    cache = tmp_path / "cache"
    code = (f"import pathlib; from kvobs.allocator import _abi, _build\nprint(_abi.declare(_build.library("
            f"[{str(counting)!r}], [pathlib.Path({str(cache)!r})])).kvobs_abi())")
    for round_ in (1, 2):
        ran = run_child([sys.executable, "-c", code], cwd=ROOT)
        assert (ran.stdout, ran.returncode) == (f"{_abi.VERSION}\n", 0)
        assert compiled(tmp_path) == round_
        path, = cache.iterdir()
        whole = path.read_bytes()
        half = len(whole) // 2
        path.write_bytes(whole[:int(len(whole) * kept)] if kept else whole[:half] + bytes(len(whole) - half))


@needs_compiler
def test_a_directory_that_others_can_write_is_not_used(counting: Path, tmp_path: Path) -> None:
    """Where others can write nothing is loaded from; the next directory serves, and with none there is a reason."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    shared.chmod(0o777)
    _build.library([str(counting)], [shared, own])
    assert (list(shared.iterdir()), len(list(own.iterdir()))) == ([], 1)
    with pytest.raises(_build.BuildError, match="only this user can write"):
        _build.library([str(counting)], [shared])
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(_build.BuildError, match="No directory is fit"):
        _build.library([str(counting)], [blocked / "below"])


@needs_compiler
def test_what_a_killed_compiler_left_is_removed(counting: Path, tmp_path: Path) -> None:
    """An unfinished library that is older than any compilation goes when the next one is made; a young one stays."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    old, young = (cache / f".building-{name}.so" for name in ("old", "young"))
    for path in (old, young):
        path.touch()
    os.utime(old, (1, 1))
    _build.library([str(counting)], [cache])
    assert (old.exists(), young.exists()) == (False, True)


def test_no_compiler() -> None:
    """Without a compiler the reason says which ones were looked for."""
    with pytest.raises(_build.BuildError, match=r"^There is no C\+\+ compiler \(no-such-c\+\+\) on the PATH\.$"):
        _build.library(["no-such-c++"])


def test_a_failing_compiler(tmp_path: Path) -> None:
    """A compiler that fails is quoted with its first error, and leaves nothing behind."""
    path = tmp_path / "failing-c++"
    path.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho noise >&2\necho 'fatal error: nope' >&2\nexit 1\n")
    path.chmod(0o755)
    cache = tmp_path / "cache"
    with pytest.raises(_build.BuildError, match=r"could not compile the core: fatal error: nope$"):
        _build.library([str(path)], [cache])
    assert list(cache.iterdir()) == []


@needs_compiler
def test_another_compiler_or_source_is_another_library(counting: Path, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library depends on is in its name: another compiler, flag or source gets another file."""
    other, sources = tmp_path / "other-c++", tmp_path / "native"
    shutil.copy(counting, other)
    shutil.copytree(_build.SOURCES, sources)
    names = {_build._fingerprint(str(path), _build.core_unit()) for path in (counting, other)}
    monkeypatch.setattr(_build, "SOURCES", sources)
    assert _build._fingerprint(str(counting), _build.core_unit()) in names
    with open(sources / "alloc.hpp", "a") as header:
        header.write("// changed\n")
    names.add(_build._fingerprint(str(counting), _build.core_unit()))
    monkeypatch.setattr(_build, "FLAGS", (*_build.FLAGS, "-g"))
    names.add(_build._fingerprint(str(counting), _build.core_unit()))
    assert len(names) == 4


@pytest.mark.slow
@needs_compiler
def test_two_processes_at_once(tmp_path: Path) -> None:
    """Processes that compile at the same time both get the core, and one whole file is left."""
    environment = child_environment(XDG_CACHE_HOME=str(tmp_path))
    children = [subprocess.Popen([sys.executable, "-c", ASK], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                                 stdin=subprocess.DEVNULL, text=True) for _ in range(2)]
    assert [child.communicate(timeout=300)[0] for child in children] == ["C++\nNone\n"] * 2
    assert [path.suffix for path in (tmp_path / "kvobs" / "native").iterdir()] == [".so"]


@pytest.mark.slow
@needs_compiler
def test_no_home(tmp_path: Path) -> None:
    """Where the cache directory cannot be written, a private one in the temporary directory serves."""
    environment = child_environment(XDG_CACHE_HOME="/proc/no-such-place", TMPDIR=str(tmp_path))
    done = run_child([sys.executable, "-c", ASK], env=environment, cwd=ROOT, timeout=300)
    assert done.stdout == "C++\nNone\n"
    assert [path.name for path in tmp_path.iterdir()] == [f"kvobs-native-{os.getuid()}"]


def test_the_twin_serves_where_nothing_compiles(tmp_path: Path) -> None:
    """A process without a compiler runs its programs on the Python twin and can say why."""
    code = ("from kvobs.allocator.core import run, why_not\nfrom kvobs.allocator.program import Program\n"
            "from kvobs.allocator.settings import Settings\nprint(run(Program(), Settings()).engine); print(why_not())")
    done = run_child([sys.executable, "-c", code], cwd=ROOT,
                     env=child_environment(PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)))
    assert done.stdout == "Python\nThere is no C++ compiler (c++, g++, clang++) on the PATH.\n"
    assert list(tmp_path.iterdir()) == []


def test_cache_directories_follow_the_standard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME if it is absolute, else ~/.cache, and after it the temporary directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _build.cache_directories()[0] == tmp_path / "kvobs" / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert _build.cache_directories()[0] == tmp_path / "home" / ".cache" / "kvobs" / "native"
    assert _build.cache_directories()[-1].name == f"kvobs-native-{os.getuid()}"


@pytest.mark.slow
@needs_compiler
def test_sanitized(tmp_path: Path) -> None:
    """Compiled with the address and undefined-behaviour sanitizers, random programs run without a complaint."""
    assert COMPILER is not None
    runtimes = [run_child([COMPILER, f"-print-file-name=lib{name}.so"]).stdout.strip() for name in ("asan", "ubsan")]
    if not all(os.path.isabs(path) for path in runtimes):
        pytest.skip(f"{COMPILER} has no sanitizer libraries.")
    target = tmp_path / "sanitized.so"
    flags = (*_build.FLAGS, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
             "-D_GLIBCXX_DEBUG", "-Wall", "-Wextra", "-Werror")
    _build.compile_unit(COMPILER, target, _build.core_unit(), flags)
    done = run_child([sys.executable, "-m", "tests.sanitized", target], cwd=ROOT, timeout=300, env=child_environment(
        LD_PRELOAD=" ".join(runtimes), ASAN_OPTIONS="detect_leaks=0", UBSAN_OPTIONS="print_stacktrace=1"))
    assert (done.stdout, done.stderr, done.returncode) == ("every program ran\n", "", 0)


def test_the_loaded_library_is_remembered() -> None:
    """A process looks for the core once."""
    assert core._library() is core._library()
