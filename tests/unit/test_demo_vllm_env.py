"""The environment of the demo's vLLM: asked for, made step by step, gone on with, never taken for ready half-made."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from kvobs.cli import main
from kvobs.lab.demo import _vllm_env, _vllm_pip, run_vllm
from kvobs.lab.demo._errors import DemoError

BESIDE = "Beside --engine vllm only --engine-env, --yes and --json are allowed."
COMPLETE = {"vllm": "0.32.0", "torch": "2.13.0", "lacking": []}


def fake(directory: Path, told: dict[str, object]) -> None:
    """An environment whose Python tells this and nothing else."""
    python = directory / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(told)}\nEND\n")
    python.chmod(0o755)


def always(_: str) -> bool:
    return True


def never(sentence: str) -> bool:
    raise AssertionError(f"Asked: {sentence}")


class Steps:
    """Steps that note that they ran; the last one leaves what tells that all is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.failing = ""
        monkeypatch.setattr(_vllm_env, "STEPS", tuple((name, self._step(name)) for name in ("one", "two", "three")))
        monkeypatch.setattr(_vllm_env, "SPACE_BYTES", 1)

    def _step(self, name: str) -> _vllm_env.Step:
        def run(directory: Path, scratch: Path) -> None:
            assert scratch.is_dir()
            if name == self.failing:
                raise DemoError("There is no network.")
            self.ran.append(name)
            fake(directory, COMPLETE)

        return run  # type: ignore[return-value]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one kind of machine for which there are wheels, and a cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def test_an_environment_that_has_all_is_used_silently(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody is asked and nothing is said or written where vLLM and kvobs's needs are there already."""
    fake(tmp_path / "env", COMPLETE)
    place, found = _vllm_env.environment(tmp_path / "env", consent=never)
    assert (place, found.vllm) == (tmp_path / "env", "0.32.0")
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


def test_the_steps_run_once_and_in_their_order(tmp_path: Path, steps: Steps) -> None:
    """After a yes all steps run, and the second use of the environment runs none and asks nobody."""
    for consent in (always, never):
        assert _vllm_env.environment(tmp_path / "env", consent=consent)[1].ready
    assert steps.ran == ["one", "two", "three"]


def test_a_half_made_environment_is_gone_on_with(tmp_path: Path, steps: Steps) -> None:
    """After a step failed the environment is not ready though its Python says so, and the next run goes on there."""
    steps.failing = "two"
    with pytest.raises(DemoError, match=r"^There is no network\.$"):
        _vllm_env.environment(tmp_path / "env", consent=always)
    assert _vllm_env.look(tmp_path / "env") == _vllm_env.Found()
    steps.failing = ""
    assert _vllm_env.environment(tmp_path / "env", consent=always)[1].ready
    assert steps.ran == ["one", "two", "three"]
    assert not list(tmp_path.glob(".kvobs-pip-*"))


@pytest.mark.parametrize("damage", ["a module is gone", "its Python does not run", "the mark is no list"])
def test_a_complete_environment_that_was_damaged_is_made_anew(tmp_path: Path, steps: Steps, damage: str) -> None:
    """Where one was complete and is so no more, all steps run again."""
    _vllm_env.environment(tmp_path / "env", consent=always)
    if damage == "a module is gone":
        fake(tmp_path / "env", COMPLETE | {"lacking": ["xgrammar"]})
    elif damage == "its Python does not run":
        (tmp_path / "env" / "bin" / "python").unlink()
    else:
        (tmp_path / "env" / "kvobs-environment.json").write_text("[1")
    assert _vllm_env.environment(tmp_path / "env", consent=always)[1].ready
    assert steps.ran == ["one", "two", "three"] * 2


def test_without_a_yes_nothing_is_made(tmp_path: Path, steps: Steps) -> None:
    """The question names size, time and place; after a no there is no trace, and the refusal says what would do."""
    asked: list[str] = []
    with pytest.raises(DemoError, match=r"--engine-env DIR.*--yes\.$") as refusal:
        _vllm_env.environment(tmp_path / "a" / "env", consent=lambda sentence: bool(asked.append(sentence)))
    assert refusal.value.exit_code == 2
    (sentence,) = asked
    assert all(part in sentence for part in ("2.2 GB", "minutes", str(tmp_path / "a" / "env")))
    assert steps.ran == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["files", "a file", "an environment without vLLM"])
def test_what_others_made_is_not_touched(tmp_path: Path, steps: Steps, kind: str) -> None:
    """A directory that is not empty and not of kvobs is refused with what it lacks, whatever is consented to."""
    place = tmp_path / "env"
    if kind == "an environment without vLLM":
        fake(place, {"vllm": "", "torch": "2.13.0", "lacking": ["vllm", "wrapt"]})
    elif kind == "files":
        place.mkdir()
        (place / "letter").write_text("Dear aunt")
    else:
        place.write_text("in the way")
    before = sorted(tmp_path.rglob("*"))
    expected = "lacks vllm, wrapt" if kind == "an environment without vLLM" else "is no Python environment"
    with pytest.raises(DemoError, match=expected):
        _vllm_env.environment(place, consent=always)
    assert sorted(tmp_path.rglob("*")) == before
    assert steps.ran == []


def test_a_full_disk_is_said_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     steps: Steps) -> None:
    """Too little room is one sentence with both sizes."""
    monkeypatch.setattr(_vllm_env, "SPACE_BYTES", 4_000_000_000)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(5e9, 3.5e9, 1.5e9))
    with pytest.raises(DemoError, match=r"^There are 1\.5 GB free .* needs 4\.0\.$"):
        _vllm_env.environment(tmp_path / "env", consent=always)
    assert not (tmp_path / "env").exists()
    assert steps.ran == []


def test_another_kind_of_machine_is_one_sentence(monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no vLLM for the CPU, the demo says so and exits 2."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert run_vllm(yes=True) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvobs: The demo with vLLM runs on Linux on x86-64, and this is Linux on aarch64;")
    assert err.count("\n") == 1


def test_without_a_terminal_nobody_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a script without --yes the demo refuses at once, with what it would have asked."""
    assert run_vllm() == 2
    question, refusal = capsys.readouterr().err.splitlines()
    assert "2.2 GB" in question
    assert refusal.startswith("kvobs: Nothing was installed")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--engine", "sglang"], "--engine: 'sglang' is not known; allowed is vllm."),
    (["--yes"], "--yes and --engine-env belong to --engine vllm."),
    (["--engine-env", "there"], "--yes and --engine-env belong to --engine vllm."),
    (["--engine", "vllm", "--turns", "3"], BESIDE),
    (["--engine", "vllm", "--scenario", "oom"], BESIDE),
])
def test_options_that_do_not_go_together_are_refused(arguments: list[str], sentence: str,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """Each refusal is one sentence and exit code 2."""
    assert main(["demo", *arguments]) == 2
    assert capsys.readouterr().err == f"kvobs: {sentence}\n"


def test_a_pip_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip complained of last ends the sentence; which step it was begins it."""
    pytest.importorskip("pip", reason="This Python has no pip.")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DemoError) as refusal:
        _vllm_pip.run(Path(sys.executable), ["download", f"--dest={tmp_path}", "kvobs-has-no-such==1"],
                      "Downloading it", tmp_path)
    assert str(refusal.value) == ("Downloading it failed: pip download said: No matching distribution found for "
                                  "kvobs-has-no-such==1.")


def test_a_wheel_says_what_it_needs(tmp_path: Path) -> None:
    """Extras, other platforms and what is left out are not among the needs; versions and extras of needs stay."""
    lines = ["Metadata-Version: 2.1", "Name: engine", "Version: 1", "Requires-Dist: regex",
             "Requires-Dist: fastapi[standard]<0.137.0,>=0.133.0", "Requires-Dist: Torch==2.13.0+cpu",
             "Requires-Dist: pandas; extra == 'bench'", "Requires-Dist: clang; platform_system == 'Nowhere'",
             "Requires-Dist: lark==1.2.2; python_version >= '3.11'"]
    wheel = tmp_path / "engine-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("engine-1.dist-info/METADATA", "\n".join(lines) + "\n\nRequires-Dist: not-a-header\n")
    assert _vllm_pip.needs(wheel, frozenset({"torch"})) == [
        "regex", "fastapi[standard]<0.137.0,>=0.133.0", "lark==1.2.2"]
    wheel.write_bytes(wheel.read_bytes()[:60])
    with pytest.raises(DemoError, match=r"^The downloaded engine-1-py3-none-any\.whl cannot be read"):
        _vllm_pip.needs(wheel, frozenset())
