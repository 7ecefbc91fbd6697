"""Every example of the documentation runs, as it stands on the page."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import ROOT, child_environment, run_child

PAGES = ("README.md", "CONTRIBUTING.md")
EXECUTED = ("python", "console")
# Languages that only show something.
SHOWN = ("text", "json", "toml", "yaml", "promql", "ini", "mermaid")
# What a console example may call: anything else needs a skip with its reason, or a line here.
ALLOWED = ("kvobs", "python", "opentelemetry-instrument", "make", "cat", "ls")
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A fenced block. ``skip`` is the reason of ```` ```console skip=needs-a-gpu ````."""

    page: str
    line: int
    language: str
    skip: str
    body: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def examples_of(page: str, text: str) -> list[Example]:
    """The fenced blocks of a page, with the line on which each begins."""
    found = []
    for match in _FENCE.finditer(text):
        language, _, options = match["info"].strip().partition(" ")
        skip = options.removeprefix("skip=").replace("-", " ") if options.startswith("skip=") else ""
        found.append(Example(page, text.count("\n", 0, match.start()) + 1, language, skip, match["body"]))
    return found


def commands_of(body: str) -> list[tuple[str, list[str]]]:
    """The ``$ `` lines of a console block (continued ones joined), each with the output lines shown below it."""
    commands: list[tuple[str, list[str]]] = []
    for line in body.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        elif commands and line.strip():
            commands[-1][1].append(line)
    return commands


def allowed(command: str) -> str:
    """The program that a command calls, without the variables set before it."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
        words.pop(0)
    program = Path(words[0]).name if words else ""
    assert program in ALLOWED, f"{program!r} is not in the list of what an example may call: {', '.join(ALLOWED)}."
    return program


ALL = [example for page in PAGES for example in examples_of(page, (ROOT / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("example", ALL, ids=str)
def test_an_example_is_of_a_known_kind(example: Example) -> None:
    """Every block says its language, so that none escapes being run by having none."""
    assert example.language in EXECUTED + SHOWN


@pytest.mark.parametrize("example", [e for e in ALL if e.language == "python"], ids=str)
def test_a_python_example_runs(example: Example, tmp_path: Path) -> None:
    """The block is a whole program that ends without an error in a fresh interpreter."""
    if example.skip:
        pytest.skip(f"{example}: {example.skip}.")
    program = tmp_path / "example.py"
    program.write_text(example.body, encoding="utf-8")
    done = run_child([sys.executable, program], env=environment(tmp_path), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, f"{example}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("example", [e for e in ALL if e.language == "console"], ids=str)
def test_a_console_example_runs(example: Example, tmp_path: Path) -> None:
    """Each command exits 0, and every line of output that the page shows is printed, `...` standing for anything."""
    if example.skip:
        pytest.skip(f"{example}: {example.skip}.")
    commands = commands_of(example.body)
    assert commands, f"{example} has no line that begins with '$ '."
    for command, shown in commands:
        folder = ROOT if allowed(command) == "make" else tmp_path
        done = run_child(["bash", "-c", command], env=environment(tmp_path), cwd=folder, timeout=600)
        assert done.returncode == 0, f"{example}: {command}\n{done.stdout}{done.stderr}"
        printed = done.stdout + done.stderr
        for line in shown:
            pattern = ".*".join(re.escape(part) for part in line.strip().split("..."))
            assert re.search(pattern, printed), f"{example}: {command} did not print {line!r} but\n{printed}"


def environment(folder: Path) -> dict[str, str]:
    """A child environment in which this environment's programs are found first."""
    return child_environment(PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                             XDG_STATE_HOME=str(folder / "state"), KVOBS_PROMETHEUS="127.0.0.1:0")


def test_examples_are_found_with_their_skips() -> None:
    """Language, skip reason and line come from the fence; other text is no example."""
    text = "Text\n```python\nprint(1)\n```\n`inline`\n```console skip=needs-a-gpu\n$ kvobs doctor\n```\n"
    assert examples_of("P", text) == [Example("P", 2, "python", "", "print(1)\n"),
                                      Example("P", 6, "console", "needs a gpu", "$ kvobs doctor\n")]


def test_commands_and_their_output_are_told_apart() -> None:
    """A continued command is one command, and what follows it is its output."""
    assert commands_of("$ kvobs a \\\n    b\nout 1\n\nout 2\n$ ls\n") == [
        ("kvobs a      b", ["out 1", "out 2"]), ("ls", [])]


@pytest.mark.parametrize("command", ["kvobs doctor", "A=1 B=2 python -c 'x'", ".venv/bin/kvobs demo"])
def test_allowed_commands(command: str) -> None:
    """Variables and a path before the program's name do not matter."""
    assert allowed(command) in ALLOWED


@pytest.mark.parametrize("command", ["rm -rf /", "A=1 curl x", ""])
def test_other_commands_are_refused(command: str) -> None:
    """A page cannot make the tests run just anything."""
    with pytest.raises(AssertionError, match="not in the list"):
        allowed(command)
