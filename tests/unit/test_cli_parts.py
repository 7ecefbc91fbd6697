"""The pure parts of the command line: which interpreters are unseen, what a child's environment is, refusals."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvobs import config
from kvobs.cli import main
from kvobs.cli._interpreter import unseen_flags
from kvobs.cli._probes import library, metrics_endpoint, otlp, probe, store
from kvobs.cli._run import BOOTSTRAP, child_environment
from tests.support import free_port

_SEEN = "import sys; print('kvobs.autostart' in sys.modules)"


@pytest.mark.parametrize("options", [
    ["-I"], ["-E"], ["-S"], ["-IS"], ["-Ic"], ["-bES"], ["-W", "ignore", "-E"], ["-Wignore", "-I"],
    ["-X", "dev", "-S"], ["-Xdev", "-I"], ["-u", "-s"], ["-c"], ["-b", "-u"], ["-W", "-E"],
    ["--check-hash-based-pycs", "never", "-I"], ["-uB"],
])
def test_the_parser_of_options_agrees_with_the_interpreter(options: list[str]) -> None:
    """An option list is called unseen exactly when a real interpreter given it does not run our sitecustomize."""
    command = [sys.executable, *options, *([] if options[-1].endswith("c") else ["-c"]), _SEEN]
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(BOOTSTRAP)}, capture_output=True, text=True,
                         check=True)
    assert bool(unseen_flags(command, os.environ)) == (ran.stdout.strip() == "False")


@pytest.mark.parametrize("command", [
    ["python", "-c", "x", "-I"], ["python3.11", "x.py", "-E"], ["python", "-m", "x", "-S"], ["grep", "-I", "x"],
    ["python", "--", "-I"], ["python", "-", "-I"],
])
def test_options_of_the_program_are_not_the_interpreters(command: list[str]) -> None:
    """What stands after the script, -c, -m or -- belongs to the program, as do the options of other commands."""
    assert unseen_flags(command, os.environ) == []


@pytest.mark.parametrize(("line", "flags"), [("#!/usr/bin/python3 -I", ["-I"]), ("#!/usr/bin/env -S python -E", ["-E"]),
                                             ("#!/usr/bin/env python", []), ("#!/bin/sh -E", [])])
def test_the_first_line_of_a_script_counts(tmp_path: Path, line: str, flags: list[str]) -> None:
    """The options in a script's #! line are found, whether or not env stands before the interpreter."""
    script = tmp_path / "tool"
    script.write_text(line + "\n")
    script.chmod(0o755)
    assert unseen_flags(["tool"], {"PATH": str(tmp_path)}) == flags


@pytest.mark.parametrize(("before", "after"), [
    (None, [str(BOOTSTRAP)]), ("", [str(BOOTSTRAP)]), ("/a:/b", [str(BOOTSTRAP), "/a", "/b"]),
    (":/a", [str(BOOTSTRAP), "", "/a"]), (f"/a:{BOOTSTRAP}:/b", [str(BOOTSTRAP), "/a", "/b"]),
])
def test_pythonpath_is_kept_behind_the_bootstrap(before: str | None, after: list[str]) -> None:
    """The bootstrap directory comes first and once; every other entry keeps its place."""
    environ = {} if before is None else {"PYTHONPATH": before}
    assert child_environment(environ, {})["PYTHONPATH"].split(os.pathsep) == after


def test_only_the_childs_environment_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options become KVOBS_* of the child, relative paths become absolute, and nothing else differs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvobs.toml").write_text("window_ms = 5\n")
    before = dict(os.environ)
    child = child_environment({"HOME": "/h", "KVOBS_OTLP": "on"}, {"store": "here", "otlp": "off"}, "kvobs.toml")
    assert child == {"HOME": "/h", "KVOBS_OTLP": "off", "KVOBS_STORE": str(tmp_path / "here"),
                     "KVOBS_CONFIG": str(tmp_path / "kvobs.toml"), "PYTHONPATH": str(BOOTSTRAP)}
    assert dict(os.environ) == before


@pytest.mark.parametrize(("arguments", "named"), [
    (["frob"], "frob"), (["doctor", "--frob"], "--frob"), (["run", "--frob", "--", "true"], "--frob"),
    (["run", "--window-ms", "0", "--", "true"], "window_ms"), (["run", "--otlp", "maybe", "--", "true"], "otlp"),
    (["run"], "command"), (["run", "--"], "command"), (["run", "--config", "/no/such", "--", "true"], "/no/such"),
    (["catalog", "--json", "--markdown"], "--markdown"), (["export"], "--parquet"),
    (["export", "/no/such", "--parquet", "/tmp/x"], "/no/such"), ([], "command"),
])
def test_a_refusal_is_one_sentence_and_exit_code_2(arguments: list[str], named: str,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be done is named in one line on stderr, nothing goes to stdout, and the exit code is 2."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvobs: ")
    assert err.count("\n") == 1
    assert named in err


def test_a_bad_environment_is_refused_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad KVOBS_ variable stops the commands that read the configuration, with its name in the sentence."""
    monkeypatch.setenv("KVOBS_WINDOW_MS", "soon")
    for arguments in (["run", "--", "true"], ["doctor"], ["export", "--parquet", "x"]):
        assert main(arguments) == 2
        assert "KVOBS_WINDOW_MS" in capsys.readouterr().err


def test_the_catalog_is_shown_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    """Table, Markdown and JSON name every row of the catalog."""
    import json

    from kvobs.catalog import ROWS, markdown

    assert main(["catalog", "--markdown"]) == 0
    assert capsys.readouterr().out == markdown()
    assert main(["catalog", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [row.name for row in ROWS]
    assert main(["catalog"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [row.name for row in ROWS]


def test_doctor_notices_a_taken_address() -> None:
    """The metrics address is called free when it is and taken while somebody listens there."""
    port = free_port()
    settings = config.load({}, prometheus=f"127.0.0.1:{port}")
    assert "is free" in metrics_endpoint(settings).reason
    with socket.create_server(("127.0.0.1", port)):
        assert "already in use" in metrics_endpoint(settings).reason  # another port is taken: still available
    assert not metrics_endpoint(config.load({}, prometheus="off")).available


def test_doctor_tries_the_otlp_endpoints() -> None:
    """An endpoint is available exactly while somebody accepts connections there; each signal has its own."""
    port = free_port()
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{port}/v1/traces",
               "OTEL_EXPORTER_OTLP_ENDPOINT": f"127.0.0.1:{free_port()}"}
    with socket.create_server(("127.0.0.1", port)):
        assert [fact.available for fact in otlp(config.load({}), environ)] == [True, False]
    assert [fact.available for fact in otlp(config.load({}), environ)] == [False, False]
    assert not any(fact.available for fact in otlp(config.load({}, otlp="off"), environ))
    assert not any(fact.available for fact in otlp(config.load({}), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://:x"}))


def test_doctor_judges_the_store_without_making_it(tmp_path: Path) -> None:
    """A directory that could be made is available, one below a file is not, and asking creates nothing."""
    (tmp_path / "file").write_text("")
    assert store(config.load({}, store=str(tmp_path / "a" / "b"))).available
    assert not store(config.load({}, store=str(tmp_path / "file" / "b"))).available
    assert not store(config.load({}, store="off")).available
    assert [path.name for path in tmp_path.iterdir() if path.name != "state"] == ["file"]


def test_doctor_says_how_to_install_what_is_missing() -> None:
    """A project that is not installed is answered with the pip line of its extra."""
    fact = library("no-such-project-at-all", None, "otel")
    assert not fact.available
    assert "pip install 'kvobs[otel]'" in fact.reason


def test_every_finding_is_a_whole_sentence() -> None:
    """Each line of doctor ends in a full stop and stays on one line, also when kvobs is off."""
    for settings in (config.load({}), config.load({}, enabled="off", store="off", prometheus="off", otlp="on")):
        for fact in probe(settings, {}):
            assert fact.reason.endswith(".")
            assert "\n" not in fact.reason
