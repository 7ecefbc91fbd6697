"""A policy's file changes under a breaker that runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvobs import model
from kvobs.breaker import PolicyError, Protection
from kvobs.breaker._policy_file import MOST_BYTES, PolicyFile
from kvobs.config import Config
from kvobs.metrics import Metrics

SECOND = 10**9


def text(name: str, *limits: float, signal: str = "app.load") -> str:
    return f'name = "{name}"\nescalate = "1s"\njitter = 0\n' + "".join(
        f'[[level]]\nany = [{{ signal = "{signal}", above = {limit} }}]\nopen = "10s"\n' for limit in limits)


class Scene:
    """A process with a breaker, ticked once a second under a load."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "policy.toml"
        self.file.write_text(text("first", 1, 2, 3))
        self.protection = Protection(Config(store=None, breaker="act", breaker_policy=str(self.file)), "one", Metrics(),
                                     list)
        self.now, self.facts = 0, dict[str, model.Availability]()

    def under(self, load: float, seconds: int = 1) -> list[model.Decided]:
        told: list[model.Event] = []
        for _ in range(seconds):
            self.now += SECOND
            self.protection.report("app.load", load, self.now)
            self.protection.follow(self.now, told, [], True)
        self.facts |= {one.subject: one for one in told if isinstance(one, model.Availability)}
        return [one for one in told if isinstance(one, model.Decided)]

    @property
    def level(self) -> int:
        assert self.protection.breaker is not None
        return self.protection.breaker.levels()["process"]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    found = Scene(tmp_path)
    yield found
    found.protection.stop(found.now)


def test_a_good_file_replaces_the_policy_and_levels_stay(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Level 2 is open under the first policy and stays open under one that would not have opened it, until its own time
    is over; one line says so, and decisions have the new name.
    """
    scene.under(2.5, 4)
    assert (scene.level, scene.facts["breaker policy"].reason) == (2, f"first of {scene.file}.")
    scene.file.write_text(text("second", 5, 6, 7))
    assert scene.under(2.5, 4) == []
    assert (scene.level, scene.facts["breaker policy"].reason) == (2, f"second of {scene.file}, reloaded once.")
    decided = scene.under(2.5, 30)
    assert scene.level == 0
    assert {one.policy for one in decided} == {"second"}
    assert [one.after for one in decided if one.level == 2] == ["half-open", "closed"]
    assert scene.under(5.5)[0].reason == "Level 1 (reorganise) is open: its condition holds."
    assert caplog.text.count("goes on under the policy second, reloaded") == 1


@pytest.mark.parametrize(("bad", "sentence"), [
    ("name = ", "is not TOML"), (text("x", 1, 2), "needs 3 tables headed [[level]]"),
    (text("x", 1, 2, 3).replace("above", "abve"), "did you mean 'above'?")])
def test_a_bad_file_is_refused_once_and_the_old_policy_stays(scene: Scene, bad: str, sentence: str,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    """One line says why; the first policy goes on, a fact says what is wrong with the file, and once the file is mended
    nothing is wrong any more.
    """
    scene.under(1.5, 2)
    scene.file.write_text(bad)
    scene.under(2.5, 10)
    assert scene.level == 2
    assert [sentence in record.getMessage() for record in caplog.records if "keeps the policy" in record.getMessage()
            ] == [True]
    assert not scene.facts["breaker policy file"].available
    assert sentence in scene.facts["breaker policy file"].reason
    scene.file.write_text(text("first", 1, 2, 3) + "# mended\n")
    scene.under(2.5, 3)
    assert scene.facts["breaker policy file"] == model.Availability("breaker policy file", True, "")
    assert scene.facts["breaker policy"].reason == f"first of {scene.file}."


def test_signals_are_judged_by_the_policy_in_force(scene: Scene) -> None:
    """A signal that only the new policy names is untold from then on; one that only the old named is not asked for."""
    scene.file.write_text(text("first", 1, 2, 3, signal="app.never"))
    scene.under(0.0, 3)
    assert not scene.facts["breaker signal app.never"].available
    scene.file.write_text(text("third", 1, 2, 3, signal="app.other"))
    scene.under(0.0, 3)
    assert "asks for it no more" in scene.facts["breaker signal app.never"].reason
    assert scene.facts["breaker signal app.other"].reason.startswith("Nothing in this process has told it yet")


def test_a_file_counts_once_it_was_the_same_for_two_looks(tmp_path: Path) -> None:
    """What an editor writes in three pieces is taken as a whole, once; neither piece alone is taken or refused."""
    path = tmp_path / "policy.toml"
    file, whole = PolicyFile(path), text("mine", 1, 2, 3)
    for end in (20, len(whole) - 8, len(whole)):
        path.write_text(whole[:end])
        assert file.look() is None
    found = file.look()
    assert found is not None
    assert found.name == "mine"
    assert [file.look() for _ in range(3)] == [None] * 3


def test_a_text_is_seen_whatever_the_file_s_times_say(tmp_path: Path) -> None:
    """A file rewritten with the same length, number and time of change is another text all the same."""
    path = tmp_path / "policy.toml"
    path.write_text(text("aaaa", 1, 2, 3))
    file, times = PolicyFile(path), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    file.look()
    assert getattr(file.look(), "name", "") == "aaaa"
    path.write_text(text("bbbb", 1, 2, 3))
    os.utime(path, ns=times)
    file.look()
    assert getattr(file.look(), "name", "") == "bbbb"


def test_a_link_that_is_turned_is_followed(tmp_path: Path) -> None:
    """A link to another file is another policy, which is how volumes of Kubernetes change."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(text(name, 1, 2, 3))
    path = tmp_path / "policy.toml"
    path.symlink_to("one")
    file = PolicyFile(path)
    file.look()
    assert getattr(file.look(), "name", "") == "one"
    path.unlink()
    path.symlink_to("two")
    file.look()
    assert getattr(file.look(), "name", "") == "two"


@pytest.mark.parametrize(("what", "sentence"), [
    ("gone", "cannot be read: No such file or directory."), ("pipe", "is not a file."), ("folder", "is not a file."),
    ("long", f"has more than {MOST_BYTES} bytes."), ("bytes", "cannot be read: 'utf-8' codec")])
def test_what_is_no_file_is_told_once_and_waited_for_by_nobody(tmp_path: Path, what: str, sentence: str) -> None:
    """One sentence, at the second look; then silence until it changes."""
    path = tmp_path / "policy.toml"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what != "gone":
        path.write_bytes(b"\xff" if what == "bytes" else b"#" * (MOST_BYTES + 1))
    file = PolicyFile(path)
    assert file.look() is None
    with pytest.raises(PolicyError) as caught:
        file.look()
    assert str(caught.value).startswith(f"The policy {path} ")
    assert sentence in str(caught.value)
    assert file.look() is None


def test_the_file_is_the_one_of_the_start_wherever_the_process_goes(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is of the directory in which the process was when it began."""
    (tmp_path / "policy.toml").write_text(text("mine", 1, 2, 3))
    monkeypatch.chdir(tmp_path)
    file = PolicyFile(Path("policy.toml"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.look()
    assert getattr(file.look(), "name", "") == "mine"


def test_presets_have_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file in the working directory that is called as a preset is not read."""
    (tmp_path / "default").write_text("nothing")
    monkeypatch.chdir(tmp_path)
    protection = Protection(Config(store=None, breaker="observe"), "one", Metrics(), list)
    told: list[model.Event] = []
    for second in range(1, 5):
        protection.follow(second * SECOND, told, [], True)
    facts = {one.subject: one for one in told if isinstance(one, model.Availability)}
    assert facts["breaker policy"].reason == "default."
    assert "breaker policy file" not in facts
