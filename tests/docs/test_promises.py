"""Promises about the project's own files that a machine can keep."""

from __future__ import annotations

import ast
import re
import statistics
import tomllib
from pathlib import Path

import pytest

import kvobs
from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MODULES = sorted((ROOT / "kvobs").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
BESIDE = sorted(path for folder in ("tests", "scripts", "streamlit_app") for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_every_test_says_what_holds(path: Path) -> None:
    """Each test function has a docstring that is a sentence."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            text = ast.get_docstring(node) or ""
            assert re.search(r"[.!?]$", text), f"{node.name} (line {node.lineno}) does not say what holds."


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_no_test_sleeps(path: Path) -> None:
    """Nothing waits for time to pass: real things are awaited with a deadline, other time is a value."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("sleep", "time.sleep"), f"line {node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_modules_are_short_and_say_what_they_are(path: Path) -> None:
    """Every module has a docstring and at most 400 lines, and leaves nothing for later."""
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert text.count("\n") <= 400
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)


@pytest.mark.parametrize("path", BESIDE, ids=name)
def test_other_files_are_short(path: Path) -> None:
    """What stands beside the package has at most 400 lines a file too."""
    assert path.read_text(encoding="utf-8").count("\n") <= 400


def test_modules_are_short_in_the_middle() -> None:
    """The median module has at most 120 lines."""
    assert statistics.median(path.read_text(encoding="utf-8").count("\n") for path in MODULES) <= 120


def test_the_version_is_said_once_more_and_the_same() -> None:
    """Package, project and changelog agree on the version."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert newest is not None
    assert kvobs.__version__ == PROJECT["project"]["version"] == newest[1]


def test_the_ranges_of_what_is_instrumented_agree() -> None:
    """What auto-instrumentation accepts is what the extra installs."""
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras["instruments"]) <= set(extras["torch"])


def test_ci_tests_the_low_end_of_each_range() -> None:
    """The versions that CI pins are the lower bounds that the project states."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"([a-z-]+)==([0-9][0-9a-z.]*)", script))
    stated = [*PROJECT["project"]["dependencies"],
              *(text for extra in ("torch", "otel", "prometheus")
                for text in PROJECT["project"]["optional-dependencies"][extra])]
    bounds = dict(re.fullmatch(r"([a-z-]+)>=([0-9][0-9a-z.]*).*", text).groups() for text in stated)  # type: ignore[union-attr]

    def release(version: str) -> list[int]:
        numbers = [int(number) for number in re.split(r"\.|b\d", version) if number]
        return numbers + [0] * (3 - len(numbers))

    for package in bounds.keys() - {"packaging", "torch"}:  # pip itself brings one, the machine the other
        assert release(pinned[package]) == release(bounds[package]), package
