"""Which processes below ``kvobs run`` are observed, what they pay, and whose sitecustomize still runs."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from kvobs.cli._run import BOOTSTRAP
from tests.support import child_environment, run_child

RUN = [sys.executable, "-m", "kvobs", "run", "--"]
_ARMED = "any(type(finder).__module__ == 'kvobs.autostart' for finder in sys.meta_path)"
_CHILDREN = f"""
import multiprocessing, os, subprocess, sys

def armed():
    return {_ARMED}

def tell(name):
    print(name, armed(), flush=True)

if __name__ == "__main__":
    tell("main")
    for method in ("fork", "spawn", "forkserver"):
        worker = multiprocessing.get_context(method).Process(target=tell, args=(method,))
        worker.start()
        worker.join()
    if os.fork() == 0:
        tell("bare fork")
        os._exit(0)
    os.wait()
    code = "import sys; print('subprocess', {_ARMED}, flush=True)"
    subprocess.run([sys.executable, "-c", code], check=True)
    subprocess.run(["sh", "-c", '"$0" -c "$1"', sys.executable, code], check=True)
"""


def _observed(*command: str | Path, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return run_child([*RUN, *command], env=child_environment(**settings), cwd=cwd)


def test_children_of_every_kind_are_armed(tmp_path: Path) -> None:
    """The command, its multiprocessing workers, its forks and its subprocesses all wait for transformers."""
    (tmp_path / "parent.py").write_text(_CHILDREN)
    done = _observed(sys.executable, "parent.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.rpartition(" ") for line in done.stdout.splitlines()] == [
        (name, " ", "True")
        for name in ("main", "fork", "spawn", "forkserver", "bare fork", "subprocess", "subprocess")]


def test_a_console_script_is_armed(tmp_path: Path) -> None:
    """A script found on PATH by its name and started by its #! line is observed as well."""
    script = tmp_path / "bin" / "serve"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys\nprint({_ARMED})\n")
    script.chmod(0o755)
    done = _observed("serve", cwd=tmp_path, PATH=f"{script.parent}:{os.environ['PATH']}")
    assert done.stdout == "True\n"


def test_a_process_without_transformers_opens_nothing(tmp_path: Path) -> None:
    """A child that never imports transformers has one thread, no socket, no store and none of kvobs's libraries."""
    code = ("import os, sys; print([name for name in ('msgspec', 'opentelemetry', 'wrapt', 'logging', 'kvobs.config')"
            " if name in sys.modules], len(os.listdir('/proc/self/task')),"
            " [n for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n)"
            " and 'socket' in os.readlink('/proc/self/fd/' + n)])")
    done = _observed(sys.executable, "-c", code, cwd=tmp_path, KVOBS_STORE=str(tmp_path / "store"))
    assert done.stdout == "[] 1 []\n"
    assert not (tmp_path / "store").exists()


_SHADOWED = {
    "plain": "import sys\nsys.told = ('ran', __name__, __file__)\n",
    "raises": "import sys\nsys.told = 'ran'\nraise RuntimeError('from the hidden one')\n",
    "lacks a module": "import no_such_module_of_mine\n",
    "exits": "raise SystemExit(9)\n",
    "syntax error": "def (\n",
}
_TELL = "import sys; print(getattr(sys, 'told', None), getattr(sys.modules.get('sitecustomize'), '__file__', None))"


@pytest.mark.parametrize("kind", _SHADOWED)
def test_a_hidden_sitecustomize_runs_as_if_it_were_alone(kind: str, tmp_path: Path) -> None:
    """The sitecustomize that ours hides runs under its name and file, and what it raises surfaces as without us."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(_SHADOWED[kind])
    # Not through kvobs run: that is a Python process too, and would run the hidden one a second time.
    behind = {"PYTHONPATH": f"{BOOTSTRAP}:{hidden}"}
    command = [sys.executable, "-c", _TELL]
    alone = run_child(command, env=child_environment(PYTHONPATH=str(hidden)), cwd=tmp_path)
    ours = run_child(command, env=child_environment(**behind), cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (alone.returncode, alone.stdout)
    if kind == "exits":  # the interpreter's own traceback names the way there
        assert ours.stderr.splitlines()[-3:] == alone.stderr.splitlines()[-3:]
    else:
        assert ours.stderr == alone.stderr
    if kind != "exits":
        armed = run_child([sys.executable, "-c", f"import sys; print({_ARMED})"], env=child_environment(**behind))
        assert armed.stdout == "True\n"


def test_a_hidden_package_runs_too(tmp_path: Path) -> None:
    """A sitecustomize that is a package can import its own parts."""
    hidden = tmp_path / "sitecustomize"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("import sys\nfrom sitecustomize import part\nsys.told = part.x\n")
    (hidden / "part.py").write_text("x = 5\n")
    assert _observed(sys.executable, "-c", _TELL, cwd=tmp_path, PYTHONPATH=str(tmp_path)).stdout.startswith("5 ")


def test_kvobs_run_below_kvobs_run_arms_once(tmp_path: Path) -> None:
    """Nesting adds neither a second path entry nor a second finder."""
    code = ("import os, sys; print(os.environ['PYTHONPATH'].count('_bootstrap'),"
            " sum(type(finder).__module__ == 'kvobs.autostart' for finder in sys.meta_path))")
    assert _observed(*RUN, sys.executable, "-c", code, cwd=tmp_path).stdout == "1 1\n"


def test_another_interpreter_says_that_it_is_not_observed(tmp_path: Path) -> None:
    """In an environment without kvobs the child runs as ever, with its own path, after one sentence on stderr."""
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    python = tmp_path / "other" / "bin" / "python"
    command = [python, "-c", "import sys; print(sys.path); sys.exit(4)"]
    alone = run_child(command, cwd=tmp_path)
    ours = _observed(*command, cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (alone.returncode, alone.stdout) == (4, alone.stdout)
    assert ours.stderr.count("\n") == 1
    assert "not observed" in ours.stderr
    assert str(python) in ours.stderr
