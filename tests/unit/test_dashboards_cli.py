"""``kvobs dashboards``: what it writes, what it leaves alone and what it refuses."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from kvobs import dashboards
from kvobs.cli import _dashboards as command
from kvobs.cli import main
from kvobs.dashboards import rules


@pytest.mark.parametrize(("options", "form"), [((), "provisioned"), (("--form", "provisioned"), "provisioned"),
                                               (("--form", "grafana.com"), "grafana.com")])
def test_all_files_are_written_and_named(options: tuple[str, ...], form: dashboards.Form, tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Boards and rules are written as the package gives them, each path is printed, and nothing temporary is left."""
    monkeypatch.setattr(rules, "files", lambda objectives, runbooks, boards: {
        "rules/a.yaml": f"{objectives[0].name} {runbooks} {boards}\n"})
    out = tmp_path / "new" / "boards"
    code = main(["dashboards", "--out", str(out), *options, "--runbooks", "https://a/b/", "--dashboards", "https://g/"])
    assert code == 0
    found = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}
    books = {name: text for name, text in found.items() if name.startswith("runbooks/")}
    assert found == {**dashboards.boards(form), **books, "rules/a.yaml": "allocation-latency https://a/b https://g\n"}
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(str(out / name) for name in found)


def test_the_runbook_of_every_alert_is_written_where_it_links_to(tmp_path: Path) -> None:
    """A relative link of each alert, taken from the directory, leads to a file that was written."""
    if not dashboards.runbooks():
        pytest.skip("This installation has no runbooks: neither the wheel's nor a clone's.")
    assert main(["dashboards", "--out", str(tmp_path)]) == 0
    links = re.findall(r'runbook_url: "?([^"\n]+)', (tmp_path / "rules" / "kvobs-alerts.yaml").read_text())
    assert {link.rpartition("/")[2] for link in links} == {f"{name}.md" for name in rules.NAMES}
    assert all((tmp_path / link).is_file() for link in links)


def test_other_files_stay_and_old_boards_are_replaced(tmp_path: Path) -> None:
    """A directory's other files are not touched; a board of the same name is replaced as a whole, and readable."""
    (tmp_path / "mine.json").write_text("{}")
    board = tmp_path / "kvobs-overview.json"
    board.write_text("old" * 10**6)
    assert main(["dashboards", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "mine.json").read_text() == "{}"
    assert json.loads(board.read_text())["uid"] == "kvobs-overview"
    assert board.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(("options", "sentence"), [
    (["--form", "yaml"], "kvobs: The form is 'yaml'; allowed are provisioned and grafana.com.\n"),
    (["--runbooks", "a b"], "kvobs: The address that --runbooks gives is 'a b'; allowed is a URL without blanks.\n"),
    (["--dashboards", "a\nb"], "kvobs: The address that --dashboards gives is 'a\\nb'; "
                               "allowed is a URL without blanks.\n"),
])
def test_what_is_refused_is_one_sentence(options: list[str], sentence: str, tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option is one sentence and exit code 2, and nothing is written."""
    assert main(["dashboards", "--out", str(tmp_path / "out"), *options]) == 2
    assert capsys.readouterr().err == sentence
    assert list(tmp_path.iterdir()) == []


def test_a_rule_that_could_never_fire_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """What the rules refuse about the configured objectives is the sentence, and nothing is written."""
    def blind(objectives: object, runbooks: str, boards: str) -> dict[str, str]:
        raise ValueError("The alert A can never fire.")

    monkeypatch.setattr(rules, "files", blind)
    assert main(["dashboards", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "kvobs: The alert A can never fire.\n"
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the directory cannot be made, the sentence says so."""
    (tmp_path / "out").write_text("")
    assert main(["dashboards", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvobs: The dashboards cannot be written to {tmp_path / 'out'}: ")
    assert error.count("\n") == 1


def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    """When the disk is full midway, old files are as they were and no temporary one is left."""
    before = {"kvobs-overview.json": "old overview", "kvobs-fleet.json": "old fleet"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    real, calls = os.fdopen, []

    def full(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(command.os, "fdopen", full)
    assert main(["dashboards", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"kvobs: The dashboards cannot be written to {tmp_path}: no space left on device.\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_directory_in_a_board_s_place_is_refused_before_anything_is_replaced(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that is named like a board is kept, and so is every other file."""
    (tmp_path / "kvobs-telemetry.json").mkdir()
    assert main(["dashboards", "--out", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kvobs-telemetry.json"]
