"""``kvobs run`` is not noticed: what a command does, prints and returns is the same with and without it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import child_environment

RUN = [sys.executable, "-m", "kvobs", "run", "--"]
PYTHON = sys.executable
_SCRIPT = """import sys
def inner():
    raise KeyError("deep")
print("out", sys.argv[1:], flush=True)
print("err", file=sys.stderr)
inner()
"""


def _both(command: list[str | bytes], cwd: Path, **more: object) -> list[tuple[int, bytes, bytes]]:
    ended = []
    for prefix in ([], RUN):
        done = subprocess.run([*prefix, *command], cwd=cwd, env=child_environment(), capture_output=True,
                              timeout=120, check=False, **more)  # type: ignore[call-overload]
        ended.append((done.returncode, done.stdout, done.stderr))
    return ended


@pytest.mark.parametrize("command", [
    [PYTHON, "-c", "raise SystemExit(3)"],
    [PYTHON, "-c", "import os; os._exit(200)"],
    [PYTHON, "-c", "import sys; sys.exit('words')"],
    [PYTHON, "-c", "1/0"],
    [PYTHON, "-c", "def ("],
    [PYTHON, "no_such_script.py"],
    [PYTHON, "-m", "no_such_module"],
    [PYTHON, "script.py", "--", "-I", "--store", "x", ""],
    [PYTHON, "-m", "script", "a b"],
    [PYTHON, "-c", "import sys, os; print(os.fsencode(sys.argv[1]))", b"\xff\xfe"],
    [PYTHON, "-c", "import sys; print(sys.path, sys.argv, sys.orig_argv, sys.flags, sys.warnoptions)"],
    [PYTHON, "-X", "dev", "-W", "error", "-c", "import sys; print(sys.flags)"],
    [PYTHON, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
    [PYTHON, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    [PYTHON, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"],
    [PYTHON, "-m", "pip", "--version"],
    [str(Path(PYTHON).with_name("pip")), "--version"],
    ["sh", "-c", "grep -E 'SigIgn|SigBlk|SigCgt' /proc/self/status; ls -l /proc/self/fd | wc -l; exit 7"],
    ["sh", "-c", "kill -9 $$"],
    ["sh", "-c", "yes | head -1"],
])
def test_a_command_behaves_the_same(command: list[str | bytes], tmp_path: Path) -> None:
    """Exit status or signal, stdout and stderr are byte for byte those of the command alone."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    alone, observed = _both(command, tmp_path)
    assert observed == alone


def test_standard_input_is_the_commands(tmp_path: Path) -> None:
    """Bytes written to kvobs run arrive at the command unchanged."""
    alone, observed = _both([PYTHON, "-c", "import sys; print(sys.stdin.buffer.read())"], tmp_path, input=b"a\0\xffz")
    assert observed == alone
    assert alone[1].startswith(b"b'a")


def test_the_terminal_is_the_commands(tmp_path: Path) -> None:
    """On a terminal the command sees that terminal on all three standard streams and is its process group leader."""
    told = []
    code = ("import os; print([os.isatty(n) for n in (0, 1, 2)], os.ttyname(0) == os.ttyname(1), "
            "os.getpid() == os.getsid(0))")
    for prefix in ([], RUN):
        ours, theirs = pty.openpty()
        try:
            subprocess.run([*prefix, PYTHON, "-c", code], env=child_environment(), cwd=tmp_path, stdin=theirs,
                           stdout=theirs, stderr=theirs, start_new_session=True, timeout=60, check=True)
            told.append(os.read(ours, 1000))
        finally:
            os.close(ours)
            os.close(theirs)
    assert told[0] == told[1]
    assert b"[True, True, True] True True" in told[1]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_command_itself(sent: signal.Signals, tmp_path: Path) -> None:
    """The process that was started is the command: a signal to it ends it with that signal's wait status."""
    # The tests themselves may run with SIGHUP ignored, which children inherit.
    code = f"""
import os, signal
signal.signal({int(sent)}, signal.SIG_DFL)
print(os.getpid(), flush=True)
signal.pause()"""
    child = subprocess.Popen([*RUN, PYTHON, "-c", code], env=child_environment(), cwd=tmp_path, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert child.stdout is not None
        assert int(child.stdout.readline()) == child.pid
        child.send_signal(sent)
        assert child.wait(timeout=60) == -sent
    finally:
        child.kill()
        child.communicate()


def test_only_kvobs_variables_and_pythonpath_differ(tmp_path: Path) -> None:
    """The command's environment is the caller's plus KVOBS_* and PYTHONPATH."""
    command = ["env", "-0"]
    (_, alone, _), (_, observed, _) = _both(command, tmp_path)  # type: ignore[arg-type]
    changed = set(alone.split(b"\0")) ^ set(observed.split(b"\0"))
    assert {entry.partition(b"=")[0] for entry in changed} <= {b"PYTHONPATH", b"_"} | {
        entry.partition(b"=")[0] for entry in changed if entry.startswith(b"KVOBS_")}
    assert any(entry.startswith(b"PYTHONPATH=") for entry in changed)


def test_a_bad_setting_stops_before_the_command(tmp_path: Path) -> None:
    """With a refused setting the command is not started at all."""
    done = subprocess.run([*RUN[:-1], "--window-ms", "x", "--", "touch", "started"], cwd=tmp_path, capture_output=True,
                          env=child_environment(), check=False)
    assert done.returncode == 2
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(("name", "code"), [("no-such-command", 127), ("./plain", 126), ("./", 126), ("./broken", 126)])
def test_a_command_that_cannot_run_is_answered_as_a_shell_does(name: str, code: int, tmp_path: Path) -> None:
    """127 for a command that does not exist and 126 for one that cannot be executed, with one sentence."""
    (tmp_path / "plain").write_text("text")
    (tmp_path / "broken").write_bytes(b"\0\1\2")
    (tmp_path / "broken").chmod(0o755)
    shell = subprocess.run(["bash", "-c", name], cwd=tmp_path, capture_output=True, check=False)
    done = subprocess.run([*RUN, name], cwd=tmp_path, env=child_environment(), capture_output=True, text=True,
                          check=False)
    assert done.returncode == shell.returncode == code
    assert done.stderr.count("\n") == 1
    assert name in done.stderr


def test_isolated_interpreters_are_announced(tmp_path: Path) -> None:
    """python -I runs unobserved after one sentence that says so."""
    alone, observed = _both([PYTHON, "-I", "-c", "print(1)"], tmp_path)
    assert observed[:2] == alone[:2]
    assert observed[2].count(b"\n") == 1
    assert b"not observed" in observed[2]


def test_the_exit_is_awaited_by_nobody_else(tmp_path: Path) -> None:
    """No process of kvobs stays between the caller and the command: the command's parent is the caller."""
    done = subprocess.run([*RUN, PYTHON, "-c", "import os; print(os.getppid())"], cwd=tmp_path, check=True,
                          env=child_environment(), capture_output=True, text=True)
    assert int(done.stdout) == os.getpid()
