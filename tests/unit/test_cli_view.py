"""``kvobs view`` before it becomes Streamlit: what it runs, and what it refuses with one sentence."""

from __future__ import annotations

import itertools
import os
import socket
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from kvobs.cli import _view, main
from kvobs.store import StoreWriter
from tests.events import turn


class Became(Exception):
    pass


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The commands that the process became, instead of becoming them; the view's parts count as installed."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def execve(path: str, command: list[str], environ: dict[str, str]) -> None:
        found.append((command, environ))
        raise Became

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(_view, "find_spec", lambda name: name)
    return found


def view(*arguments: str) -> None:
    with pytest.raises(Became):
        main(["view", *arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["view", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.strip()


def test_it_becomes_streamlit_on_loopback(became: list[Any], tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    """The command serves 127.0.0.1 only, without a browser or statistics, unobserved, and says where."""
    view(str(tmp_path), "--port", "0")
    ((command, environ),) = became
    assert command[0] == sys.executable
    words = dict(itertools.pairwise(command))
    assert words["--server.address"] == "127.0.0.1"
    assert words["--browser.gatherUsageStats"] == "false"
    assert words["--server.headless"] == "true"
    assert command[-2:] == ["--", str(tmp_path)]
    assert Path(words["run"]).name == "app.py"
    assert environ["KVOBS_ENABLED"] == "off"
    assert capsys.readouterr().out == f"The live view of {tmp_path} is at http://127.0.0.1:{words['--server.port']}\n"


def test_the_configured_store_may_come_later(became: list[Any], tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument the configured directory is shown, also before anything was written there."""
    monkeypatch.setenv("KVOBS_STORE", str(tmp_path / "later"))
    view()
    assert became[0][0][-1] == str(tmp_path / "later")


def test_a_taken_port(became: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                      capsys: pytest.CaptureFixture[str]) -> None:
    """A port that was named and is taken is refused; the usual one that is taken is replaced by a free one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refused(capsys, str(tmp_path), "--port", str(port)) == (
            f"kvobs: The port {port} cannot be used (address already in use); name another, or 0 for a free one.")
        monkeypatch.setattr(_view, "PORT", port)
        view(str(tmp_path))
        address, _, remark = capsys.readouterr().out.partition(" (")
    assert not address.endswith(f":{port}")
    assert remark == f"port {port} is taken)\n"


def not_a_database(path: Path) -> None:
    path.write_bytes(b"plain text")


def foreign(path: Path) -> None:
    sqlite3.connect(path).execute("CREATE TABLE t (x)").connection.close()


def newer(path: Path) -> None:
    writer = StoreWriter(path.parent / "made", 2**24, "p")
    writer.write([turn()])
    writer.close()
    (made,) = (path.parent / "made").glob("*.sqlite")
    with sqlite3.connect(made) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    made.rename(path)


@pytest.mark.parametrize(("make", "says"), [
    (None, "There is nothing at {}; name a store or a directory of stores."),
    (not_a_database, "{} cannot be read as a kvobs store: file is not a database."),
    (foreign, "{} is an SQLite file but not a kvobs store; name a store or a directory of stores."),
    (newer, "{} was written by a newer kvobs (schema version 99); this one reads versions up to 5."),
])
def test_what_is_no_store_is_refused(became: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any,
                                     says: str) -> None:
    """Exit code 2 and one sentence that names the file and what is allowed."""
    place = tmp_path / "some.sqlite"
    if make is not None:
        make(place)
    assert refused(capsys, str(place)) == "kvobs: " + says.format(place)


def test_a_store_that_is_off(became: list[Any], monkeypatch: pytest.MonkeyPatch,
                             capsys: pytest.CaptureFixture[str]) -> None:
    """Where no store is written and none is named there is nothing to show."""
    monkeypatch.setenv("KVOBS_STORE", "off")
    assert refused(capsys) == "kvobs: The setting 'store' is off; name a store or a directory of stores."


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without Streamlit one sentence says what to install."""
    monkeypatch.setattr(_view, "find_spec", lambda name: None if name == "streamlit" else name)
    assert refused(capsys, str(tmp_path)) == (
        "kvobs: The live view needs streamlit; install with: pip install 'kvobs[app]'.")


def test_an_installation_without_the_pages(became: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """Where the pages are missing that is said, instead of a failure inside Streamlit."""
    monkeypatch.setattr(_view, "PLACES", (tmp_path / "none",))
    monkeypatch.setattr(_view, "_port", lambda wanted: 1)
    assert main(["view", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "kvobs: This installation of kvobs has no live view; install it from its wheel.\n"
